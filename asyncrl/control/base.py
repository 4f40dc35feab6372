"""The control plane: which generators are members, which weights they have, and orders to change them.

A generator says hello, is welcomed or refused, then sends a heartbeat every `heartbeat_s`. The learner
answers with orders: adopt a version, stop. Messages carry no weights, and clocks of two hosts are never
compared. The learner's side is one thread, the generator's side one asyncio task.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from asyncrl.weights.base import UpdateOrder, UpdateReport

_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")
_LONGEST_TEXT, _MOST_ENTRIES = 300, 64
STATES = ("starting", "sampling", "waiting_tickets", "waiting_weights", "updating", "dirty")


def check_names(*names: str) -> None:
    """Raise ValueError for a name that cannot be used in leases, logs, file names and screens."""
    for name in names:
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"the name {name[:40]!r} is not 1 to 200 letters, digits, dots, dashes and underscores"
            )


def _check_texts(*texts: str) -> None:
    for text in texts:
        if len(text) > _LONGEST_TEXT or not text.isprintable():
            raise ValueError(
                f"the text {text[:40]!r} is not printable or longer than {_LONGEST_TEXT} characters"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """One incarnation of a generator."""

    generator_id: str
    # Random per process: a restarted generator is a new member.
    incarnation: str

    def __post_init__(self) -> None:
        check_names(self.generator_id, self.incarnation)

    @property
    def holder(self) -> str:
        """The name of the incarnation in the store's leases."""
        return f"{self.generator_id}:{self.incarnation}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Sender):
    """generator -> learner: a request to join."""

    release: str
    config_hash: str
    # Version of the weights that the generator loaded from disk; 0 for the initial model.
    version: int
    pid: int = 0
    host: str = ""
    # Transports over which it can receive weights, of `weights.base.TRANSPORTS`.
    transports: tuple[str, ...] = ("slot", "tcp", "disk")
    # Digest of the config from the run's record; empty if the host has a config of its own.
    host_digest: str = ""
    # Fingerprints of the data files, from `data.dataset.fingerprints`.
    rows: str = ""
    # Names and digests of the files with user code, from `run.starts.code_of`.
    code: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        Sender.__post_init__(self)
        _check_texts(self.release, self.config_hash, self.host, self.host_digest, self.rows, *self.transports)
        _check_texts(*self.code)
        if len(self.transports) > _MOST_ENTRIES:
            raise ValueError(f"{len(self.transports)} transports; allowed are at most {_MOST_ENTRIES}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat(Sender):
    """generator -> learner: the generator is alive and makes progress."""

    version: int
    # One of `STATES`.
    state: str
    # Counters and rates for the dashboard: sampled_tokens, tokens_per_s, idle_s, groups, ...
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        Sender.__post_init__(self)
        if self.state not in STATES:
            raise ValueError(f"the state is {self.state[:40]!r}; known are {', '.join(STATES)}")
        if len(self.metrics) > _MOST_ENTRIES:
            raise ValueError(f"{len(self.metrics)} metrics; at most {_MOST_ENTRIES} are allowed")
        _check_texts(*self.metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave(Sender):
    """generator -> learner: the generator leaves the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """learner -> generator: the generator is a member; also the answer to a heartbeat."""

    # The newest published version; an order for it follows if it is newer than the generator's.
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """learner -> generator: the generator must not join, and the reason."""

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


class GeneratorControl(Protocol):
    """The generator's side of the control plane."""

    async def join(self, hello: Hello) -> Welcome:
        """Join the run. Raises ControlError if the learner refuses or does not answer in time."""

    async def next_order(self) -> UpdateOrder | Stop:
        """Wait for the next order. The loss of the learner is not an error: the generator reconnects."""

    async def report(self, report: UpdateReport) -> None:
        """Report the result of an order."""

    def beat(self, heartbeat: Heartbeat) -> None:
        """Set the heartbeat that the background task sends next."""

    async def leave(self) -> None:
        """Leave the run and close the connection."""
