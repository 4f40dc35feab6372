"""What surrounds the learner's loop, on rank 0 and on the other ranks."""

import logging
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import sub

from asyncrl.buffer.intake import Collected
from asyncrl.config.schema import Config
from asyncrl.control.zmq import ControlHub
from asyncrl.data.image_processor import LearnerImages
from asyncrl.errors import reason_of
from asyncrl.hosting.progress import Pace, beat, begin
from asyncrl.launch.roles import NOT_FIXED_BY_A_RESTART
from asyncrl.launch.same_bytes import END, STOP, hand_out, receive
from asyncrl.launch.saving import LeadSaving, Saving
from asyncrl.launch.status_page import StatusPage
from asyncrl.launch.taking import Taking
from asyncrl.learner import Step
from asyncrl.plugins import is_stop
from asyncrl.report.reports import Reporting
from asyncrl.telemetry.logs import LogContext
from asyncrl.trainer.base import Trainer
from asyncrl.weights.base import Publisher
from asyncrl.wire.group_frames import decode_group

log = logging.getLogger(__name__)

# Time between two signs of life to the other ranks while groups are missing.
POLL_S = 1.0


def open_images(config: Config) -> LearnerImages | None:
    """Return the images of this rank, if the data has any."""
    return None if config.data.images_key is None else LearnerImages(config)


@dataclass(slots=True, kw_only=True)
class LeadRun(AbstractContextManager["LeadRun"]):
    """`learner.Run` of rank 0. Its end as a context manager shows the last state and ends the generators."""

    trainer: Trainer
    probe: Sequence[Sequence[int]]  # the token sequences of the probe
    logs: LogContext
    stop: threading.Event  # set when the learner is asked to stop; every rank saves first
    taking: Taking
    publisher: Publisher
    # Orders the generators to load what `publisher` has published; nothing waits for a generator.
    hub: ControlHub
    reporting: Reporting
    saving: LeadSaving
    page: StatusPage
    _rounds: int = field(default=0, init=False)
    # The scores of the probe, and how far the last step moved them on average, in nats.
    _before: Sequence[float] = field(default=(), init=False)
    _moved: float = field(default=0.0, init=False)

    def collect(self, version: int) -> Collected:
        """Take the groups of the next step and hand them to the other ranks."""

        def ending() -> bytes:
            if self.stop.is_set():
                return STOP
            if why := self.saving.judged.why_ended():
                # A warning, because only warnings show on the dashboard.
                log.warning("the training ends after step %d: %s", version, why)
                return END
            return b""

        def poll() -> Collected | None:
            self.hub.check()
            self.publisher.check()
            self.taking.heal(version)
            self.reporting.evaluation(self.taking.evaluated(), self._alive)
            return self.taking.poll(version, wait_s=POLL_S)

        def is_in_touch() -> bool:  # with the generators: otherwise no weights arrive
            before, self._rounds = self._rounds, self.hub.rounds
            return self._rounds != before

        collected = hand_out(self.trainer.broadcast, poll, ending=ending, is_in_touch=is_in_touch)
        if isinstance(collected, bytes):
            self.saving.save_and_leave(version, collected)
        return collected

    def _alive(self) -> None:
        self.trainer.broadcast(b"")  # to the other ranks, which wait and report that they live, too
        beat()

    def publish(self, version: int) -> None:
        """Publish the weights first, then open the credit for the groups that they will sample."""

        def announce(published: Future[int]) -> None:
            if published.exception() is None:  # else the next look at the publisher raises it
                self.hub.announce(published.result())

        self.logs.version = version
        logprobs = [*chain(*self.trainer.score(self.probe))]
        self._moved = sum(map(abs, map(sub, logprobs, self._before or logprobs))) / max(1, len(logprobs))
        self._before = logprobs
        self.page.enter("training")
        published = self.publisher.publish(version, self.trainer.tensors(), logprobs, self.taking.skipped())
        published.add_done_callback(announce)
        self.page.now = replace(self.page.now, version=version, step=version)
        self.taking.open(version)

    def report(self, step: Step) -> None:
        """Report a finished step and the evaluations that are complete; the other ranks wait for that."""
        counters = {f"weights/{name}": value for name, value in self.hub.counters().items()}
        counters["weights/moved"] = self._moved
        self.reporting.step(step, self.trainer.usage(), counters | self.taking.counters())
        self.taking.deaths.end(step.version - 1)  # its groups killed no learner
        self.reporting.evaluation(self.taking.evaluated(), self._alive)
        self.trainer.broadcast(b"reported")

    def checkpoint(self, version: int, *, last: bool) -> None:
        self.saving.checkpoint(version, last=last)

    def finish(self) -> None:
        """Wait for the evaluation of the final weights, then close the lane."""
        begin("last evaluation")
        self.page.enter("evaluating")
        for results in self.taking.last_rounds(self.page.now.version):
            self.reporting.evaluation(results)
            if self.stop.is_set():  # the generators leave too, and the last step is saved
                self.saving.exports.finish()
                raise SystemExit(128 + signal.SIGTERM)
            self.hub.check()
            self.publisher.check()
        self.taking.lane.close()  # no ticket will follow
        self.saving.finish()
        self.page.enter("finished", self.saving.judged.why_ended() or "the training is done")
        begin("end", Pace.SLOW)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            state = ("stopped", "asked to stop") if is_stop(error) else ("failed", reason_of(error))
            self.page.enter(*state)
        message = self.page.close()
        # After an error that a restart may cure, the generators wait for the next learner.
        is_over = error is None or isinstance(error, (SystemExit, *NOT_FIXED_BY_A_RESTART))
        self.hub.stop(message, farewell=is_over)
        self.publisher.close()


@dataclass(slots=True, kw_only=True)
class FollowerRun:
    """`learner.Run` of every other rank: it trains on the groups that rank 0 hands out."""

    trainer: Trainer
    probe: Sequence[Sequence[int]]
    logs: LogContext
    wire_key: bytes
    saving: Saving

    def collect(self, version: int) -> Collected:
        """Receive the groups from rank 0. If that was asked to stop, save and end with it."""
        collected = receive(self.trainer.broadcast, partial(decode_group, key=self.wire_key))
        if isinstance(collected, bytes):
            self.saving.save_and_leave(version, collected)
        return collected

    def publish(self, version: int) -> None:
        """Take part in scoring the probe and in gathering the weights; rank 0 hands them out."""
        self.logs.version = version
        self.trainer.score(self.probe)
        for _ in self.trainer.tensors():
            pass

    def report(self, step: Step) -> None:
        """Tell rank 0, which reports for all, what this rank has used, and wait until it has reported."""
        self.trainer.usage()
        while not self.trainer.broadcast(None):
            beat()

    def checkpoint(self, version: int, *, last: bool) -> None:
        self.saving.checkpoint(version, last=last)

    def finish(self) -> None:
        """Report that the work is done: rank 0 waits for the last evaluation, exports and pushes."""
        begin("end", Pace.OVER)
