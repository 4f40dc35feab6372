"""What a run asks of an engine that places hosts: one command per host, and nothing in between.

An engine owns no data, no weights and no restarts of processes: within a host that is the business of the
command's supervisor. It is never asked for anything in a step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol, Self

from asyncrl.run.keys import JoinKeys

# In the command of a host: the address of the learner's host, known when that has started.
LEARNER_ADDRESS = "{learner}"
SIGNALS = 128  # shells add it to the number of the signal that ended a command


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan:
    """The command of one host."""

    name: str  # learner-0, learner-1, generators-3: the same after a restart, and the prefix of generator ids
    role: Literal["learner", "ranks", "generators"]
    argv: Sequence[str]  # words behind `asyncrl`; nothing secret
    gpus: int
    keys: JoinKeys | None = field(default=None, repr=False)  # handed over on standard input or by a file

    def with_learner(self, learner: str) -> Self:
        """Return the plan with the address of the learner's host in its command, also within a URL."""
        within = f"[{learner}]" if ":" in learner else learner
        argv = [word.replace(LEARNER_ADDRESS, within if "://" in word else learner) for word in self.argv]
        return replace(self, argv=argv)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostState:
    """What an engine knows of a host."""

    phase: Literal["pending", "running", "lost", "ended"]
    address: str = ""  # at which the other hosts reach it
    why: str = ""  # what is missing, or how it was lost
    status: int | None = None  # the exit status of its command
    pid: int = 0  # of the command, where the engine knows it


class Cluster(Protocol):
    """An engine that places hosts."""

    def start(self, plan: HostPlan, output: Path) -> None:
        """Place a host and run its command, whose output is appended to a file. Returns immediately.

        The name may be that of a host that has ended or was lost. Raises OSError.
        """

    def states(self) -> Mapping[str, HostState]:
        """Return the state of every host that was started, by name."""

    def stop(self, name: str, *, kill: bool) -> None:
        """Ask the command of a host to end, without waiting; with `kill`, end all processes of the host."""

    def close(self) -> None:
        """End everything, and return when nothing is left."""
