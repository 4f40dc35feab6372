"""The weights plane: the learner publishes, senders deliver, generators adopt.

    learner --publish (a copy)--> slots in shared memory --sender process, one per generator--> generator

The learner never waits for a generator: `publish` copies the parameters into a slot that no sender reads, and
returns. Each sender has a two-party group with its generator; if a transfer misses its deadline, only that
sender is killed and replaced. A generator always gets the newest version; versions in between are skipped.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from asyncrl.lineage import INITIAL, History, Weights

if TYPE_CHECKING:  # commands import this module through the control plane, and must start without torch
    import torch


# Transports that every receiver supports, the better one first.
_EVERYWHERE = ("gloo", "disk")
_LARGEST_MEASUREMENT = 1e9


def choose_transport(wanted: str, *, device: str) -> str:
    """The transport of `wanted`: for `auto`, nccl on "cuda" and gloo elsewhere; else `wanted` itself."""
    if wanted == "auto":
        return "nccl" if device == "cuda" else "gloo"
    return wanted


def receivable(transport: str) -> tuple[str, ...]:
    """Transports of an engine started for `transport`, best first: a generator's `Hello.transports`.

    vLLM is started with one receiver. Each receiver supports gloo and disk too, but nccl and ipc exclude each
    other.
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
    """An order to receive one version. Only plain values, because it crosses the control plane."""

    version: int
    # gloo, nccl, ipc or disk; memory, if gloo has already brought the weights into the generator's memory.
    transport: str
    deadline_s: float
    # Depends on the transport: rendezvous address and group name, bucket layout, checksums, or a directory.
    details: dict[str, Any]
    probe_ids: tuple[int, ...]
    # The learner's log-probabilities of probe_ids[1:] at `version`, in nats.
    probe_logprobs: tuple[float, ...]
    # History of the learner that made the version.
    history: str = str(INITIAL)

    @property
    def weights(self) -> Weights:
        """The name of the weights that the order brings."""
        return History.parse(self.history).weights(self.version)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """A generator's report on one update."""

    version: int
    applied: bool
    # Why the update was not applied.
    reason: str = ""
    # Largest difference between the generator's and the learner's log-probabilities of the probe, in nats.
    probe_max: float = 0.0
    paused_s: float = 0.0
    transfer_s: float = 0.0
    # Lineage of the version: an earlier learner may have ordered the same number.
    lineage: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError unless every measurement is finite, not negative and below a large bound."""
        measured = {"probe_max": self.probe_max, "paused_s": self.paused_s, "transfer_s": self.transfer_s}
        for name, value in measured.items():
            if not 0.0 <= value <= _LARGEST_MEASUREMENT:
                raise ValueError(f"{name} is {value}; a number from 0 to {_LARGEST_MEASUREMENT:g} is needed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A sender's reply: it has sent everything. Whether it arrived, the generator reports."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A sender's reply: it has failed, or has died."""

    reason: str


class Sender(Protocol):
    """One sender process, as the control plane uses it. No method waits.

    One update: call `prepare` -> it replies with the UpdateOrder -> send the order to the generator -> call
    `transfer` -> it replies Sent. After a Failed, or when a deadline has passed, call `restart`.
    """

    def fileno(self) -> int:
        """A descriptor that is readable when there are replies. `restart` changes it."""
        ...

    def prepare(self, transport: str) -> bool:
        """Prepare to send the newest version; False if there is none at this moment."""
        ...

    def replies(self) -> "list[UpdateOrder | Sent | Failed]":
        """The replies since the last call, on the update that was prepared last."""
        ...

    def transfer(self) -> None:
        """Send the prepared version."""
        ...

    def restart(self) -> None:
        """Kill the process and start another one with new groups.

        Raises OSError if none can be started; there is none then until the next `restart`.
        """
        ...

    def close(self) -> None:
        """Kill the process."""
        ...


class Staging(Protocol):
    """The generator's receiver of weights while requests run."""

    def stage(self, order: UpdateOrder) -> UpdateOrder:
        """Receive and verify the weights if the transport allows it while requests run.

        Returns the order for the engine: the same one, or one to load from host memory, valid until the next
        call. Blocks at most until the order's deadline. Raises TransferError; the engine is unchanged then.
        """
        ...

    def close(self) -> None:
        """Free memory and connections."""
        ...


class Publisher(Protocol):
    """The learner's side: one per run, in rank 0."""

    @property
    def one_host(self) -> bool:
        """Whether all generators are on the learner's host and so can open its paths."""
        ...

    def publish(
        self, version: int, tensors: "Iterable[tuple[str, torch.Tensor]]", probe_logprobs: Sequence[float]
    ) -> float:
        """Copy all parameters into a free slot and make `version` the newest; returns the seconds it took.

        Never waits for senders.
        """
        ...

    def open_sender(self, workers: int) -> Sender:
        """Start a sender process for a generator of `workers` workers (tensor parallelism). Raises
        OSError."""
        ...

    def close(self) -> None:
        """Stop all senders and free the slots."""
        ...
