"""A process of a world, and what is done to it."""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from typing import Any

from asyncrl.hosting.progress import Board, Watch

from .roles import Place


class Stuck(AssertionError):
    """The run did not go on, or not in time."""


@dataclass(slots=True)
class Member:
    """A process that is started again when it dies."""

    name: str
    role: Callable[..., None]
    place: Place
    arguments: tuple[Any, ...]
    process: ForkServerProcess | None = None
    stopped_until_s: float = 0.0
    starts: int = 0
    board: Board | None = None
    watch: Watch | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None and self.process.pid is not None
        return self.process.pid

    @property
    def ended_with(self) -> int | None:
        """Its exit status; None while it lives."""
        return None if self.process is None else self.process.exitcode

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.is_alive()


def send(member: Member, number: signal.Signals) -> None:
    """A signal, unless it has died by itself."""
    if member.is_alive:
        os.kill(member.pid, number)
