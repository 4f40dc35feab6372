"""Rows about the machine: its software, its memory, and the links between its processes and GPUs.

A process of the row `links` is `python -m bench.gpu.hardware_rows tcp|nccl RANK FILE`. Rank 0 sends, and
writes GB/s into the file.
"""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from torch.distributed import FileStore  # type: ignore[attr-defined]

from asyncrl.errors import DataError
from asyncrl.hosting.gpus import count_together
from asyncrl.hosting.processes import bound_to_us, module_argv, stop_processes
from asyncrl.preflight.checks import gpu
from asyncrl.preflight.checks import host as software
from asyncrl.preflight.checks.base import Finding
from asyncrl.trainer.attention import choose_attention
from asyncrl.weights.slots import Slot
from bench.gpu.figures import Figure, Place, absent, judged, noted

# Names of bare transfers, from which the row `weights` makes its limits.
HOST_COPY, HOST_CHECKSUM, GPU_COPY = "host: copy", "host: XXH3 in one thread", "GPU: copy"
GPU_TO_HOST, HOST_TO_GPU = "GPU to pageable host memory", "pageable host memory to GPU"
TCP, NCCL = "tcp", "nccl"
GIB = 1 << 30
TIMES = 4  # the best of as many copies counts
PAIR_S, PAIR_DEADLINE_S = 90.0, 60.0
PAIR_BYTES = {TCP: 256 << 20, NCCL: GIB}
PAIR_TIMES = 5


def stack(place: Place) -> Iterator[Figure]:
    """Check versions, vLLM's plugin, and GPUs."""
    yield _found("packages", software.packages())
    for name in ("torch", "deepspeed", "transformers", *software.ENGINES):
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield noted(name, note=metadata.version(name))
    plugins = {point.name for point in metadata.entry_points(group="vllm.general_plugins")}
    yield judged("vLLM's plugin asyncrl", float("asyncrl" in plugins), at_least=1)
    if not place.on_gpu:
        yield absent("GPUs", "a rehearsal on the CPU")
        return
    yield _found("GPUs", software.gpus())
    yield noted("CUDA", note=str(torch.version.cuda))
    yield noted("attention", note=choose_attention(torch.device("cuda", 0), torch.bfloat16))
    yield _found("GPU state", gpu.state())


def _found(name: str, finding: Finding) -> Figure:
    """Return a check of `asyncrl doctor` as a figure; a warning is not judged."""
    note = " ".join(filter(None, (finding.found, finding.fix and f"(fix: {finding.fix})")))
    if finding.verdict == "warning":
        return noted(name, note=note)
    return judged(name, float(finding.verdict == "ok"), at_least=1, note=note)


def copies(place: Place) -> Iterator[Figure]:
    """Measure copies between host and GPU, and within each."""
    size_bytes = GIB if place.on_gpu else GIB // 16
    slot = Slot.create(size_bytes)
    started_s = time.perf_counter()
    slot.buffer.fill_(1)
    first_s = time.perf_counter() - started_s
    yield noted("host: first touch", size_bytes / first_s / 1e9, "GB/s")
    yield noted(HOST_COPY, _rate(torch.empty_like(slot.buffer), slot.buffer), "GB/s")
    yield noted(HOST_CHECKSUM, size_bytes / _checksum_s(slot.buffer) / 1e9, "GB/s")
    if not place.on_gpu:
        yield absent("copies to and from a GPU", "a rehearsal on the CPU")
        return
    there = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
    yield noted(GPU_TO_HOST, _rate(slot.buffer, there), "GB/s")
    yield noted(HOST_TO_GPU, _rate(there, slot.buffer), "GB/s")
    runtime = torch.cuda.cudart()
    status = int(runtime.cudaHostRegister(slot.buffer.data_ptr(), size_bytes, 0))
    yield judged("status of registering host memory", status, at_most=0)
    yield noted("GPU to registered host memory", _rate(slot.buffer, there), "GB/s")
    yield noted("registered host memory to GPU", _rate(there, slot.buffer), "GB/s")
    yield noted(GPU_COPY, _rate(torch.empty_like(there), there), "GB/s")


def _rate(target: torch.Tensor, source: torch.Tensor) -> float:
    """GB/s of the fastest copy."""
    return len(source) / min(copy_s(target, source) for _ in range(TIMES)) / 1e9


def copy_s(target: torch.Tensor, source: torch.Tensor) -> float:
    """Return the seconds of one copy."""
    started_s = time.perf_counter()
    target.copy_(source)
    if source.is_cuda or target.is_cuda:
        for device in {tensor.device for tensor in (source, target) if tensor.is_cuda}:
            torch.cuda.synchronize(device)
    return time.perf_counter() - started_s


def copy_to(index: int) -> str:
    """Return the name of the rate from the first GPU to another one."""
    return f"copy 0 to {index}"


def _checksum_s(buffer: torch.Tensor) -> float:
    """Return the seconds of the fastest checksum of memory of the host."""
    seconds = []
    for _ in range(TIMES):
        started_s = time.perf_counter()
        xxhash.xxh3_64_intdigest(buffer.numpy().data)
        seconds.append(time.perf_counter() - started_s)
    return min(seconds)


def links(place: Place) -> Iterator[Figure]:
    """Measure transfers between two processes, and copies between GPUs."""
    yield noted(TCP, pair_rate(TCP, place.directory), "GB/s", note="loopback, two processes")
    if not place.on_gpu or count_together() < 2:
        yield absent("nccl, peer to peer", "one GPU" if place.on_gpu else "a rehearsal on the CPU")
        return
    for index in range(1, count_together()):
        yield noted(f"peer access 0 to {index}", float(torch.cuda.can_device_access_peer(0, index)))
        source = torch.empty(GIB, dtype=torch.uint8, device="cuda:0")
        target = torch.empty(GIB, dtype=torch.uint8, device=f"cuda:{index}")
        yield noted(copy_to(index), _rate(target, source), "GB/s")
        del source, target
    yield noted(NCCL, pair_rate(NCCL, place.directory), "GB/s", note="first and last GPU")


def pair_rate(backend: str, directory: Path) -> float:
    """Return GB/s of a bare transfer between two new processes. Raises DataError."""
    command = module_argv("bench.gpu.hardware_rows", backend)
    answer = directory / f"pair-{backend}"
    processes = [subprocess.Popen(bound_to_us([*command, str(rank), str(answer)])) for rank in range(2)]
    try:
        statuses = [process.wait(PAIR_S) for process in processes]
    finally:
        stop_processes(processes, grace_s=0.0)
    if any(statuses):
        raise DataError(f"{backend}: two processes could not reach each other; see the row's log")
    return float(answer.read_text())


def _pair() -> None:
    backend, rank, file = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    seconds = (_nccl if backend == "nccl" else _tcp)(rank, file)
    if rank == 0:
        file.write_text(str(PAIR_BYTES[backend] / min(seconds) / 1e9))


def _tcp(rank: int, file: Path) -> list[float]:
    """Send over one connection of the loopback interface, and wait for the other side's answer."""
    store, payload = FileStore(f"{file}-store", 2), bytearray(PAIR_BYTES["tcp"])
    if rank == 1:
        with socket.create_connection(("127.0.0.1", int(store.get("port"))), PAIR_DEADLINE_S) as channel:
            for _ in range(PAIR_TIMES):
                arrived = 0
                while arrived < len(payload):
                    count = channel.recv_into(memoryview(payload)[arrived:])
                    assert count, "rank 0 has gone"
                    arrived += count
                channel.sendall(b"!")
        return []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PAIR_DEADLINE_S)
        store.set("port", str(listener.getsockname()[1]))
        channel, seconds = listener.accept()[0], []
        with channel:
            for _ in range(PAIR_TIMES):
                started_s = time.perf_counter()
                channel.sendall(payload)
                channel.recv(1)
                seconds.append(time.perf_counter() - started_s)
    return seconds


def _nccl(rank: int, file: Path) -> list[float]:
    """Broadcast from the first GPU to the last one."""
    index = 0 if rank == 0 else torch.cuda.device_count() - 1
    torch.cuda.set_device(index)
    store = FileStore(f"{file}-store", 2)
    timeout = timedelta(seconds=PAIR_DEADLINE_S)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2, timeout=timeout)
    payload = torch.zeros(PAIR_BYTES["nccl"], dtype=torch.uint8, device=f"cuda:{index}")
    seconds = []
    for _ in range(PAIR_TIMES):
        dist.barrier()
        started_s = time.perf_counter()
        dist.broadcast(payload, src=0)
        torch.cuda.synchronize()
        dist.barrier()
        seconds.append(time.perf_counter() - started_s)
    dist.destroy_process_group()
    return seconds


if __name__ == "__main__":
    _pair()
