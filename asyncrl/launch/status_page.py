"""What rank 0 shows once a second: the run's status, and its record in the store."""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from asyncrl.best_effort import BestEffort
from asyncrl.control.zmq import ControlHub
from asyncrl.launch.taking import Taking
from asyncrl.telemetry.status import StatusSnapshot

Show = Callable[[StatusSnapshot], None]


class StatusPage:
    """Shows the status from a separate thread, also while the learner waits or trains."""

    def __init__(
        self,
        first: StatusSnapshot,
        *,
        hub: ControlHub,
        taking: Taking,
        renew: Callable[[str], None],
        shows: Iterable[Show],
        guard: BestEffort,
    ) -> None:
        """Start the thread.

        Args:
            first: the status at the start; the fields that nothing here changes stay.
            hub: knows the generators.
            taking: knows the place of every ticket.
            renew: writes the run's record, with the control plane's endpoint, into the store, which may have
                been wiped.
            shows: get every snapshot.
            guard: counts the seconds in which one of these failed.
        """
        self._now = first
        self._hub = hub
        self._taking = taking
        self._renew = renew
        self._shows = tuple(shows)
        self._ticker = Ticker(self._tick, guard)
        self._ticker.start()

    def enter(self, state: str, message: str = "") -> None:
        """Set `StatusSnapshot.state` and, for a final state, its reason."""
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
        self._renew(self._hub.endpoint)
        status = replace(
            self._now,
            updated_at=time.time(),
            members=tuple(self._hub.members()),
            audit=self._taking.audit(),
            audit_mismatch=self._taking.mismatch,
            counters=self._hub.counters(),
        )
        for show in self._shows:
            show(status)


class Ticker:
    """Calls `tick` once a second from a thread, also after calls that failed, which `guard` counts."""

    def __init__(self, tick: Callable[[], None], guard: BestEffort) -> None:
        self._tick, self._guard = tick, guard
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="asyncrl-tick", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread, then call `tick` once more."""
        self._stop.set()
        self._thread.join(timeout=10.0)
        self._tick_once()

    def _run(self) -> None:
        while not self._stop.wait(1.0):
            self._tick_once()

    def _tick_once(self) -> None:
        with self._guard("the status"):
            self._tick()
