"""Rows of a check of the GPUs: one that is fine, and the ways to fail. A row's process imports little else."""

import os

from bench.gpu.figures import absent, judged, noted, value_in
from tests.support.waiting import comes_true, hang


def fine(place):
    yield noted("device", note=place.device)
    yield judged("works", 1.0, at_least=1.0)
    yield place.speed("ratio", 0.5, at_least=0.97)
    yield absent("nccl", "one GPU")


def hangs(place):
    yield judged("before", 1.0)
    child = os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "600")
    (place.directory / "child").write_text(str(child))
    hang()
    yield judged("after", 1.0)


def dies(place):
    yield judged("before", 1.0)
    os.write(1, b"last words")
    os.kill(os.getpid(), 9)


def misses(place):
    yield judged("updates that failed", 1.0, at_most=0)


def late(place):
    """Whether the row that reads this one begins before it has ended."""
    reader = place.directory / "reader.log"
    yield noted("began", float(comes_true(reader.exists, 0.5)))


def reader(place):
    yield noted("found", value_in(place.directory / "late.jsonl", "began"))
