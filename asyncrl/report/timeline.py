"""A run's timeline for Perfetto: the learner's steps, the life of every group, the updates of the weights.

The file has events of the Chrome trace format, one per line, in a JSON array that is never closed: Perfetto
accepts it while it grows. Times come from the clock of the process that acted. The moments of a group are put
in order, so where the clocks of two hosts differ, a part of its life has a wrong but never a negative length.
"""

import threading
import time
import zlib
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from asyncrl.best_effort import BestEffort
from asyncrl.learner import Step
from asyncrl.telemetry.jsonl import Lines, to_json
from asyncrl.types import Group
from asyncrl.weights.base import UpdateReport

OPENING, END = b"[\n", b",\n"
MAX_BYTES = 32 << 20  # size of one file, enough for about 900 steps of 32 groups; there are at most two files
LEARNER, STEPS, WEIGHTS = "learner", "steps", "weights"
# The life of a group: `leased` waits for weights, `put` for the probe of the weights, `taken` for the step.
LIFE = ("leased", "sampling", "reward", "put", "in queue", "taken", "trained")


class Timeline:
    """Slices on tracks of processes. Any thread may write: the learner's and the control plane's do."""

    def __init__(self, path: Path | None, *, max_bytes: int = MAX_BYTES) -> None:
        """Append to the file `path`, or with None write nothing. A full file replaces `<stem>.1.json`."""
        self._path, self._max_bytes = path, max_bytes
        self._lock = threading.Lock()
        self._named: set[tuple[str, str]] = set()
        self._lanes: dict[str, list[float]] = {}
        self._lines = Lines(path, opening=OPENING, end=END) if path else None
        self._may_fail = BestEffort()

    def slice(
        self, process: str, track: str, name: str, start_at: float, end_at: float, **details: Any
    ) -> None:
        """Add an event; its times are Unix seconds. Events of a track that overlap must nest."""
        start_us, end_us = round(start_at * 1e6), round(end_at * 1e6)
        event = {"ph": "X", "name": name, "ts": start_us, "dur": end_us - start_us, "args": to_json(details)}
        # The ids of a process and a track are the same in every process and after every restart.
        pid, tid = (zlib.crc32(text.encode()) >> 1 for text in (process, f"{process} {track}"))
        with self._lock, self._may_fail("writing the timeline"):
            if not self._lines or not self._path:
                return
            new = {} if (process, track) in self._named else {"process_name": process, "thread_name": track}
            self._named.add((process, track))
            names = ({"ph": "M", "name": kind, "args": {"name": text}} for kind, text in new.items())
            self._lines.write([one | {"pid": pid, "tid": tid} for one in (*names, event)])
            if self._lines.size > self._max_bytes:
                self._path.replace(self._path.with_name(f"{self._path.stem}.1{self._path.suffix}"))
                self._named.clear()
                self._lines.write([])

    def close(self) -> None:
        with self._lock:
            if self._lines:
                self._lines.close()
                self._lines = None

    def checkpoint(self, version: int, seconds: float) -> None:
        """Write a checkpoint that has just been saved."""
        now_at = time.time()
        self.slice(LEARNER, STEPS, f"checkpoint {version}", now_at - seconds, now_at)

    def update(self, generator_id: str, report: UpdateReport) -> None:
        """Write an update that a generator has just reported."""
        outcome = report.reason or "applied"
        details = {"outcome": outcome, "paused_s": report.paused_s, "probe_max": report.probe_max}
        now_at, name = time.time(), f"version {report.version}"
        self.slice(generator_id, WEIGHTS, name, now_at - report.update_s, now_at, **details)

    def step(self, step: Step) -> None:
        """Write a step that has just ended, with its parts and the groups that it took."""
        spans = [(span.name, span.started_at, span.started_at + span.duration_s) for span in step.spans]
        if not spans:
            return
        count = len(step.collected.groups)
        self.slice(LEARNER, STEPS, f"step {step.version}", spans[0][1], spans[-1][2], groups=count)
        for span in spans:
            self.slice(LEARNER, STEPS, *span)
        training = next((start, end) for name, start, end in spans if name == "train")
        for group in step.collected.groups:
            self._group(step, group, training, f"trained in step {step.version}")
        for group, reason in step.collected.rejected:
            self._group(step, group, (), f"rejected: {reason}")

    def _group(self, step: Step, group: Group, training: Sequence[float], outcome: str) -> None:
        times, taken_at = group.times, step.collected.taken_at.get(group.ticket_id)
        if times is None or taken_at is None:
            return
        sampled_at = times.sampling_at + group.sampling_s
        sampled = (times.leased_at, times.sampling_at, sampled_at, sampled_at + group.reward_s)
        moments = list(accumulate((*sampled, times.put_at, taken_at, *training), max))
        versions = [span.version for rollout in group.rollouts for span in rollout.version_spans]
        oldest, newest = min(versions, default=-1), max(versions, default=-1)
        details = {"outcome": outcome, "oldest_version": oldest, "newest_version": newest}
        process = group.generator_id
        with self._lock:
            # Groups at one time do not nest, so each has a track of its own.
            ends = self._lanes.setdefault(process, [])
            free = next((index for index, end in enumerate(ends) if end <= moments[0]), len(ends))
            ends[free : free + 1] = [moments[-1]]
        track = f"groups {free + 1:03}"
        self.slice(process, track, f"group {group.ticket_id}", moments[0], moments[-1], **details)
        for name, (start_at, end_at) in zip(LIFE, pairwise(moments), strict=False):
            self.slice(process, track, name, start_at, end_at)
