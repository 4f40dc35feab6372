"""A config as text, and as the hash by which generator and learner know that they mean the same run."""

import hashlib
import json
import re
from typing import Any

import yaml

from asyncrl.config.document import SCALARS
from asyncrl.config.registry import needs
from asyncrl.config.schema import Config

SHARED: dict[str, tuple[str, ...]] = {
    "run": ("seed",),
    "model": ("path", "revision", "dtype", "chat_template"),
    "data": ("train", "eval", "prompt_field", "template", "system", "split", "eval_split", "shuffle"),
    "reward": ("functions",),
    "batch": ("groups", "group_size"),
    "sampling": ("temperature", "max_prompt_tokens", "max_response_tokens", "stop"),
    "staleness": ("max_lag", "window_groups"),
    "store": ("shards",),
    "weights": ("transport", "bucket_mib", "probe_tokens", "probe_limit"),
    "learner": ("steps",),
    "eval": ("prompts", "samples", "temperature", "every"),
}
"""What both sides must agree on: which prompt a ticket id means, how it is sampled and scored, how weights arrive.

`learner.steps` and `eval.every` say which weights a round of evaluation needs. A run may be resumed with other values: its
supervisor starts its generators with them; those that joined from elsewhere are refused when they come back, and leave.

Not in it, because one side alone reads it: the algorithm (but for `wants_greedy`), generator, checkpoint and telemetry
parts, and the rest of the learner's and the store's.
"""


BREAKS = set("\x85\u2028\u2029\ufeff")


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would read as something else."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Line breaks that only YAML knows survive in double quotes alone."""
        style = '"' if BREAKS & set(text) else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)
for _tag, _pattern in SCALARS.items():
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), None)


def dump_config(config: Config) -> str:
    """YAML that loads back to an equal config; every default is written out."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def config_json(config: Config) -> str:
    """The whole config as one line of JSON, the same for equal configs."""
    return _canonical(config.model_dump(mode="json"))


def config_hash(config: Config) -> str:
    """16 hex digits over the `SHARED` fields and `wants_greedy`: equal for processes that may work on the same run."""
    shared: dict[str, Any] = {
        part: getattr(config, part).model_dump(mode="json", include=set(fields)) for part, fields in SHARED.items()
    }
    shared["greedy"] = wants_greedy(config)
    return hashlib.sha256(_canonical(shared).encode()).hexdigest()[:16]


def host_digest(config: Config) -> str:
    """16 hex digits over what a config makes a generator's host do: which code, in which sandbox, with which variables."""
    parts = config.model_dump(mode="json", include={"run": {"environment"}, "model": True, "reward": True})
    return hashlib.sha256(_canonical(parts).encode()).hexdigest()[:16]


def eval_digest(config: Config) -> str:
    """8 hex digits over what held-out evaluation asks, and how answers are sampled and scored; not when, nor how many."""
    asked = {
        "data": config.data.model_dump(mode="json", include={"eval", "eval_split"}),
        "reward": config.reward.model_dump(mode="json", include={"functions"}),
        "sampling": config.sampling.model_dump(mode="json", exclude={"temperature"}),
        "eval": config.eval.model_dump(mode="json", include={"samples", "temperature"}),
    }
    return hashlib.sha256(_canonical(asked).encode()).hexdigest()[:8]


def wants_greedy(config: Config) -> bool:
    """Whether generators sample a greedy response per ticket: all that they need to know of the algorithm.

    So a run may be resumed with another advantage and keep the generators that joined it, unless this changes.
    """
    return "greedy_rewards_group" in needs("advantage", config.algorithm.advantage.name)


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
