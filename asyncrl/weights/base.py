"""The weights plane: the learner publishes, senders deliver, generators adopt.

    learner --publish (a copy)--> slots in shared memory --sender process, one per generator--> generator

The learner never waits for a generator: `publish` copies the parameters into a slot that no sender reads, and
returns. Each sender owns one two-party group with its generator; a transfer that misses its deadline costs that
sender its life and nobody else anything. Updates are latest-wins per generator.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from asyncrl.lineage import INITIAL, History, Weights

if TYPE_CHECKING:  # the control plane imports the orders from here, and status commands must start without torch
    import torch


# What every receiver takes, the better one first.
_EVERYWHERE = ("gloo", "disk")
_LARGEST_MEASUREMENT = 1e9


def choose_transport(wanted: str, *, device: str) -> str:
    """The transport behind `auto`: nccl on "cuda", else gloo. Any other name stays as it is."""
    if wanted == "auto":
        return "nccl" if device == "cuda" else "gloo"
    return wanted


def receivable(transport: str) -> tuple[str, ...]:
    """What an engine that was started for `transport` can receive, best first: a generator's `Hello.transports`.

    vLLM is started with one receiver. Each of them takes gloo and disk too, but nccl and ipc exclude each other.
    """
    return (transport, *(other for other in _EVERYWHERE if other != transport))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Name (as in the Hugging Face checkpoint), dtype (`float32`, `bfloat16`), and shape of one parameter."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateOrder:
    """What a generator must know to receive one version. Plain values only: it crosses the control plane."""

    version: int
    # gloo | nccl | ipc | disk; memory, where gloo has been staged
    transport: str
    deadline_s: float
    # Of the transport: rendezvous address and group name, bucket layout, checksums, or a directory.
    details: dict[str, Any]
    probe_ids: tuple[int, ...]
    # The learner's own log-probabilities of probe_ids[1:] at `version`.
    probe_logprobs: tuple[float, ...]
    # Of the learner that made it.
    history: str = str(INITIAL)

    @property
    def weights(self) -> Weights:
        """What it brings."""
        return History.parse(self.history).weights(self.version)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """What became of one update, said by the generator that got it."""

    version: int
    applied: bool
    # Why it was not applied.
    reason: str = ""
    # Largest difference of log-probabilities on the probe, generator against learner.
    probe_max: float = 0.0
    paused_s: float = 0.0
    transfer_s: float = 0.0
    # Of the version: an earlier learner may have ordered the same number.
    lineage: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError: every measurement is finite, not negative, and below the age of any run."""
        measured = {"probe_max": self.probe_max, "paused_s": self.paused_s, "transfer_s": self.transfer_s}
        for name, value in measured.items():
            if not 0.0 <= value <= _LARGEST_MEASUREMENT:
                raise ValueError(f"{name} is {value}; a number from 0 to {_LARGEST_MEASUREMENT:g} is needed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A sender's reply: everything has left it. What arrived, the generator's report says."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A sender's reply: it could not, or it died."""

    reason: str


class Sender(Protocol):
    """One sender process and its generator, seen from the control plane. No method waits.

    One update: `prepare` -> replies with the UpdateOrder -> `transfer`, when the generator has been sent the order,
    -> replies Sent. After a Failed, or when it takes too long, `restart`.
    """

    def fileno(self) -> int:
        """Readable when there are replies. Changes with `restart`."""
        ...

    def prepare(self, transport: str) -> bool:
        """Make ready to send the newest version; False when there is none at this moment: ask again soon."""
        ...

    def replies(self) -> "list[UpdateOrder | Sent | Failed]":
        """What the process has said since the last call, about the update that was prepared last."""
        ...

    def transfer(self) -> None:
        """Send the prepared version."""
        ...

    def restart(self) -> None:
        """Kill the process, whatever it does, and start another one; nothing of the old one's groups is used again.

        Raises OSError when none can be started: until the next `restart` there is none then.
        """
        ...

    def close(self) -> None:
        """Kill the process."""
        ...


class Staging(Protocol):
    """The generator's end: what can be received while requests run."""

    def stage(self, order: UpdateOrder) -> UpdateOrder:
        """Receive and verify; returns what the engine is to do then: the same order, or one to load from host memory.

        Blocks, at most until the order's deadline. What it returned holds until the next call.
        Raises TransferError: nothing has changed in the engine.
        """
        ...

    def close(self) -> None:
        """Free memory and connections."""
        ...


class Publisher(Protocol):
    """The learner's end: one per run, in rank 0."""

    @property
    def one_host(self) -> bool:
        """All generators are on the learner's host: its paths mean the same to them."""
        ...

    def publish(self, version: int, tensors: "Iterable[tuple[str, torch.Tensor]]", probe_logprobs: Sequence[float]) -> float:
        """Copy full parameters into a free slot and make `version` the newest; returns seconds. Never waits for senders."""
        ...

    def open_sender(self, workers: int) -> Sender:
        """A new sender process for one generator with that many workers (its tensor parallelism). Raises OSError."""
        ...

    def close(self) -> None:
        """Stop all senders and free the slots."""
        ...
