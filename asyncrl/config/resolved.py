"""A config as text, and the hashes by which processes agree on it."""

import hashlib
import json
import re
import sys
from typing import Any

import yaml

from asyncrl.config.base import Part
from asyncrl.config.data_section import EvalSet
from asyncrl.config.document import SCALARS
from asyncrl.config.registry import needs
from asyncrl.config.reward_section import OfScorer
from asyncrl.config.schema import Config
from asyncrl.config.sections import SamplingConfig

# Values that learner and generators must agree on: which prompt a ticket id means, how responses are sampled
# and scored, how weights arrive, which weights an evaluation needs (`learner.steps`, `eval.every`). Values
# that only one side reads are left out. If a run is resumed with other shared values, its supervisor starts
# generators with them; generators of other hosts are refused and leave.
_SHARED = {
    "run": "seed",
    "model": "path revision dtype chat_template tool_parser reasoning_parser lora router_replay",
    "data": "train eval prompt_field last_answer template system images_key filter map split eval_split "
    "shuffle long_prompts curriculum",
    "reward": "functions",
    "environment": "uses command frozen constraints max_turns weight max_observation_characters history",
    "batch": "groups group_size missing_episodes",
    "sampling": " ".join(SamplingConfig.model_fields),
    "staleness": "max_lag window_groups",
    "store": "shards",
    "weights": "transport bucket_mib probe_tokens probe_limit",
    "learner": "steps",
    "eval": "prompts samples temperature every",
}
SHARED = {section: set(keys.split()) for section, keys in _SHARED.items()}

# What a scorer answers follows from these; where its processes run is each host's own affair.
_SCORER = {"model", "max_tokens"}

# The code, models and variables that a config brings to a generator's host.
HOST: dict[str, Any] = {"run": {"environment"}, "data": {"train", "eval", "filter", "map"}}
HOST |= dict.fromkeys(("model", "reward", "scorers", "environment"), True)
HOST["algorithm"] = {"reference"}

BREAKS = set("\x85\u2028\u2029\ufeff")  # line breaks that only YAML knows


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes text which YAML 1.1 or 1.2 would read as another type."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Put text with a character of `BREAKS` in double quotes; no other style preserves it."""
        style = '"' if BREAKS & set(text) else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)
for _tag, _pattern in SCALARS.items():
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), None)


def dump_config(config: Part) -> str:
    """Return YAML that loads back to an equal config, with every default written out."""
    return dump_values(config.model_dump(mode="json"))


def dump_values(values: object, *, in_a_line: bool = False) -> str:
    """Return YAML that loads back to equal values; for the value of an override, `in_a_line`."""
    text: str = yaml.dump(
        values,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=in_a_line,
        width=sys.maxsize if in_a_line else 120,
    )
    return text.removesuffix("...\n").removesuffix("\n") if in_a_line else text


def config_json(config: Part) -> str:
    """Return the whole config as one line of JSON; equal configs give equal lines."""
    return _canonical(config.model_dump(mode="json"))


def config_hash(config: Config) -> str:
    """Hash `SHARED`, `wants_greedy`, and the models that score, to 16 hex digits.

    All processes of a run must agree on it. A teacher that the learner holds is the learner's alone.
    """
    shared: dict[str, Any] = {
        part: getattr(config, part).model_dump(mode="json", include=keys) for part, keys in SHARED.items()
    }
    shared["greedy"] = wants_greedy(config)
    shared["scorers"] = {name: one.model_dump(include=_SCORER) for name, one in config.scorers.items()}
    if config.teacher and (teacher := config.algorithm.reference):
        shared["teacher"] = teacher.model_dump(include={"path", "revision", "template"})
    return hashlib.sha256(_canonical(shared).encode()).hexdigest()[:16]


def host_digest(config: Config) -> str:
    """Hash the code, models and environment that a config gives to a generator's host, to 16 hex digits."""
    parts = config.model_dump(mode="json", include=HOST)
    return hashlib.sha256(_canonical(parts).encode()).hexdigest()[:16]


def eval_digest(config: Config, task: EvalSet, rows: str = "") -> str:
    """Hash name, data, sampling and scoring of a set, and its rows' fingerprint, to 8 hex digits."""
    config = config.of(task)
    data = config.data.of(task).model_copy(update={"eval": (task,)})
    asked: dict[str, Any] = {
        "rows": rows,
        "data": data.model_dump(mode="json", include={"eval", "eval_split"}),
        "reward": config.reward.model_dump(mode="json", include={"functions"}),
        "sampling": config.sampling.model_dump(mode="json", exclude={"temperature"}),
        "eval": config.eval.model_dump(mode="json", include={"samples", "temperature"}),
        "environment": config.environment.model_dump(mode="json", include=SHARED["environment"]),
    }
    asked["data"] |= {key: name for key in ("filter", "map") if (name := getattr(data, key))}
    remotes = (one.remote for one in config.reward.functions)
    if names := {remote.scorer for remote in remotes if isinstance(remote, OfScorer)}:
        asked["scorers"] = {name: config.scorers[name].model_dump(include=_SCORER) for name in names}
    if isinstance(config.model.chat_template, str):
        asked["template"] = config.model.chat_template
    # Equal functions from Python have different files: the pickle has line numbers, and sets in any order.
    text = re.sub(r"(given/reward)-[0-9a-f]{16}(?=\.py:)", r"\1", _canonical(asked))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def wants_greedy(config: Config) -> bool:
    """Return whether generators sample a greedy response per ticket, all that they know of the algorithm."""
    return "greedy_rewards_group" in needs("advantage", config.algorithm.advantage.name)


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
