"""Checks that the operator of this host has allowed the code and the variables that a run's config uses here.

A generator that joins with only an address takes its config from the store. The signature of the record
proves that the run's learner wrote it, but the learner's user need not own this host. So each piece of code
that would run here, and each variable that processes would inherit, must be allowed by name.
"""

import json
import shlex
from collections.abc import Collection, Iterator
from typing import NamedTuple

from asyncrl.config.reward_section import HttpReward, Judge, RewardFunctionConfig
from asyncrl.config.schema import Config
from asyncrl.environments.named import ADAPTERS, TOOLS
from asyncrl.errors import RunError

GAMES = "asyncrl.quickstart.games"  # of the shipped configs


class Wish(NamedTuple):
    """Code that a config would run on this host, or a variable that it would read."""

    key: str  # the key of the config
    # The argument of `--allow`: a file, a module, an environment of another library, `model:PATH`,
    # `command:LINE`, `vllm:NAME=VALUE`, `url:ADDRESS` or `variable:NAME`.
    text: str


def wishes(config: Config) -> Iterator[Wish]:
    """Yield code outside this package that a generator would load, and variables that it would inherit."""
    for key, function in config.reward_functions.items():
        yield from _reward(key, function)
    yield from _environments(config)
    advantage = config.algorithm.advantage.name
    if ":" in advantage:  # generators load it too, to know whether a greedy response is needed
        yield Wish("algorithm.advantage", advantage.rpartition(":")[0])
    if config.model.trust_remote_code:
        yield Wish("model.trust_remote_code", f"model:{config.model.path}")
    # Some arguments of vLLM name code or files, such as `scheduler_cls`; its next release may have others.
    for name, value in config.generator.vllm.items():
        yield Wish(f"generator.vllm.{name}", f"vllm:{name}={json.dumps(value)}")
    for name in config.run.environment:
        yield Wish("run.environment", f"variable:{name}")


def _reward(key: str, function: RewardFunctionConfig) -> Iterator[Wish]:
    if ":" in function.function:
        yield Wish(key, function.function.rpartition(":")[0])
    if isinstance(remote := function.remote, HttpReward):
        yield Wish(f"{key}.params.url", f"url:{remote.url}")
        if remote.key_env:
            yield Wish(f"{key}.params.key_env", f"variable:{remote.key_env}")
    if isinstance(remote, Judge):
        yield Wish(f"{key}.params.prompt", str(remote.prompt))


def _environments(config: Config) -> Iterator[Wish]:
    for key, name, _ in config.environment_names:
        if name.partition(":")[0] in ADAPTERS:  # the rest of the name may be a command, or name a module
            yield Wish(key, name)
        elif name not in TOOLS and (place := name.rpartition(":")[0]) != GAMES:
            yield Wish(key, place)
    for key, environment in config.environments.items():
        if environment.command:
            yield Wish(f"{key}.command", f"command:{shlex.join(environment.command)}")
        if environment.python:
            yield Wish(f"{key}.python", str(environment.python))


def check_allowed(config: Config, allowed: Collection[str]) -> None:
    """Raise RunError if something is not allowed; the message says what is missing and how to allow it."""
    missing = [wish for wish in wishes(config) if wish.text not in allowed]
    if not missing:
        return
    lines = "".join(f"  {wish.key} wants {wish.text}\n" for wish in missing)
    options = " ".join(f"--allow '{text}'" for text in dict.fromkeys(wish.text for wish in missing))
    raise RunError(
        f"run {config.run.name} would run code or read variables on this host that you have not allowed:\n"
        f"{lines}look at them, then add {options}, or give your own copy of the run's config with --config"
    )
