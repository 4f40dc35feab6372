"""What rank 0 shows of the run once a second: its status, for people and Prometheus, and its record in the
store."""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from asyncrl.best_effort import BestEffort
from asyncrl.launch.publication import Publication
from asyncrl.launch.taking import Taking
from asyncrl.telemetry.status import StatusSnapshot

Show = Callable[[StatusSnapshot], None]


class StatusPage:
    """Says what the learner is doing, from a thread of its own: also while the learner waits or trains."""

    def __init__(
        self,
        first: StatusSnapshot,
        *,
        publication: Publication,
        taking: Taking,
        renew: Callable[[str], None],
        shows: Iterable[Show],
        guard: BestEffort,
    ) -> None:
        """Start the thread.

        Args:
            first: what holds at the start; name, target and process stay as they are. publication: knows the
            generators. taking: knows where every ticket is. renew: writes the run's record, with the endpoint
            of the control plane, into the store, which may have been wiped. shows: get every snapshot. guard:
            counts the seconds in which one of these failed.
        """
        self._now = first
        self._publication = publication
        self._taking = taking
        self._renew = renew
        self._shows = tuple(shows)
        self._ticker = Ticker(self._tick, guard)
        self._ticker.start()

    def enter(self, state: str, message: str = "") -> None:
        """The learner's state from now on, as in `StatusSnapshot.state`, with the reason where it is a final
        one."""
        self._now = replace(self._now, state=state, message=message)

    @property
    def version(self) -> int:
        """The version that was published last; the learner sets it."""
        return self._now.version

    @version.setter
    def version(self, version: int) -> None:
        self._now = replace(self._now, version=version, step=version)

    def close(self) -> str:
        """Show the last state, stop, and return its message."""
        self._ticker.close()
        return self._now.message

    def _tick(self) -> None:
        self._renew(self._publication.endpoint)
        status = self._snapshot()
        for show in self._shows:
            show(status)

    def _snapshot(self) -> StatusSnapshot:
        return replace(
            self._now,
            updated_at=time.time(),
            members=tuple(self._publication.members()),
            audit=self._taking.audit(),
            audit_mismatch=self._taking.mismatch,
            counters=self._publication.counters(),
        )


class Ticker:
    """Calls `tick` once a second from a thread of its own."""

    def __init__(self, tick: Callable[[], None], guard: BestEffort) -> None:
        """`guard` counts the calls that fail; the next second's call comes all the same."""
        self._tick, self._guard = tick, guard
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="asyncrl-tick", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """Tick once more and end."""
        self._stop.set()
        self._thread.join(timeout=10.0)
        self._tick_once()

    def _run(self) -> None:
        while not self._stop.wait(1.0):
            self._tick_once()

    def _tick_once(self) -> None:
        with self._guard("status and its kin"):
            self._tick()
