"""The control plane: who is there, which weights they hold, who shall change. No payloads, no clocks compared.

A generator says hello, is welcomed or refused, then sends a heartbeat every `heartbeat_s`. The learner answers with
orders: adopt a version, stop. The learner's side is a thread that owns the membership and the senders; the
generator's side is an asyncio task.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from asyncrl.weights.base import UpdateOrder, UpdateReport

_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")
_LONGEST_TEXT, _MOST_ENTRIES = 300, 64
STATES = ("starting", "sampling", "waiting_tickets", "waiting_weights", "updating", "dirty", "leaving")


def _check_names(*names: str) -> None:
    """Names stand in leases, logs, file names and on screens."""
    for name in names:
        if not _NAME.fullmatch(name):
            raise ValueError(f"the name {name[:40]!r} is not 1 to 200 letters, digits, dots, dashes and underscores")


def _check_texts(*texts: str) -> None:
    for text in texts:
        if len(text) > _LONGEST_TEXT or not text.isprintable():
            raise ValueError(f"the text {text[:40]!r} is not printable or longer than {_LONGEST_TEXT} characters")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """generator -> learner: wants to join."""

    generator_id: str
    # Random per process: a restarted generator is a new member.
    incarnation: str
    release: str
    config_hash: str
    # Of the weights it loaded from disk; 0 for the initial model.
    version: int
    tensor_parallel: int = 1
    pid: int = 0
    host: str = ""
    # What its engine can receive, best first: `weights.base.receivable`.
    transports: tuple[str, ...] = ("gloo", "disk")
    # Of a config that came from the run's record; empty for a config of the host's own.
    host_digest: str = ""
    # What it read from the data files: `data.dataset.fingerprints`.
    rows: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError."""
        _check_names(self.generator_id, self.incarnation)
        _check_texts(self.release, self.config_hash, self.host, self.host_digest, self.rows, *self.transports)
        if not 1 <= self.tensor_parallel <= 1024 or len(self.transports) > _MOST_ENTRIES:
            raise ValueError(f"tensor_parallel is {self.tensor_parallel}, with {len(self.transports)} transports")


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """generator -> learner: alive and making progress."""

    generator_id: str
    incarnation: str
    version: int
    # One of `STATES`.
    state: str
    # Counters and rates for the dashboard: sampled_tokens, tokens_per_s, running_requests, idle_s, paused_s,
    # groups, ...
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ValueError."""
        _check_names(self.generator_id, self.incarnation)
        if self.state not in STATES:
            raise ValueError(f"the state is {self.state[:40]!r}; known are {', '.join(STATES)}")
        if len(self.metrics) > _MOST_ENTRIES:
            raise ValueError(f"{len(self.metrics)} metrics; at most {_MOST_ENTRIES} are allowed")
        _check_texts(*self.metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """generator -> learner: going away in good order."""

    generator_id: str
    incarnation: str

    def __post_init__(self) -> None:
        """Raises ValueError."""
        _check_names(self.generator_id, self.incarnation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """learner -> generator."""

    # The newest published version; an order for it follows when it is newer than the generator's.
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """learner -> generator: must not join, and why."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """learner -> generator: the run is over."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatus:
    """One generator as the dashboard and `asyncrl status` see it."""

    generator_id: str
    state: str
    version: int
    silent_s: float
    metrics: Mapping[str, float]


class LearnerControl(Protocol):
    """What the learner loop may ask of the control plane."""

    def announce(self, version: int) -> None:
        """A new version has been published: bring every generator to it, latest wins."""
        ...

    def check(self) -> None:
        """Cheap. Raises ControlError when the control plane has broken down."""
        ...

    def members(self) -> list[MemberStatus]:
        """Everybody who joined and has neither left nor died."""
        ...

    def counters(self) -> Mapping[str, float]:
        """joined, left, died, updates, updates_failed, senders_killed, senders_not_started, probe_max (of the last update)."""
        ...

    def stop(self, reason: str, *, farewell: bool = True) -> None:
        """End the thread, and tell all generators that the run is over.

        Without `farewell` they are told nothing: they go on, and call the next learner at the same endpoint.
        """
        ...


class GeneratorControl(Protocol):
    """What the generator loop may ask of the control plane."""

    async def join(self, hello: Hello) -> Welcome:
        """Raises ControlError when refused or when nobody answers in time."""
        ...

    async def next_order(self) -> UpdateOrder | Stop:
        """Waits for the next order. A lost learner is not an error here: it reconnects until told to stop."""
        ...

    async def report(self, report: UpdateReport) -> None:
        """Say what became of an order."""
        ...

    def beat(self, heartbeat: Heartbeat) -> None:
        """Hand over the newest heartbeat; sent by the task in the background."""
        ...

    async def leave(self) -> None:
        """Say goodbye and close."""
        ...
