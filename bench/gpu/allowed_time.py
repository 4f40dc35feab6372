"""The time that an update of the weights may take: that of bare transfers of the same bytes, and of calls.

    allowed = (bytes / rate of a pass, for each pass that the transport makes) / 0.85  +  calls

The rates are those that the rows `copies` and `links` have measured on this machine. Passes that a transport
makes at the same time are counted one after the other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.gpu.figures import Place, value_in
from bench.gpu.hardware_rows import (
    GPU_COPY,
    GPU_TO_HOST,
    HOST_CHECKSUM,
    HOST_COPY,
    HOST_TO_GPU,
    NCCL,
    TCP,
    copy_to,
)

LEAST_SHARE = 0.85  # of the bare rates
# For the calls of an idle engine: the order to each process, pause, load, resume. On two CPU cores a whole
# update of 26 tensors with 0.2 MB takes 5 ms.
CALLS_S = 0.02
# For the calls for one tensor: its checksum, its copy and its broadcast start ten to twenty kernels. On a CPU
# the calls take 24 us; starting a kernel on a GPU takes up to 10 us more.
TENSOR_S = 2e-4
# A sum on a GPU reads bytes and factors, writes products, and reads them: as much as two copies.
GPU_SUM = (GPU_COPY, GPU_COPY)


def passes(transport: str, gpu: int | None, *, on_host: bool = False) -> tuple[str, ...]:
    """Return the bare figure of each pass over the bytes, the transfer itself first.

    `gpu` is the index of the generator's first GPU, None on a CPU. The learner's is 0. With `on_host` its
    slots are in memory of the host.
    """
    if gpu is None:
        transfers = {"slot": (), "disk": (), "tcp": (TCP,), "nccl": (NCCL,)}[transport]
        return (*transfers, HOST_COPY, HOST_CHECKSUM)
    if transport == "slot" and not on_host:  # the sum reads the learner's memory, as the load does
        return (copy_to(gpu), copy_to(gpu), *GPU_SUM) if gpu else (GPU_COPY, *GPU_SUM)
    if transport == "nccl":
        return (NCCL, *GPU_SUM, GPU_TO_HOST, HOST_TO_GPU)
    return (TCP, HOST_CHECKSUM, HOST_TO_GPU) if transport == "tcp" else (HOST_TO_GPU, HOST_CHECKSUM)


@dataclass(frozen=True, slots=True)
class AllowedTime:
    """The limit of one transport, and how it is made up."""

    total_s: float
    bare_name: str
    bare_rate: float  # GB/s
    note: str


def allowed_time(
    names: Sequence[str], rate_of: Callable[[str], float | None], total_bytes: int, tensors: int
) -> AllowedTime | None:
    """Return the limit for these passes; None if the rate of one was not measured."""
    rates = [rate_of(name) for name in names]
    known = [rate for rate in rates if rate]
    if len(known) < len(names):
        return None
    bytes_s = sum(total_bytes / 1e9 / rate for rate in known)
    calls_s = CALLS_S + TENSOR_S * tensors
    total_s = bytes_s / LEAST_SHARE + calls_s
    parts = " + ".join(f"{name} ({rate:.3g} GB/s)" for name, rate in zip(names, known, strict=True))
    note = (
        f"allowed are {1000 * total_s:.3g} ms: {1000 * bytes_s:.3g} ms for {total_bytes / 1e6:,.1f} MB at "
        f"{parts}, divided by {LEAST_SHARE:g}, and {1000 * calls_s:.3g} ms for the calls of {tensors} tensors"
    )
    return AllowedTime(total_s, names[0], known[0], note)


def measured_rate(place: Place, name: str) -> float | None:
    """Return GB/s of a bare transfer that an earlier row has measured, or None."""
    return next(
        filter(None, (value_in(place.directory / f"{row}.jsonl", name) for row in ("copies", "links"))), None
    )
