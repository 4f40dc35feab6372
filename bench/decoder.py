"""How fast a learner decodes groups, and in how much memory: `python -m bench.decoder [--json FILE]`.

Groups per second that one thread decodes, in the learner's process (the default) and with
`store.isolate_decoding`, in alternating rounds; and the growth of VmHWM of a fresh process that reads and
decodes one frame.
"""

import argparse
import hashlib
import json
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import psutil

from asyncrl.columns import COLUMNS, NONE
from asyncrl.types import Group, Rollout, VersionSpan
from asyncrl.wire import codec
from asyncrl.wire.decoder import IsolatedDecoder
from asyncrl.wire.group_frames import (
    GROUP_LIMITS,
    MAX_ROLLOUTS,
    MAX_SPANS,
    decode_group,
    encode_group,
)
from bench.environment import describe

KEY = b"key of the bench"
ROUNDS = 7
ROUND_S = 1.0

CHILD = """
import sys
from asyncrl.errors import WireError
from asyncrl.wire.group_frames import decode_group

def high_water_kib():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

try:
    decode_group(b"no frame", b"")
except WireError:
    before = high_water_kib()
with open(sys.argv[1], "rb") as file:
    frame = file.read()
verdict = "accepted"
try:
    group = decode_group(frame, b"")
except WireError as error:
    verdict = "refused: " + str(error)[:60]
print(high_water_kib() - before, verdict, sep="|")
"""


def group_of(rollouts: int, tokens: int, spans: int = 1) -> Group:
    """A group with `spans` version spans per rollout."""
    return Group(
        ticket_id=1,
        rollouts=tuple(
            Rollout(
                prompt_ids=np.arange(64, dtype=np.int32),
                response_ids=np.arange(tokens, dtype=np.int32),
                action_mask=np.ones(tokens, dtype=np.bool_),
                behaviour_logprobs=np.full(tokens, -0.5, dtype=np.float32),
                version_spans=tuple(VersionSpan(i, tokens // spans) for i in range(spans)),
                finish_reason="stop",
                reward=1.0,
                reward_parts={"correct": 1.0},
            )
            for _ in range(rollouts)
        ),
        generator_id="generator-0",
        finished_version=3,
    )


def rates(decode: Callable[[bytes], Group], frame: bytes, used_s: Callable[[], float]) -> tuple[float, float]:
    """Groups per second of the clock, and of the processors, which other programs do not affect."""
    count, started_s, started_used_s = 0, time.perf_counter(), used_s()
    while time.perf_counter() - started_s < ROUND_S:
        for _ in range(10):
            decode(frame)
        count += 10
    return count / (time.perf_counter() - started_s), count / (used_s() - started_used_s)


def cost(frame: bytes) -> dict[str, Any]:
    """Medians of rounds in alternation."""
    decoder = IsolatedDecoder(KEY)

    def used_by_both_s() -> float:
        other = psutil.Process(decoder.pid).cpu_times()
        return time.process_time() + other.user + other.system

    ways: dict[str, tuple[Callable[[bytes], Group], Callable[[], float]]] = {
        "in_process": (lambda data: decode_group(data, KEY), time.process_time),
        "isolated": (decoder.decode, used_by_both_s),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    try:
        decoder.decode(frame)
        for _ in range(ROUNDS):
            for name, (decode, used_s) in ways.items():
                found[name].append(rates(decode, frame, used_s))
    finally:
        decoder.close()
    row = {"frame_bytes": len(frame)}
    for name, rounds in found.items():
        by_clock, by_cpu = (round(statistics.median(column)) for column in zip(*rounds, strict=True))
        row |= {f"{name}_groups_per_s": by_clock, f"{name}_groups_per_cpu_s": by_cpu}
    return row


def forged(meta: dict[str, Any] | bytes, columns: dict[str, np.ndarray]) -> bytes:
    """A frame with a true checksum around anything."""
    arrays = {
        name: columns.get(name, np.empty([0] * len(column.axes), column.dtype))
        for name, column in COLUMNS.items()
        if not column.optional and column.axes != ("turns",)
    }
    ordered = sorted(arrays.items(), key=lambda item: -item[1].dtype.itemsize)
    table = [[name, array.dtype.name, *array.shape] for name, array in ordered]
    packed = meta if isinstance(meta, bytes) else msgpack.packb(meta | {"arrays": table})
    body = b"".join(array.tobytes() for _, array in ordered)
    fields = struct.pack(
        "<8sHHIQ", codec.MAGIC, codec.WIRE_VERSION, GROUP_LIMITS.kind, len(packed), len(body)
    )
    return fields + hashlib.blake2b(fields + body + packed, digest_size=16).digest() + body + packed


def hostile() -> dict[str, bytes]:
    """Frames that are small on the wire and large in memory, if they are let."""
    count = 1_000_000
    empty = {
        "finish_reasons": ["stop"],
        "parts": [],
        "ticket_id": 1,
        "generator_id": "g",
        "finished_version": 1,
    }
    times = {"sampling_s": 0.0, "reward_s": 0.0, "lane": "train"}
    many: dict[str, np.ndarray] = {
        **dict.fromkeys(("prompt_tokens", "response_tokens", "spans"), np.zeros(count, np.int32)),
        "answer_bytes": np.full(count, NONE, np.int32),
        "finish": np.zeros(count, np.uint8),
        "rewards": np.zeros(count, np.float64),
        "reward_parts": np.zeros((count, 0), np.float64),
    }
    spans: dict[str, np.ndarray] = {
        **dict.fromkeys(("prompt_tokens", "response_tokens"), np.zeros(1, np.int32)),
        "spans": np.full(1, count, np.int32),
        "span_versions": np.zeros(count, np.int64),
        "span_lineages": np.zeros(count, np.int64),
        "span_tokens": np.zeros(count, np.int32),
        "answer_bytes": np.full(1, NONE, np.int32),
        "finish": np.zeros(1, np.uint8),
        "rewards": np.zeros(1, np.float64),
        "reward_parts": np.zeros((1, 0), np.float64),
    }
    return {
        "meta of nested empty lists": forged(msgpack.packb({"arrays": [[[]] * 255] * 250}), {}),
        "meta of nested empty maps": forged(msgpack.packb({"arrays": [[{}] * 255] * 250}), {}),
        "a million empty rollouts": forged(empty | times, many),
        "a million spans of no token": forged(empty | times, spans),
    }


def amplification(frame: bytes) -> dict[str, Any]:
    """Growth of a fresh process that reads and decodes the frame."""
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(frame)
        output = subprocess.run(
            [sys.executable, "-c", CHILD, file.name], capture_output=True, text=True, check=True, timeout=120
        )
    grown_kib, verdict = output.stdout.strip().split("|")
    return {"frame_kib": len(frame) >> 10, "grown_kib": int(grown_kib), "verdict": verdict}


def memory() -> dict[str, dict[str, Any]]:
    """By kind of frame."""
    honest = {
        "64 KB": group_of(8, 850),
        "16 MB": group_of(8, 230_000),
        "56 MB": group_of(8, 800_000),
        "most rollouts": group_of(MAX_ROLLOUTS, 16),
        "most spans": group_of(64, MAX_SPANS // 64, MAX_SPANS // 64),
    }
    frames = {name: encode_group(group) for name, group in honest.items()} | hostile()
    return {name: amplification(frame) for name, frame in frames.items()}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    costs = [cost(encode_group(group_of(8, tokens), KEY)) for tokens in (64, 850, 20_000)]
    for row in costs:
        print(row)
    found = memory()
    for name, row in found.items():
        print(f"{name}: {row}")
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"environment": describe(), "cost": costs, "memory": found}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
