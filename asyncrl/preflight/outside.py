"""What only libraries and services know of a config: arguments of a schedule, rights on the hub."""

from collections.abc import Iterator
from importlib.util import find_spec

from asyncrl.config.algorithm_rules import optimizers
from asyncrl.config.base import Mistake
from asyncrl.config.schema import Config
from asyncrl.extras import install_command
from asyncrl.trainer.rates import rate_share

# Schedules that need no arguments, which transformers would check, but takes seconds to import.
PLAIN = ("constant", "linear", "cosine")


def outside_problems(config: Config, *, resumes: bool) -> Iterator[Mistake]:
    """Find what the optimizers' libraries refuse, and a hub to which this machine may not push.

    With `resumes`, a run that has saved something goes on without its hub, of which its learner warns.
    """
    yield from _optimizer_problems(config)
    if config.checkpoint.hub is not None:
        from asyncrl.run.directory import RunDirectory
        from asyncrl.run.pushes import refusal  # it imports huggingface_hub

        has_saved = resumes and RunDirectory(config.run.directory).saved_mark.exists()
        if not has_saved and (text := refusal(config.checkpoint.hub)):
            yield Mistake(("checkpoint.hub.repo",), text)


def _optimizer_problems(config: Config) -> Iterator[Mistake]:
    """Find a library that this machine lacks, and arguments that transformers refuses for a schedule."""
    for where, optimizer, steps, _ in optimizers(config.learner, config.critic, config.batch):
        if optimizer.kind == "adamw_8bit" and find_spec("bitsandbytes") is None:
            text = f"the package bitsandbytes is not installed; run: {install_command('bitsandbytes')}"
            yield Mistake((f"{where}.kind",), text)
        if optimizer.schedule in PLAIN and not optimizer.schedule_arguments:
            continue
        try:
            share = rate_share(**optimizer.rates(steps))
            found = [share(step) for step in range(steps)]
            if not all(0 <= one <= 1 + 1e-9 for one in found):
                raise ValueError(f"the rate would be from {min(found):g} to {max(found):g} times lr")
        except (ArithmeticError, TypeError, ValueError) as error:
            given = optimizer.schedule_arguments or "nothing"
            text = f"found {given}, which transformers' {optimizer.schedule} does not take: {error}"
            cure = f"correct it, or set another {where}.schedule"
            yield Mistake((f"{where}.schedule_arguments", f"{where}.schedule"), f"{text}; {cure}")
