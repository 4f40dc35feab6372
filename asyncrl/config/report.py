"""Problems of a config as text: what was found, what is allowed, which key was probably meant."""

import difflib
import functools
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from asyncrl.config.algorithm import CHOICE_LISTS, CHOICES
from asyncrl.config.base import Keys, Mistakes
from asyncrl.config.document import Node, Problem, placed
from asyncrl.config.schema import Config
from asyncrl.config.wording import Schema, describe, did_you_mean, shown


def panel(problems: Iterable[Problem | str], *, title: str) -> str:
    """List all problems, one per line, under a title with their number."""
    lines = list(dict.fromkeys(str(problem) for problem in problems))
    count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    return "\n".join([f"{count} in {title}", *(f"  {line}" for line in lines)])


def problems_of(error: ValidationError, root: Node) -> list[Problem]:
    """Convert pydantic's errors to problems with places."""
    return [problem for detail in error.errors() for problem in _problems_of(detail, root)]


def _problems_of(detail: Any, root: Node) -> list[Problem]:
    keys: Keys = tuple(detail["loc"])
    place = root.nearest(keys).place
    match detail["type"]:
        case "too_short" if detail["input"]:
            return []  # A wrong item leaves the list short; the item is reported.
        case "extra_forbidden":
            return [Problem(place, keys, f"found an unknown key; {suggest_key(keys)}", misplaced=True)]
        case "missing" if keys[:-1] and root.nearest(keys[:-1]).plain() is None:
            return []  # The section itself is reported.
        case "missing":
            description = str(schema_at(keys).get("description", "")).partition(". ")[0].rstrip(".")
            needed = description or describe(schema_at(keys)) or "a value"
            return [Problem(place, keys, f"found nothing; it is needed: {needed}; add `{keys[-1]}: ...`")]
        case "value_error":
            error = detail["ctx"]["error"]
            if isinstance(error, Mistakes):
                return [placed(mistake, root) for mistake in error.mistakes]
            return [Problem(place, keys, str(error))]
    return [Problem(place, keys, f"found {shown(detail['input'])}; {_allowed(keys, detail)}")]


def _allowed(keys: Keys, detail: Any) -> str:
    schema = schema_at(keys)
    text = f"allowed is {describe(schema)}"
    found = detail["input"]
    choices = schema.get("enum", ()) if isinstance(found, str) else ()
    if meant := did_you_mean(str(found), map(str, choices)):
        return f"{text}{meant}"
    if detail["type"] == "string_type" and isinstance(found, (int, float)):
        return f'{text}; write it in quotes: "{found}"'
    if found is None:
        return f"{text}; fill it in or delete the line"
    return f"{text}; correct the value"


def suggest_key(keys: Keys) -> str:
    """List the keys that are allowed at a place, and suggest a similar one there or elsewhere."""
    key, known = str(keys[-1]).lower().replace("-", "_"), known_keys(keys[:-1])
    if key in LORA:
        return "there is no LoRA here, all weights are trained; delete it"
    meant = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    meant = meant or meant_keys(key, section=str(keys[0])) or difflib.get_close_matches(key, known, n=1)
    text = f"allowed are {', '.join(known)}" if known else "allowed is a plain value"
    return f"{text}; did you mean `{'` or `'.join(meant)}`?" if meant else f"{text}; delete it"


def meant_keys(name: str, *, section: str = "") -> list[str]:
    """Return at most two keys that a name without a section may mean; those in `section` come first."""
    name = name.lower().replace("-", "_")
    if name in OTHER_NAMES:
        return [OTHER_NAMES[name]]
    elsewhere = [path for path in all_paths() if path.rsplit(".", 1)[-1] == name]
    return [path for path in elsewhere if path.startswith(f"{section}.")][:2] or elsewhere[:2]


# Keys of other trainers -> ours.
OTHER_NAMES = {
    "learning_rate": "learner.optimizer.lr",
    "num_generations": "batch.group_size",
    "max_completion_length": "sampling.max_response_tokens",
    "max_prompt_length": "sampling.max_prompt_tokens",
    "max_steps": "learner.steps",
    "save_steps": "checkpoint.every",
    "eval_steps": "eval.every",
    "beta": "algorithm.kl.coefficient",
    "off_policy_steps": "staleness.max_lag",
    "model_name_or_path": "model.path",
    "dataset_name": "data.train",
    "report_to": "telemetry.wandb",
    "actor_rollout_ref": "learner` (actor), `generator` (rollout), `algorithm.kl` (ref) and `model",
    "trainer": "learner",
    "rollout": "generator",
    "actor": "learner",
    "reward_model": "reward",
    "custom_reward_function": "reward.functions",
    "train_files": "data.train",
    "val_files": "data.eval",
    "prompt_key": "data.prompt_field",
    "train_batch_size": "batch.groups",
    "ppo_mini_batch_size": "batch.minibatches",
    "ppo_epochs": "batch.epochs",
    "adv_estimator": "algorithm.advantage",
    "kl_coef": "algorithm.kl.coefficient",
    "kl_loss_coef": "algorithm.kl.coefficient",
    "entropy_coeff": "algorithm.entropy.coefficient",
    "total_training_steps": "learner.steps",
    "save_freq": "checkpoint.every",
    "test_freq": "eval.every",
    "tensor_model_parallel_size": "generator.tensor_parallel",
    "experiment_name": "run.name",
    "gradient_accumulation_steps": "learner.tokens_per_microbatch",
    "per_device_train_batch_size": "batch.groups",
    "num_train_epochs": "learner.steps",
    "seed": "run.seed",
    "output_dir": "run.root",
}
# Keys of other trainers for LoRA, which asyncrl does not have.
LORA = {"lora", "peft", "use_peft", "lora_r", "lora_rank", "critic_lora"}


@functools.cache
def _json_schema() -> Schema:
    schema = Config.model_json_schema()
    return dict(_inlined(schema, schema["$defs"]))


def _inlined(schema: Any, parts: Schema) -> Any:
    """Return the schema with every reference replaced by its target."""
    if isinstance(schema, list):
        return [_inlined(item, parts) for item in schema]
    if not isinstance(schema, dict):
        return schema
    referred = parts[schema["$ref"].rsplit("/", 1)[-1]] if "$ref" in schema else {}
    merged = {**referred, **schema}
    return {key: _inlined(value, parts) for key, value in merged.items() if key not in ("$ref", "$defs")}


def schema_at(keys: Keys) -> Schema:
    """Return the JSON schema of the value at `keys`, or an empty one if there is none."""
    schema = _json_schema()
    for key in keys:
        if isinstance(key, int):
            items = schema.get("prefixItems", [])
            schema = items[key] if key < len(items) else schema.get("items", {})
        else:
            schema = schema.get("properties", {}).get(key, {})
    return schema


def known_keys(keys: Keys) -> list[str]:
    """Return the keys of the section at `keys`."""
    return list(schema_at(keys).get("properties", {}))


@functools.cache
def all_paths(keys: Keys = ()) -> tuple[str, ...]:
    """Return every dotted key of the schema, except those inside choices."""
    if keys in CHOICES or keys in CHOICE_LISTS:
        return ()
    below = [path for key in known_keys(keys) for path in all_paths((*keys, key))]
    return (*([".".join(map(str, keys))] if keys else []), *below)
