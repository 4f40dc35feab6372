"""Transfer of one version of the weights against a raw transfer of the same bytes, in the same run.

    python -m bench.transfer [--mib 512] [--bucket-mib 64] [--rounds 45] [--json bench/results/transfer.json]
    python -m bench.transfer --device cuda

Two processes on this host: over Gloo, where raw is torch's broadcast; with `--device cuda` one reads the slot
of the other, on the first GPU, into the last one, and raw is one copy of all bytes. The three kinds take
turns and change places, so that all see the same machine; ratios are formed within a round, and their median
and quartiles over the rounds are reported. All receive into memory that is already there: "raw" at once,
"layout" in buckets or tensors, "checksums" verified too, as an update does. "checksum_gb_per_s" is one thread
over a whole version, nothing else.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch

from asyncrl.weights import gloo
from asyncrl.weights.base import TensorSpec
from asyncrl.weights.layout import Layout, checksums, verify
from asyncrl.weights.slots import Slot, open_slot
from bench.environment import add_options, report

KINDS = ("raw", "layout", "checksums")


def make_layout(options: argparse.Namespace) -> Layout:
    """Matrices of 2 MiB in bfloat16 and vectors between them, like a small decoder's."""
    specs, rows = [], 1024 if options.dtype == "bfloat16" else 512
    for index in range(options.mib // 2):
        specs.append(TensorSpec(name=f"layer.{index}.matrix", dtype=options.dtype, shape=(rows, 1024)))
        specs.append(TensorSpec(name=f"layer.{index}.norm", dtype=options.dtype, shape=(1000,)))
    return Layout.plan(specs, options.bucket_mib << 20)


def work(rank: int, options: argparse.Namespace, directory: str) -> dict[str, list[float]]:
    layout = make_layout(options)
    slot = Slot.create(layout.total_bytes, options.device) if rank == 0 else None
    if slot:
        slot.buffer.fill_(7)
        described = {"slot": slot.describe(), "sums": checksums(slot.buffer, layout)}
        Path(directory, "slot.json").write_text(json.dumps(described))
    group = gloo.open_group({"name": "bench", "directory": directory}, rank=rank, deadline_s=120.0)
    described = json.loads(Path(directory, "slot.json").read_text())
    if options.device == "cpu":
        buffer = slot.buffer if slot else torch.zeros(layout.total_bytes, dtype=torch.uint8)
        move = over_gloo(rank, group, buffer, layout, described["sums"])
    else:
        move = (lambda kind: None) if slot else from_slot(layout, described)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in range(options.rounds + 1):
        for kind in KINDS[turn % 3 :] + KINDS[: turn % 3]:
            group.process_group.barrier().wait()
            started_s = time.perf_counter()
            move(kind)
            group.process_group.barrier().wait()
            seconds[kind].append(time.perf_counter() - started_s)
    return {kind: values[1:] for kind, values in seconds.items()}  # the first one warms up


def over_gloo(
    rank: int, group: gloo.Group, buffer: torch.Tensor, layout: Layout, sums: tuple[int, ...]
) -> Callable[[str], None]:
    def move(kind: str) -> None:
        if kind == "raw":
            group.process_group.broadcast(buffer, 0).wait()
        elif rank == 0:
            gloo.send(group, buffer, layout)
        else:
            receive(group, buffer, layout, sums, verified=kind == "checksums")

    return move


def from_slot(layout: Layout, described: dict) -> Callable[[str], None]:
    """Read the other process's GPU memory into the last GPU."""
    device = torch.cuda.device_count() - 1
    torch.cuda.set_device(device)
    theirs = open_slot(described["slot"], layout.total_bytes, device=device)
    ours = torch.zeros(layout.total_bytes, dtype=torch.uint8, device="cuda")

    def move(kind: str) -> None:
        if kind == "raw":
            ours.copy_(theirs.buffer)
        else:
            for index in range(len(layout.specs)):
                layout.view(ours, index).copy_(layout.view(theirs.buffer, index))
        if kind == "checksums":
            verify(ours, layout, described["sums"])
        torch.cuda.synchronize()

    return move


def receive(
    group: gloo.Group, buffer: torch.Tensor, layout: Layout, sums: tuple[int, ...], *, verified: bool
) -> None:
    with mock.patch.object(gloo, "verify", gloo.verify if verified else lambda *_: None):
        gloo.receive(group, buffer, layout, sums)


def quartiles(seconds: dict[str, list[float]], kind: str) -> dict[str, float]:
    """Of the rate relative to the raw broadcast of the same round."""
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=45)
    parser.add_argument("--receiver", help=argparse.SUPPRESS)
    add_options(parser, dtype="bfloat16")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.receiver:
        work(1, options, options.receiver)
        return
    with tempfile.TemporaryDirectory() as directory:
        receiver = subprocess.Popen(
            [sys.executable, "-m", "bench.transfer", *sys.argv[1:], "--receiver", directory]
        )
        try:
            seconds = work(0, options, directory)
            receiver.wait(60)
        finally:
            receiver.kill()
    total_bytes = make_layout(options).total_bytes
    rates = {kind: total_bytes / statistics.median(values) / 1e9 for kind, values in seconds.items()}
    result = {
        "workload": {
            "bytes": total_bytes,
            "bucket_mib": options.bucket_mib,
            "rounds": options.rounds,
            "transport": "gloo, loopback" if options.device == "cpu" else "slot on the GPU",
            "dtype": options.dtype,
        },
        "hardware": {"machine": platform.machine(), "cpus": os.cpu_count(), "load": os.getloadavg()[0]},
        "torch": torch.__version__,
        "gb_per_s": {kind: round(rate, 3) for kind, rate in rates.items()},
        "checksum_gb_per_s": round(checksum_rate(options), 1),
        "ratio_without_checksums": quartiles(seconds, "layout"),
        "ratio": quartiles(seconds, "checksums"),
    }
    report(result, options.json)


if __name__ == "__main__":
    main()
