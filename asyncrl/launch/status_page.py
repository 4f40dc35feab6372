"""What rank 0 shows once a second: the run's status, and its record in the store."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.best_effort import BestEffort
from asyncrl.config.schema import Config
from asyncrl.control.zmq import ControlHub
from asyncrl.hosting.gpus import resolve_device
from asyncrl.hosting.machine import share_of_cores
from asyncrl.hosting.progress import doing
from asyncrl.launch.taking import Taking
from asyncrl.report.reports import Reporting
from asyncrl.run.directory import RunDirectory
from asyncrl.telemetry.state import LEARNER
from asyncrl.telemetry.status import StatusSnapshot, write_status
from asyncrl.telemetry.text import duration
from asyncrl.telemetry.trackers import JsonlTracker

Show = Callable[[StatusSnapshot], None]

HEARD_S = 10.0  # between two lines of a generator that writes none here
SILENT_S = 5.0  # a store that has not answered for so long is told


@dataclass(slots=True)
class _Heard:
    """What is known of the lines of one generator."""

    is_ours: bool  # whether we write its file
    alive_s: float | None = None  # of the metrics that were written last
    next_s: float = 0.0  # when its next line may be written


@dataclass(slots=True)
class Heard:
    """Writes the metrics that generators send, if they do not write them into this directory themselves.

    A generator makes its file before it joins, so it writes elsewhere if none is here when it is first seen.
    This is decided once, because a network may delay lines. `NAME.heard` tells it to a later learner.
    """

    directory: Path
    _generators: dict[str, _Heard] = field(default_factory=dict)

    def show(self, status: StatusSnapshot) -> None:
        """Write what is new of each generator that writes elsewhere, at most every `HEARD_S`."""
        now_s = time.monotonic()
        for member in status.members:
            name, alive_s = member.generator_id, member.metrics.get("alive_s")
            file, mark = self.directory / f"{name}.jsonl", self.directory / f"{name}.heard"
            if (heard := self._generators.get(name)) is None:
                # A generator may call itself as it likes, and the learner's own file is not a generator's.
                heard = _Heard(name != LEARNER and (mark.exists() or not file.exists()))
                if heard.is_ours:
                    mark.touch()
                self._generators[name] = heard
            if heard.is_ours and alive_s != heard.alive_s and now_s >= heard.next_s:
                with closing(JsonlTracker(file)) as tracker:
                    tracker.log(member.metrics)
                heard.alive_s, heard.next_s = alive_s, now_s + HEARD_S


@dataclass(slots=True, kw_only=True)
class StatusPage:
    """Shows the status once a second from a thread, also while learner or store wait, and after failures."""

    now: StatusSnapshot
    hub: ControlHub
    taking: Taking
    # Writes the run's record, with the control plane's endpoint, into the store, which may have been wiped.
    renew: Callable[[str], None]
    shows: Sequence[Show]
    guard: BestEffort  # counts the seconds in which something failed
    _stop: threading.Event = field(default_factory=threading.Event, init=False)
    _threads: Sequence[threading.Thread] = field(init=False)
    _heard: dict[str, Any] = field(default_factory=dict, init=False)  # what the store said last, and when
    _heard_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._heard_s = time.monotonic()
        loops = [partial(self._run, call) for call in (self._tick, self._ask)]
        self._threads = [threading.Thread(target=loop, name="asyncrl-tick", daemon=True) for loop in loops]
        for thread in self._threads:
            thread.start()

    def enter(self, state: str, message: str = "") -> None:
        """Set `StatusSnapshot.state` and, for a final state, its reason."""
        self.now = replace(self.now, state=state, message=message)

    def close(self) -> str:
        """Show the last state, stop, and return its message."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=10.0)
        if not self._threads[-1].is_alive():
            self._ask()
        self._tick()
        return self.now.message

    def _run(self, call: Callable[[], None]) -> None:
        while not self._stop.wait(1.0):
            call()

    def _ask(self) -> None:
        with self.guard("the record of the run in its store"):
            self.renew(self.hub.endpoint)
            self._heard = {"audit": self.taking.audit(), "audit_mismatch": self.taking.mismatch}
            self._heard_s = time.monotonic()

    def _tick(self) -> None:
        silent_s, heard = time.monotonic() - self._heard_s, self._heard
        message = self.now.message
        if silent_s > SILENT_S and not self.now.is_final:
            found = f"the store has not answered for {duration(silent_s)}, and what needs it waits"
            message, heard = f"{found}; see store/store.log, or the server at store.url", {}
        with self.guard("the status"):
            status = replace(
                self.now,
                updated_at=time.time(),
                doing=doing(),
                members=tuple(self.hub.members()),
                counters=self.hub.counters(),
                message=message,
                **heard,
            )
            for show in self.shows:
                show(status)


def open_page(
    config: Config,
    directory: RunDirectory,
    version: int,
    hub: ControlHub,
    taking: Taking,
    renew: Callable[[str], None],
    reporting: Reporting,
) -> StatusPage:
    """Show a run that begins at `version`, in its directory and to Prometheus if that is asked for."""
    shows: list[Show] = [partial(write_status, directory.status), Heard(directory.metrics).show]
    if exporter := reporting.exporter:
        shows.append(partial(exporter.show_status, max_bytes=config.store.max_gib * 2**30))
    now_at = time.time()
    now = StatusSnapshot(
        run=config.run.name,
        state="starting",
        step=version,
        total_steps=config.learner.steps,
        version=version,
        started_at=now_at,
        updated_at=now_at,
        pid=os.getpid(),
        lag_bound=config.lag_bound,
        max_lag=config.staleness.max_lag,
        ranks=config.learner.ranks,
        cores=share_of_cores() if resolve_device(config) == "cpu" else None,
    )
    return StatusPage(now=now, hub=hub, taking=taking, renew=renew, shows=shows, guard=reporting.guard)
