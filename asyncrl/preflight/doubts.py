"""Warnings about valid configs: settings that may be intended, but are usually mistakes."""

import functools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from asyncrl.builds import CPU, build_of
from asyncrl.config.algorithm_rules import optimizers
from asyncrl.config.document import Node
from asyncrl.config.load import read_draft
from asyncrl.config.model_files import SHOWN, ends_no_response
from asyncrl.config.named_files import local_files
from asyncrl.config.schema import Config
from asyncrl.config.sections import EvalConfig
from asyncrl.data.dataset import Rows, load_rows
from asyncrl.data.reader import taken_answers, with_messages
from asyncrl.errors import ConfigError, DataError
from asyncrl.hosting.gpus import count_gpus, has_instances
from asyncrl.hosting.placement import idle_gpus, placement_of

LIMITS = ("max_prompt_tokens", "max_response_tokens")
HIGHEST_LR = 0.01  # Adam moves each weight by about the rate: models are fine-tuned with 1e-6 to 1e-4
REPEATED = 0.2  # share of rows that are repetitions of others
ODD = 0.1  # share of rows whose value in a column may be of another type by mistake


def doubts(config: Config, path: Path, overrides: Sequence[str], *, generators: bool = True) -> list[str]:
    """Return warnings about a valid config, one line each.

    Without `generators`, these are on other hosts, and this is the learner's. With `cluster.kind` they are on
    other hosts, too, but which one this is, is not known.
    """
    root = read_draft(Config, path, overrides).root
    found = (*_evaluation(config, root), *_limits(config, root, path), *_rates(config), *_weights(config))
    found += (*_endless(config), *_rows(config), *missing_device(config), *idle_keys(config))
    has_all = generators and config.cluster.kind is None
    idle = _idle(config, generators=generators) if has_all or not generators else ()
    return [*found, *_cores(config, generators=has_all), *idle]


def require_device(config: Config) -> None:
    """Raise ConfigError if the config asks for a GPU that this machine does not have."""
    for text in missing_device(config):
        raise ConfigError(text)


def missing_device(config: Config) -> Iterator[str]:
    """Warn if the config asks for a GPU that this machine or its torch does not have."""
    if config.learner.device == "cuda" and not count_gpus():
        cure = "set learner.device=auto or cpu, or check nvidia-smi and CUDA_VISIBLE_DEVICES"
        yield f"learner.device is cuda, but this machine shows no GPU; {cure}"
    if config.learner.device != "cpu" and count_gpus() and build_of("torch") == CPU:
        cure = "install asyncrl[gpu], or set learner.device=cpu"
        yield f"this machine shows {count_gpus()} GPUs, but torch is built for CPUs only; {cure}"


def _idle(config: Config, *, generators: bool) -> Iterator[str]:
    """Warn of GPUs that no process of the run would use."""
    gpus = count_gpus() if config.learner.device != "cpu" else 0
    placement = placement_of(config, gpus, generators=None if generators else 0)
    idle, width = idle_gpus(placement, gpus), config.generator.tensor_parallel
    if not idle:
        return
    free = gpus - config.ranks_per_host
    ranks = config.learner.ranks + len(idle) * config.cluster.learner_hosts
    cures = []
    if generators and len(placement.generators) < free // width:
        cures.append(f"leave generator.count null, which means {free // width}")
    else:
        if ranks % config.learner.sequence_parallel == 0 and not has_instances():
            cures.append(f"set learner.ranks={ranks} (a resumed run keeps its number)")
        if generators:
            cures.append(f"choose a generator.tensor_parallel that divides {free}")
    named = f"GPU{'s' * (len(idle) > 1)} {', '.join(map(str, idle))} of {gpus}"
    cures.append("hide what another program is to use with CUDA_VISIBLE_DEVICES")
    yield f"no process would use {named}: {', or '.join(cures)}"


def _cores(config: Config, *, generators: bool) -> Iterator[str]:
    """Warn of more processes of one kind than this machine has cores, without GPUs.

    Without `generators`, these are on other hosts.
    """
    if count_gpus() and config.learner.device != "cpu":
        return
    cores = len(os.sched_getaffinity(0))
    counts = {"learner.ranks": config.ranks_per_host}
    counts |= {"generator.count": config.generator.count or 0} if generators else {}
    for key, count in counts.items():
        if count > cores:
            yield f"{key} is {count} on {cores} cores, so each slows the others; set at most {cores}"


def _rates(config: Config) -> Iterator[str]:
    """Warn of learning rates that destroy a model, and of those that a run never reaches."""
    for where, optimizer, steps, _ in optimizers(config.learner, config.critic, config.batch):
        if optimizer.lr > HIGHEST_LR:
            found = f"{where}.lr is {optimizer.lr:g}, by about which Adam moves every weight in every step"
            yield f"{found}: that destroys a model; set 1e-6 to 1e-4 (a tiny model takes 1e-3)"
        if optimizer.warmup_of(steps) > steps:
            found = f"{where}.warmup_steps is {optimizer.warmup_steps}, but the run has {steps} optimizer"
            yield f"{found} steps: the rate stays below {where}.lr; set warmup_steps lower"


def _weights(config: Config) -> Iterator[str]:
    """Warn of a sum of rewards that is always 0."""
    lists = {tuple(config.functions_of(key)): config.of(task) for key, task in config.data.tasks.items()}
    for keys, one in lists.items():
        weights = {f"{key}.weight": config.reward_functions[key].weight for key in keys}
        if one.environment.is_used:
            weights["environment.weight"] = one.environment.weight
        if weights and not any(weights.values()):
            found = f"{', '.join(weights)} {'is' if len(weights) == 1 else 'are all'} 0"
            yield f"{found}: every response earns 0, so nothing is learned; set one to 1"


def _endless(config: Config) -> Iterator[str]:
    """Warn of a model whose responses no token can end."""
    path = Path(config.model.path)
    if not config.sampling.stop and path.is_dir() and ends_no_response(path):
        found = f"no file in {path} names an end token, so every response is as long as the limit allows"
        yield f"{found}; set eos_token_id in its generation_config.json, or give sampling.stop"


def _rows(config: Config) -> Iterator[str]:
    """Warn of rows that repeat others, and of values unlike those of the other rows."""
    for key, task in config.data.tasks.items():
        if not local_files(source := task.path):
            continue
        try:
            every = load_rows(source)
            rows = every.only(every.checked, [every[index] for index in every.checked])
        except DataError:  # `validate` reports it
            continue
        distinct = len({repr(sorted(row.items())) for row in rows})
        if len(rows) - distinct > REPEATED * len(rows) and not config.of(task).environment.is_used:
            which = "which" if len(rows) == len(every) else f"the {len(rows)} that were looked at"
            found = f"{key} ({source}) has {len(every)} rows, of {which} {distinct} are different"
            yield f"{found}; remove the repetitions, or give it rows of its own"
        data, taken = config.data.of(task), Counter[str]()
        for row in rows if data.map is None else ():
            with_messages(row, data, taken)
        if said := taken_answers(taken, len(rows)):
            yield f"{key} ({source}): {said}; set data.last_answer: continue to have it continued"
        for column in dict.fromkeys(name for row in rows for name in row):
            yield from _odd_values(rows, column, key)


def _odd_values(rows: Rows, column: str, key: str) -> Iterator[str]:
    values = {index: row[column] for index, row in enumerate(rows) if row.get(column) is not None}
    nan = [index for index, value in values.items() if isinstance(value, float) and math.isnan(value)]
    if nan:
        yield f"{key}: column `{column}` is NaN in {_places(rows, nan)}; give it a number, or remove the rows"
    kinds = {index: _kind(value) for index, value in values.items()}
    (usual, count), *others = Counter(kinds.values()).most_common() or [("", 0)]
    odd = [index for index, kind in kinds.items() if kind != usual]
    if others and len(odd) <= ODD * len(rows):
        found = f"{key}: column `{column}` holds {usual} in {count} rows and {kinds[odd[0]]} in"
        yield f"{found} {_places(rows, odd)}; give all rows one type"


def _kind(value: Any) -> str:
    names = {bool: "true or false", int: "a number", float: "a number", str: "text", dict: "an object"}
    return names.get(type(value), "a list" if isinstance(value, list | tuple) else type(value).__name__)


def _places(rows: Rows, indices: Sequence[int]) -> str:
    return ", ".join(rows.place(index) for index in indices[:SHOWN]) + ", ..." * (len(indices) > SHOWN)


def _evaluation(config: Config, root: Node) -> Iterator[str]:
    data, every = config.data, config.eval.every
    if data.eval and every > config.learner.steps and root.has(("eval", "every")):
        found = f"eval.every is {every}, but learner.steps is {config.learner.steps}"
        yield f"{found}: only the first and the last weights are evaluated; set eval.every lower"
    for name, one in data.sets.items():
        is_held_out = one.path not in [source.path for source in data.train]
        if not is_held_out and (local_files(one.path) or data.split_of(one) == data.split):
            where = f"set {name} of data.eval" if name else "data.eval"
            yield f"{where} is data.train ({one.path}): the evaluation is not held out; give it its own rows"
    if not data.eval and config.eval != EvalConfig():
        yield "eval is set, but data.eval is not: nothing is evaluated; set data.eval, or drop the section"


def _limits(config: Config, root: Node, path: Path) -> Iterator[str]:
    scale, limit = config.algorithm.aggregation.params.get("scale"), config.sampling.max_response_tokens
    if isinstance(scale, int | float) and 0 < scale != limit:
        yield (
            f"algorithm.aggregation.scale, which divides losses, is {scale:g}, but "
            f"sampling.max_response_tokens is {limit}: the learning rate acts as if it were "
            f"{limit / scale:.2g} times as high; set scale to {limit}"
        )
    if root.nearest(("data", "train")).place.rpartition(":")[0] != str(path):
        return
    # New data with the limits of an extended example: answers might be cut off after a few tokens.
    for key in LIMITS:
        place = root.nearest(("sampling", key)).place if root.has(("sampling", key)) else ""
        if place.rpartition(":")[0] not in ("", str(path)):
            found = f"sampling.{key} is {getattr(config.sampling, key)} from {place}"
            yield f"{found}, but {path} names other data; set there what your texts need"


_OF_REWARDS = "reward.functions is [], so there are no reward processes; name a function, or drop it"
_OF_EPISODES = "only episodes are read with it; name an environment, or drop it"
_OF_AGENTS = "only agents (environment.command) call the endpoint; drop it"
_OF_OTHERS = "only the store of `url` has it, and store.url is not set; set it, or drop this"
_OF_VLLM = "generator.engine is transformers, which has no such thing; drop it, or take vllm"

# Keys that have no effect under the value of another key: whether it has one, else why not and what to do.
# Where no config can mean it so, `config/rules.py` refuses it; these may be left from another run.
KEYS: dict[str, tuple[Callable[[Config], bool], str]] = {
    "model.revision": (
        lambda one: not Path(one.model.path).is_dir(),
        "model.path is a directory, which has one revision; drop it, or give the model's hub name",
    ),
    **dict.fromkeys(
        ("model.tool_parser", "model.reasoning_parser"),
        (lambda one: any(each.is_used for each in one.environments.values()), _OF_EPISODES),
    ),
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
