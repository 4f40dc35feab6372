"""Other designs in the same world: a list, and streams that are acknowledged after the step or after the
checkpoint.

As one finds them: the client's own retries, ids from a counter in the store, a checkpoint of the consumer.
Streams read what was pending first. A checkpoint is the list of the ids consumed so far.
"""

import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import redis
from redis.exceptions import ResponseError

from .lineage import Verdict
from .roles import EVENTS, EVERY, FINISH, B, Lines, Place

DESIGNS = ("list", "stream, acknowledged after the step", "stream, acknowledged after the checkpoint")
LIST, ACK_STEP, ACK_CHECKPOINT = DESIGNS
PAYLOAD = b"x" * 1000
MOST_WAITING = (EVERY + 3) * B
IDLE_S = 3.0
"""The consumer ends when nothing arrived for this long after the producers have stopped."""
CONSUMED, DONE = "consumed.json", "done"


def producer(design: str, place: Place, name: str, seed: int) -> None:
    """Counts, samples, pushes."""
    client = redis.Redis.from_url(place.store)
    while not (place.directory / DONE).exists():
        waiting = client.llen("queue") if design == LIST else client.xlen("stream")
        if (place.directory / FINISH).exists() or waiting >= MOST_WAITING:
            time.sleep(0.02)
            continue
        ticket_id = client.incr("next")
        time.sleep(0.005)
        if design == LIST:
            client.rpush("queue", b"%d " % ticket_id + PAYLOAD)
        else:
            client.xadd("stream", {"id": ticket_id, "frame": PAYLOAD})


def consumer(design: str, place: Place, name: str, checkpoints: Path) -> None:
    """Steps of B groups; a checkpoint after every `EVERY`."""
    lines, path = Lines(place.directory / EVENTS), place.directory / CONSUMED
    consumed: list[int] = json.loads(path.read_text()) if path.exists() else []
    queue = List(place) if design == LIST else Stream(place)
    version, unacknowledged = len(consumed) // B, list[Any]()
    groups: list[tuple[Any, int]] = []
    heard_at_s = time.monotonic()
    while not (is_over := (place.directory / FINISH).exists() and time.monotonic() - heard_at_s > IDLE_S):
        if new := queue.read(B - len(groups)):
            groups += new
            heard_at_s = time.monotonic()
        if len(groups) < B:
            continue
        time.sleep(0.005)
        version += 1
        lines.write(
            json.dumps({"at_s": time.monotonic(), "pid": os.getpid(), "event": "step", "version": version})
        )
        consumed += [ticket_id for _, ticket_id in groups]
        unacknowledged += [entry for entry, _ in groups]
        groups = []
        if design == ACK_STEP:
            queue.acknowledge(unacknowledged)
        if version % EVERY == 0:
            save(path, consumed)
            if design == ACK_CHECKPOINT:
                queue.acknowledge(unacknowledged)
    assert is_over
    save(path, consumed + [ticket_id for _, ticket_id in groups])
    (place.directory / DONE).touch()


class List:
    """BLPOP: what is read is gone."""

    def __init__(self, place: Place) -> None:
        self._client = redis.Redis.from_url(place.store)

    def read(self, count: int) -> list[tuple[Any, int]]:
        popped: Any = self._client.blpop(["queue"], timeout=1)
        return [(None, int(popped[1].split(b" ")[0]))] if popped else []

    def acknowledge(self, entries: list[Any]) -> None: ...


class Stream:
    """A consumer group with one consumer: first what it had been given before, then what is new."""

    def __init__(self, place: Place) -> None:
        self._client = redis.Redis.from_url(place.store)
        self._from: Any = "0"

    def read(self, count: int) -> list[tuple[Any, int]]:
        try:
            reply: Any = self._client.xreadgroup(
                "learners", "learner", {"stream": self._from}, count=count, block=1000
            )
        except ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            self._client.xgroup_create("stream", "learners", id="0", mkstream=True)
            return []
        entries = reply[0][1] if reply else []
        if self._from != ">":
            self._from = entries[-1][0] if entries else ">"
        return [(entry, int(fields[b"id"])) for entry, fields in entries if fields]

    def acknowledge(self, entries: list[Any]) -> None:
        if entries:
            self._client.xack("stream", "learners", *entries)
            self._client.xdel("stream", *entries)
            entries.clear()


def save(path: Path, consumed: list[int]) -> None:
    """Durable before it counts."""
    writing = path.with_suffix(".writing")
    with writing.open("w") as file:
        json.dump(consumed, file)
        file.flush()
        os.fsync(file.fileno())
    writing.rename(path)


def judge(directory: Path) -> Verdict:
    """Of the consumer's last checkpoint."""
    consumed = Counter(json.loads((directory / CONSUMED).read_text()))
    return Verdict(
        groups=consumed.total(),
        steps=consumed.total() // B,
        rejected=0,
        lost=max(consumed, default=0) - len(consumed),
        duplicated=consumed.total() - len(consumed),
        wrong=(),
    )
