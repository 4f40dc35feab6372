"""Exports of checkpoints as Hugging Face models, next to training, which waits for none but the last."""

import logging
import time
from collections.abc import Callable
from threading import Event, Thread

from asyncrl.errors import CheckpointError
from asyncrl.hosting.progress import Pace, beat, begin

log = logging.getLogger(__name__)

# Pause between two attempts at an export, and their number: a user may make room on a full disk.
AGAIN_S, ATTEMPTS = 1.0, 60
LAST_S, LOOK_S = 1200.0, 0.1  # longest wait for an export, and from one look at it to the next


class Exports:
    """The exports of one run. At most one is under way, in a thread that ends with the process."""

    def __init__(self, done: Callable[[int], object] = lambda step: None) -> None:
        """Call `done` in that thread with each step whose model is exported."""
        self._done, self._step, self._failure = done, 0, ""
        self._thread = Thread()
        self._hurries = Event()

    def begin(self, step: int, export: Callable[[], object]) -> None:
        """Begin with the export of `step`; no other is under way."""
        self._step, self._failure = step, ""
        self._hurries.clear()
        # A daemon: the export of a process that ends early is made when the run goes on.
        self._thread = Thread(target=self._run, args=(export,), name="export", daemon=True)
        self._thread.start()

    @property
    def is_under_way(self) -> bool:
        """Whether an export is not over yet, nor has failed."""
        return self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the export that is under way. If it has failed, it is not tried again."""
        self._hurries.set()
        self._join("the next checkpoint gets no model; see whether the disk hangs")

    def finish(self) -> None:
        """Wait for the last export and its attempts. Raises CheckpointError if all of them failed."""
        begin("export", Pace.SLOW)
        if self._join("the run ends; `asyncrl up` on it makes it") and self._failure:
            raise CheckpointError(
                f"step {self._step} is saved, but its model is not exported: {self._failure}"
            )

    def _join(self, otherwise: str) -> bool:
        """Wait for the export that is under way; return whether it is over. If not, say what that means."""
        until_s = time.monotonic() + LAST_S
        while self.is_under_way and time.monotonic() < until_s:
            self._thread.join(LOOK_S)
            beat()  # this wait has a limit of its own
        if self.is_under_way:
            log.warning("the export of step %d takes more than %g s: %s", self._step, LAST_S, otherwise)
        return not self.is_under_way

    def _run(self, export: Callable[[], object]) -> None:
        for _ in range(ATTEMPTS):
            try:
                export()
            except Exception as error:  # noqa: BLE001 - libraries wrap the error of a full disk
                if not self._failure:
                    text = "step %d is saved, its model is not exported yet, which is tried again: %s"
                    log.error(text, self._step, error)
                self._failure = f"{type(error).__name__}: {error}"
            else:
                self._failure = ""
                self._done(self._step)
                return
            if self._hurries.wait(AGAIN_S):
                break
        log.error("the checkpoint of step %d stays without a model (%s)", self._step, self._failure)
