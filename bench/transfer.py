"""Gloo transfer of one version of the weights against a raw torch broadcast of the same bytes, in the same
run.

    python -m bench.transfer [--mib 512] [--bucket-mib 64] [--rounds 45] [--out bench/results/transfer.json]

Two processes on this host. The three kinds take turns and change places, so that all see the same machine;
ratios are formed within a round, and their median and quartiles over the rounds are reported. All receive
into memory that is already there: "raw" in one broadcast, "layout" in buckets, "checksums" in buckets that
are verified too, as an update does. "checksum_gb_per_s" is one thread over a whole version, nothing else.
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
from pathlib import Path
from unittest import mock

import torch

from asyncrl.weights import gloo
from asyncrl.weights.base import TensorSpec
from asyncrl.weights.layout import Layout, checksums

KINDS = ("raw", "layout", "checksums")


def make_layout(mib: int, bucket_mib: int) -> Layout:
    """Matrices of 2 MiB and vectors between them, like a small decoder's."""
    specs = []
    for index in range(mib // 2):
        specs.append(TensorSpec(name=f"layer.{index}.matrix", dtype="bfloat16", shape=(1024, 1024)))
        specs.append(TensorSpec(name=f"layer.{index}.norm", dtype="bfloat16", shape=(1000,)))
    return Layout.plan(specs, bucket_mib << 20)


def work(rank: int, options: argparse.Namespace, directory: str) -> dict[str, list[float]]:
    layout = make_layout(options.mib, options.bucket_mib)
    buffer = torch.empty(layout.total_bytes, dtype=torch.uint8).fill_(7)
    sums = checksums(buffer, layout)
    group = gloo.open_group({"name": "bench", "directory": directory}, rank=rank, deadline_s=120.0)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in range(options.rounds + 1):
        for kind in KINDS[turn % 3 :] + KINDS[: turn % 3]:
            group.process_group.barrier().wait()
            started_s = time.perf_counter()
            if kind == "raw":
                group.process_group.broadcast(buffer, 0).wait()
            elif rank == 0:
                gloo.send(group, buffer, layout)
            else:
                receive(group, buffer, layout, sums, verified=kind == "checksums")
            group.process_group.barrier().wait()
            seconds[kind].append(time.perf_counter() - started_s)
    return {kind: values[1:] for kind, values in seconds.items()}  # the first one warms up


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
    layout = make_layout(options.mib, options.bucket_mib)
    buffer = torch.empty(layout.total_bytes, dtype=torch.uint8).fill_(7)
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
    parser.add_argument("--out", type=Path)
    parser.add_argument("--receiver", help=argparse.SUPPRESS)
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
    total_bytes = make_layout(options.mib, options.bucket_mib).total_bytes
    rates = {kind: total_bytes / statistics.median(values) / 1e9 for kind, values in seconds.items()}
    result = {
        "workload": {
            "bytes": total_bytes,
            "bucket_mib": options.bucket_mib,
            "rounds": options.rounds,
            "transport": "gloo, loopback",
        },
        "hardware": {"machine": platform.machine(), "cpus": os.cpu_count(), "load": os.getloadavg()[0]},
        "torch": torch.__version__,
        "gb_per_s": {kind: round(rate, 3) for kind, rate in rates.items()},
        "checksum_gb_per_s": round(checksum_rate(options), 1),
        "ratio_without_checksums": quartiles(seconds, "layout"),
        "ratio": quartiles(seconds, "checksums"),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
