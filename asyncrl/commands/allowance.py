"""What a config would run or read on this host, and whether this host's operator has allowed it.

A generator that joins with nothing but an address takes its config from the store. The seal of the record proves that the run's
learner wrote it, and still its writer is not the owner of this host: code is only run, and variables are only handed on, by name.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from asyncrl.config.schema import Config
from asyncrl.errors import RunError


@dataclass(frozen=True, slots=True)
class Wish:
    """One thing that a config wants of the host."""

    key: str  # where the config says so
    text: str  # what `--allow` must name: a Python file, a module, `model:PATH` or `variable:NAME`


def wishes(config: Config) -> Iterator[Wish]:
    """Code outside this package that a generator would load, and variables that its processes would inherit."""
    for index, function in enumerate(config.reward.functions):
        if ":" in function.function:
            yield Wish(f"reward.functions[{index}]", function.function.rpartition(":")[0])
    advantage = config.algorithm.advantage.name
    if ":" in advantage:  # generators ask it whether it needs a greedy response
        yield Wish("algorithm.advantage", advantage.rpartition(":")[0])
    if config.model.trust_remote_code:
        yield Wish("model.trust_remote_code", f"model:{config.model.path}")
    for name in config.run.environment:
        yield Wish("run.environment", f"variable:{name}")


def check_allowed(config: Config, allowed: Collection[str]) -> None:
    """Raises RunError, which names what is missing and how to allow it."""
    missing = [wish for wish in wishes(config) if wish.text not in allowed]
    if not missing:
        return
    lines = [f"  {wish.key} wants {wish.text}" for wish in missing]
    options = " ".join(f"--allow '{text}'" for text in dict.fromkeys(wish.text for wish in missing))
    raise RunError(
        f"run {config.run.name} would run code or read variables on this host that you have not allowed:\n"
        + "\n".join(lines)
        + f"\nlook at them, then add {options}, or give your own copy of the run's config with --config"
    )
