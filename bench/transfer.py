"""Transfer of one version of the weights against a raw transfer of the same bytes, in the same run.

    python -m bench.transfer [--transport tcp] [--mib 512] [--rounds 45] [--json bench/results/transfer.json]
    python -m bench.transfer --transport slot [--device cuda]
    python -m bench.transfer --transport nccl [--device cuda]

Two processes on this host. Over `tcp`, on the loopback interface, raw is one stream without anything of ours.
Over `slot`, one reads the slot of the other (on the first GPU, into the last one), and raw is one copy of all
bytes. Over `nccl` (Gloo between CPUs), raw is one broadcast of all bytes, from the first GPU to the last one;
ours ends in memory of the host, and is always verified. The kinds take turns and change places, so that all
see the same machine; ratios are formed within a round, and their median and quartiles over the rounds are
reported. All receive into memory that is already there: "layout" as an update does, but without checksums,
"checksums" verified too. Copies take one thread; checksums of a slot take "checksum_threads", as they do in a
generator, and "checksum_gb_per_s" is their rate over a whole version. "publish_s" is how long the training
loop is blocked by the publication of a version, beside one copy of it.
"""

import argparse
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import msgpack
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from asyncrl.hosting.gpus import count_gpus, visible_devices
from asyncrl.hosting.workers import pack, receive
from asyncrl.weights import nccl, stream
from asyncrl.weights.base import TensorSpec
from asyncrl.weights.layout import Layout, checksum_threads, checksums, verify
from asyncrl.weights.publisher import SlotPublisher
from asyncrl.weights.slots import Slot, open_slot
from asyncrl.weights.stream import SlotServer
from bench.environment import add_options, report

KINDS = {
    "tcp": ("raw", "layout", "checksums"),
    "slot": ("raw", "layout", "checksums"),
    "nccl": ("raw", "checksums"),
}
LOOPBACK, DEADLINE_S = "127.0.0.1", 60.0


def make_layout(options: argparse.Namespace) -> Layout:
    """Matrices of 2 MiB in bfloat16 and vectors between them, like a small decoder's."""
    specs, rows = [], 1024 if options.dtype == "bfloat16" else 512
    for index in range(options.mib // 2):
        specs.append(TensorSpec(name=f"layer.{index}.matrix", dtype=options.dtype, shape=(rows, 1024)))
        specs.append(TensorSpec(name=f"layer.{index}.norm", dtype=options.dtype, shape=(1000,)))
    return Layout.plan(specs, 1 << 26)


def serve(options: argparse.Namespace) -> None:
    """The learner's side, in a process of its own: a slot, its server, and raw bytes on demand."""
    layout = make_layout(options)
    slot = Slot.create(layout.total_bytes, options.device)
    slot.buffer.fill_(7)
    slot.complete(1)
    described: dict[str, Any] = {"slot": slot.describe(), "sums": checksums(slot.buffer, layout)}
    server = SlotServer(
        LOOPBACK,
        lambda stamp: slot.file,
        layout.total_bytes,
        deadline_s=DEADLINE_S,
        start=partial(nccl.start, nccl.SENDS),
    )
    server.most_handed = 1
    described["source"] = server.source(1)
    store = TCPStore(LOOPBACK, 0, 2, is_master=True, wait_for_workers=False)
    described["store"] = store.port
    with socket.create_server((LOOPBACK, 0)) as listener:
        described["raw"] = listener.getsockname()
        sys.stdout.buffer.write(pack(described))
        sys.stdout.buffer.flush()
        with listener.accept()[0] as channel:
            if options.transport == "nccl":
                form_group(0, store, options.device)
            while channel.recv(1):
                if options.transport == "nccl":
                    broadcast(slot.buffer)
                else:
                    channel.sendall(slot.buffer.numpy().data)


def form_group(rank: int, store: TCPStore, device: str) -> None:
    """The group of the raw broadcast, on the first GPU that this process sees."""
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=rank, world_size=2)


def broadcast(buffer: torch.Tensor) -> None:
    dist.broadcast(buffer, src=0)
    if buffer.is_cuda:
        torch.cuda.synchronize()


def over_tcp(layout: Layout, described: dict[str, Any]) -> Callable[[str], None]:
    ours = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    channel, memory = socket.create_connection(tuple(described["raw"])), ours.numpy().data

    def move(kind: str) -> None:
        if kind == "raw":
            channel.sendall(b"!")
            arrived = 0
            while arrived < len(memory):
                arrived += channel.recv_into(memory[arrived:])
            return
        with mock.patch("asyncrl.weights.stream.verify", verify if kind == "checksums" else lambda *_: None):
            until_s = time.monotonic() + DEADLINE_S
            stream.fetch(described["source"], ours, layout, described["sums"], until_s=until_s)

    return move


def over_nccl(layout: Layout, described: dict[str, Any], device: str) -> Callable[[str], None]:
    """On GPUs, this process and the one that it starts to receive see only the last one."""
    if device == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices([count_gpus() - 1])
    channel = socket.create_connection(tuple(described["raw"]))
    form_group(1, TCPStore(LOOPBACK, described["store"], 2, is_master=False), device)
    raw = torch.zeros(layout.total_bytes, dtype=torch.uint8, device=device)
    ours, fetcher = Slot.create(layout.total_bytes), nccl.NcclFetcher()
    touched = os.memfd_create("touched")  # the process that receives changes its time
    source = described["source"] | {"slot": described["slot"]}

    def move(kind: str) -> None:
        if kind == "raw":
            channel.sendall(b"!")
            broadcast(raw)
            return
        until_s = time.monotonic() + DEADLINE_S
        fetcher.fetch(source, ours, layout, described["sums"], until_s=until_s, touched=touched)

    return move


def from_slot(layout: Layout, described: dict[str, Any], device: str) -> Callable[[str], None]:
    """Read the other process's memory; on GPUs, into the last one."""
    index = torch.cuda.device_count() - 1 if device == "cuda" else None
    if index is not None:
        torch.cuda.set_device(index)
    theirs = open_slot(described["slot"], layout.total_bytes, device=index)
    ours = torch.zeros(layout.total_bytes, dtype=torch.uint8, device=device)

    def move(kind: str) -> None:
        if kind == "checksums" and device == "cpu":  # as a generator does: in place, before requests pause
            verify(theirs.buffer, layout, described["sums"])
        if kind == "raw":
            ours.copy_(theirs.buffer)
        else:
            for index in range(len(layout.specs)):
                layout.view(ours, index).copy_(layout.view(theirs.buffer, index))
        if device == "cuda":
            if kind == "checksums":
                verify(ours, layout, described["sums"])
            torch.cuda.synchronize()

    return move


def measure(move: Callable[[str], None], kinds: tuple[str, ...], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(rounds + 1):
        first = turn % len(kinds)
        for kind in kinds[first:] + kinds[:first]:
            started_s = time.perf_counter()
            move(kind)
            seconds[kind].append(time.perf_counter() - started_s)
    return {kind: values[1:] for kind, values in seconds.items()}  # the first one warms up


def quartiles(seconds: dict[str, list[float]], kind: str) -> dict[str, float]:
    """Of the rate relative to the raw transfer of the same round."""
    ratios = [raw / own for raw, own in zip(seconds["raw"], seconds[kind], strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    return {"lower": round(low, 3), "median": round(median, 3), "upper": round(high, 3)}


def checksum_rate(options: argparse.Namespace) -> float:
    layout = make_layout(options)
    buffer = torch.empty(layout.total_bytes, dtype=torch.uint8, device=options.device).fill_(7)
    seconds = []
    for _ in range(options.rounds):
        started_s = time.perf_counter()
        checksums(buffer, layout)
        seconds.append(time.perf_counter() - started_s)
    return layout.total_bytes / statistics.median(seconds) / 1e9


def publish_s(options: argparse.Namespace) -> dict[str, float]:
    """Median seconds of `publish`, and of one copy of the version, in turn."""
    layout = make_layout(options)
    version, copy = (torch.ones(layout.total_bytes, dtype=torch.uint8, device=options.device) for _ in "ab")
    tensors = [(spec.name, layout.view(version, index)) for index, spec in enumerate(layout.specs)]
    seconds: dict[str, list[float]] = {"publish": [], "copy": []}
    with tempfile.TemporaryDirectory() as directory:
        publisher = SlotPublisher(
            layout,
            device=options.device,
            probe_ids=(),
            initial_logprobs=(),
            directory=Path(directory) / "weights",
            deadline_s=60.0,
        )
        for number in range(options.rounds + 3):  # each of the slots is written for the first time
            started_s = time.perf_counter()
            published = publisher.publish(number, tensors, ())
            seconds["publish"].append(time.perf_counter() - started_s)
            published.result()  # a step of the learner takes longer than the checksums
            started_s = time.perf_counter()
            copy.copy_(version)
            if options.device == "cuda":
                torch.cuda.synchronize()
            seconds["copy"].append(time.perf_counter() - started_s)
        publisher.close()
    return {kind: round(statistics.median(values[3:]), 4) for kind, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--transport", choices=tuple(KINDS), default="tcp")
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=45)
    parser.add_argument("--server", action="store_true", help=argparse.SUPPRESS)
    add_options(parser, dtype="bfloat16")
    options = parser.parse_args()
    if options.device == "cuda" and options.transport == "tcp":
        parser.error("tcp sends from host memory: leave --device away")
    if options.device == "cuda" and options.transport == "nccl" and count_gpus() < 2:
        parser.error(
            f"--transport nccl --device cuda: found {count_gpus()} GPUs, and NCCL refuses two processes on "
            "one; run it where two are visible, or leave --device away: Gloo then takes its place"
        )
    torch.set_num_threads(1)
    if options.server:
        serve(options)
        return
    command = [sys.executable, "-m", "bench.transfer", *sys.argv[1:], "--server"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            described = msgpack.unpackb(receive(server.stdout))
            layout = make_layout(options)
            if options.transport == "tcp":
                move = over_tcp(layout, described)
            else:
                opened = over_nccl if options.transport == "nccl" else from_slot
                move = opened(layout, described, options.device)
            seconds = measure(move, KINDS[options.transport], options.rounds)
        finally:
            server.kill()
    total_bytes = make_layout(options).total_bytes
    rates = {kind: total_bytes / statistics.median(values) / 1e9 for kind, values in seconds.items()}
    result = {
        "workload": {
            "bytes": total_bytes,
            "rounds": options.rounds,
            "transport": options.transport,
            "device": options.device,
            "dtype": options.dtype,
        },
        "hardware": {"machine": platform.machine(), "cpus": os.cpu_count(), "load": os.getloadavg()[0]},
        "torch": torch.__version__,
        "gb_per_s": {kind: round(rate, 3) for kind, rate in rates.items()},
        "checksum_threads": checksum_threads(total_bytes) if options.device == "cpu" else 0,
        "checksum_gb_per_s": round(checksum_rate(options), 1),
        **({"ratio_without_checksums": quartiles(seconds, "layout")} if "layout" in seconds else {}),
        "ratio": quartiles(seconds, "checksums"),
        "publish_s": publish_s(options),
    }
    report(result, options.json)


if __name__ == "__main__":
    main()
