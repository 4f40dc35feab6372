"""Keys of a config that have no effect under the value of another key.

Where no config can mean it so, `config/rules.py` refuses it; these may be left from another run.
"""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from asyncrl.config.schema import Config

_OF_REWARDS = "reward.functions is [], so there are no reward processes; name a function, or drop it"
_OF_EPISODES = "only episodes are read with it; name an environment, or drop it"
_OF_AGENTS = "only agents (environment.command) call the endpoint; drop it"
_OF_OTHERS = "only the store of `url` has it, and store.url is not set; set it, or drop this"
_OF_VLLM = "generator.engine is transformers, which has no such thing; drop it, or take vllm"

_OF_CLUSTERS = "cluster.kind is null, so there is one host; set it to what places hosts, or drop this"
_OF_KUBERNETES = "cluster.kind is not kubernetes, which alone has it; set it, or drop this"
_OF_SLURM = "cluster.kind is not slurm, which alone has it; set it, or drop this"

# Key -> whether it has an effect, and otherwise why not and what to do.
KEYS: dict[str, tuple[Callable[[Config], bool], str]] = {
    "model.revision": (
        lambda one: not Path(one.model.path).is_dir(),
        "model.path is a directory, which has one revision; drop it, or give the model's hub name",
    ),
    **dict.fromkeys(("model.tool_parser", "model.reasoning_parser"), (lambda one: one.plays, _OF_EPISODES)),
    "data.prompt_field": (
        lambda one: one.data.template is None,
        "data.template stands in its place; drop one of them",
    ),
    "data.last_answer": (
        lambda one: bool(one.model.chat_template) and one.data.template is None,
        "prompts are text; drop it, or set model.chat_template: true without data.template",
    ),
    "data.curriculum.solved": (
        lambda one: one.data.curriculum.floor is not None,
        "data.curriculum.floor is null, so no prompt is skipped; set a share such as 0.1, or drop this",
    ),
    "data.eval_split": (
        lambda one: any(not each.split for each in one.data.eval),
        "data.eval names no dataset with splits; set it, or drop this",
    ),
    **dict.fromkeys(
        ("reward.timeout_s", "reward.workers", "reward.sandbox", "reward.memory_gib"),
        (lambda one: bool(one.reward_functions), _OF_REWARDS),
    ),
    **dict.fromkeys(
        ("environment.address", "environment.constraints", "environment.frozen"),
        (lambda one: any(each.command for each in one.environments.values()), _OF_AGENTS),
    ),
    "environment.workers": (
        lambda one: any(each.uses for each in one.environments.values()),
        "an agent (environment.command) has a process for each episode; drop it",
    ),
    "environment.max_observation_characters": (
        lambda one: any(each.uses for each in one.environments.values()),
        "an agent (environment.command) writes its own messages; cut them there, and drop this",
    ),
    "environment.history": (
        lambda one: bool(one.model.chat_template),
        "model.chat_template is false, so no template renders earlier turns; set it to true, or drop this",
    ),
    "algorithm.imitation.solved": (
        lambda one: one.algorithm.imitation.coefficient > 0,
        "algorithm.imitation.coefficient is 0, so no answer is imitated; set it to 0.1, or drop this",
    ),
    "algorithm.reference.gpus": (
        lambda one: bool(one.teacher),
        "algorithm.reference.scorers is 0, so the learner holds the teacher; set it, or drop this",
    ),
    "cluster.generator_hosts": (lambda one: one.cluster.kind is not None, _OF_CLUSTERS),
    "cluster.pending_s": (lambda one: one.cluster.kind is not None, _OF_CLUSTERS),
    **dict.fromkeys(
        ("cluster.image", "cluster.claim", "cluster.claim_gib"),
        (lambda one: one.cluster.kind == "kubernetes", _OF_KUBERNETES),
    ),
    "cluster.sbatch": (lambda one: one.cluster.kind == "slurm", _OF_SLURM),
    "checkpoint.best_is": (
        lambda one: one.checkpoint.best is not None,
        "checkpoint.best is null, so no checkpoint is the best; name a metric, or drop this",
    ),
    "generator.enforce_eager": (lambda one: one.generator.engine == "vllm", _OF_VLLM),
    "generator.kv_cache_gib": (lambda one: one.generator.engine == "vllm", _OF_VLLM),
    "store.password_env": (lambda one: one.store.url is not None, _OF_OTHERS),
    "store.insecure": (lambda one: one.store.url is not None, _OF_OTHERS),
    "store.fsync": (
        lambda one: one.store.url is None,
        "the server of store.url has its own settings; set appendfsync there, and drop this",
    ),
    "telemetry.wandb_project": (
        lambda one: one.telemetry.wandb != "off",
        "telemetry.wandb is off; set it to online or offline, or drop this",
    ),
    "telemetry.prometheus_host": (
        lambda one: one.telemetry.prometheus_port is not None,
        "telemetry.prometheus_port is null, so nothing listens; set a port, or drop this",
    ),
}


def idle_keys(config: Config) -> Iterator[str]:
    """Warn of each key of `KEYS` that is set and has no effect."""
    for key, (acts, why) in KEYS.items():
        *parts, name = key.split(".")
        section: Any = functools.reduce(lambda part, at: part and getattr(part, at), parts, config)
        if section is None:
            continue
        found = getattr(section, name)
        if found != type(section).model_fields[name].default and not acts(config):
            yield f"{key} is {found}, but {why}"
