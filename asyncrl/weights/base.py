"""The weights plane: the learner publishes, generators read or fetch, and adopt.

    learner --publish (a copy)--> slots --order: where the newest version is--> generator

The learner waits for no generator; each gets the newest version. A late update is given up, others go on.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from asyncrl.lineage import INITIAL, History, Weights

if TYPE_CHECKING:  # commands import this module through the control plane, and must start without torch
    import torch


# No epoch skips a row.
EVERY_ROW: Mapping[str, bytes] = {}
# What a generator can receive, unless its host rules some of it out.
TRANSPORTS = ("slot", "tcp", "nccl", "disk")
_LARGEST_MEASUREMENT = 1e9
# Fields of a report, which are also metrics, on the probe and on an applied update; all that is measured.
PROBE_FIELDS = ("probe_mean", "probe_max", "probe_limit", "floor_mean", "floor_max")
UPDATE_FIELDS = ("paused_s", "transfer_gb_per_s")
MEASUREMENTS = (*PROBE_FIELDS, *UPDATE_FIELDS, "update_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Name (as in the Hugging Face checkpoint), dtype (`float32`, `bfloat16`), and shape of one parameter."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateOrder:
    """An order to receive one version; it crosses the control plane, so it holds only plain values."""

    version: int
    # slot, tcp, nccl or disk. After tcp or nccl has brought the weights, slot: one of the generator's host.
    transport: str
    deadline_s: float  # bound on one transfer
    # A slot, or a source to fetch it from; layout and checksums.
    details: dict[str, Any]
    # Sequences of several lengths, which the engine scores at the same time.
    probe_ids: tuple[tuple[int, ...], ...]
    # The learner's log-probabilities of `ids[1:]` of each, one after the other, at `version`, in nats.
    probe_logprobs: tuple[float, ...]
    # The same with the weights of model.path, and with the adapter of `model.lora` as it begins: version 0.
    initial_logprobs: tuple[float, ...]
    # History of the learner that made the version.
    history: str = str(INITIAL)
    # What it replaces: "weights" is the whole model, "adapter" that of `model.lora`.
    target: str = "weights"
    size_bytes: int = 0
    # The rows of data.train that an epoch skips, one bit each, by the number of the epoch.
    skipped: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def weights(self) -> Weights:
        return History.parse(self.history).weights(self.version)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """A generator's report on one update; `reason` says why it was not applied."""

    version: int
    applied: bool
    reason: str = ""
    # Difference between the generator's and the learner's log-probabilities of the probe, in nats: mean and
    # largest over its tokens, and the largest allowed. The floor is the difference at version 0.
    probe_mean: float = 0.0
    probe_max: float = 0.0
    probe_limit: float = 0.0
    floor_mean: float = 0.0
    floor_max: float = 0.0
    # How long the engine was paused, and how long all of it took, from the order to the verdict.
    paused_s: float = 0.0
    update_s: float = 0.0
    # Bytes of the version by the time in which they were received, verified and loaded.
    transfer_gb_per_s: float = 0.0
    # Lineage of the version: an earlier learner may have ordered the same number.
    lineage: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError unless every measurement is finite, not negative and at most 1e9."""
        for name in MEASUREMENTS:
            if not 0.0 <= (value := getattr(self, name)) <= _LARGEST_MEASUREMENT:
                raise ValueError(f"{name} is {value}; a number from 0 to {_LARGEST_MEASUREMENT:g} is needed")


class Staging(Protocol):
    """The generator's receiver of weights while requests run."""

    def stage(self, order: UpdateOrder) -> UpdateOrder:
        """Receive and verify the weights, if the transport can do so while requests run.

        Returns the order for the engine: the same one, or one to load from host memory, valid until the next
        call. Blocks at most until the order's deadline. Raises TransferError; the engine is unchanged then.
        """

    def close(self) -> None: ...


class Publisher(Protocol):
    """The learner's side: one per run, in rank 0."""

    @property
    def one_host(self) -> bool:
        """Whether all generators are on the learner's host and so can open its paths."""

    def publish(
        self,
        version: int,
        tensors: "Iterable[tuple[str, torch.Tensor]]",
        probe_logprobs: Sequence[float],
        skipped: Mapping[str, bytes] = EVERY_ROW,
    ) -> Future[int]:
        """Copy the parameters to a slot without readers. The result is `version`, once it can be sent.

        `skipped` goes into the orders for this version.

        Raises what made the version before fail.
        """

    def check(self) -> None:
        """Raise what has made the newest version fail."""

    def order(self, reader: str, transport: str) -> UpdateOrder | None:
        """Pin the newest version for a reader, in place of what it had; None if there is none at this moment.

        Returns the order to receive it over `transport`. Waits for nothing. Raises OSError, and RuntimeError
        without room for a thread.
        """

    def release(self, reader: str) -> None:
        """Unpin what the reader has, if anything."""

    def close(self) -> None:
        """Free the slots and end all transfers."""
