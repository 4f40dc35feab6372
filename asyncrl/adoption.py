"""How a generator changes its weights while requests run: stage, pause, load, resume, probe.

The engine's weights are in one of three states:

    verified   they passed the probe; groups are handed over
    updating   from the start, or a pause, to the probe's verdict; requests go on, finished groups wait for it
    dirty      a transfer or the probe failed, `version` is negative; nothing is sampled until others arrive

consumes  orders   from  control.next_order   the newest order replaces older ones
produces  reports  to    control.report       applied, or the reason why not
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain

from asyncrl.control.base import GeneratorControl, Stop
from asyncrl.engine.base import Engine
from asyncrl.engine.duty import Clock
from asyncrl.errors import TransferError
from asyncrl.lineage import History, Weights
from asyncrl.weights.agreement import Agreement, ProbeRefused
from asyncrl.weights.base import Staging, UpdateOrder, UpdateReport

log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class Adoption:
    """The weights of one generator's engine. `listen` and `run` are its two tasks."""

    engine: Engine
    clock: Clock
    staging: Staging
    control: GeneratorControl
    agreement: Agreement  # with the learner, on the probe
    on_version: Callable[[int], None]  # called when a version begins to sample, the first one included
    discards: int = 0  # how often all running requests were aborted; a group that saw this is given back

    def __post_init__(self) -> None:
        self.newest = Weights(0)  # the last weights that sampled
        self._order: UpdateOrder | None = None
        self._under_way: UpdateOrder | None = None
        self._ordered, self._verified = asyncio.Event(), asyncio.Event()
        self._adopted = asyncio.Condition()

    @property
    def version(self) -> int:
        """Return the version of the weights in use; negative while they are dirty."""
        return self.engine.weights.version

    @property
    def is_updating(self) -> bool:
        """Return whether a verdict is outstanding."""
        return not self._verified.is_set()

    async def verdict(self) -> None:
        """Wait until no update is under way."""
        await self._verified.wait()

    async def reaches(self, minimum: int, history: History, *, within_s: float) -> bool:
        """Wait for weights of `history`, at least version `minimum`. Return whether they came in time."""

        def are_here() -> bool:
            return self.version >= minimum and self.engine.weights in history

        try:
            with self.clock.wait():
                async with asyncio.timeout(within_s), self._adopted:
                    return await self._adopted.wait_for(are_here)
        except TimeoutError:
            log.warning("version %d did not arrive in %.0f s; its tickets are given back", minimum, within_s)
            return False

    async def listen(self) -> None:
        """Keep the newest order until the learner says stop. It repeats one that may have been lost.

        A stop also ends the wait for an update that is under way, because its learner may be gone.
        """
        while not isinstance(order := await self.control.next_order(), Stop):
            if order != self._under_way:
                self._order = order
                self._ordered.set()
        log.info("the learner says stop: %s", order.reason)

    async def run(self) -> None:
        """Adopt the newest order and report the outcome, again and again until cancelled."""
        self.on_version(self.version)
        while True:
            await self._ordered.wait()
            self._ordered.clear()
            self._under_way = self._order
            assert self._under_way is not None
            report = await self._adopt(self._under_way)
            self._under_way = None
            await self.control.report(report)

    async def _adopt(self, order: UpdateOrder) -> UpdateReport:
        paused_before_s, started_s = self.engine.stats().paused_s, time.monotonic()
        report = partial(UpdateReport, version=order.version, lineage=order.weights.lineage)
        try:
            if self.agreement.floor is None:  # the engine has the weights with which it started
                self.agreement.begin(await self._scores(order), order)
            moving_s = time.monotonic()
            staged = await asyncio.to_thread(self.staging.stage, order)  # requests run on
            staged_s = time.monotonic() - moving_s
            self._verified.clear()
            # After the learner went back to a checkpoint, it cannot use groups of the weights that it lost.
            if self.newest not in History.parse(order.history):
                await self._discard_running()
            await self._pause()
            moving_s = time.monotonic()
            await self.engine.receive(staged)
            moved_s = staged_s + time.monotonic() - moving_s
            await self.engine.finish_update(order.weights)
            self.clock.pause(False)
            self.newest = order.weights
            self.on_version(order.version)
            measured = self.agreement.judge(await self._scores(order), order)
        except ProbeRefused as error:
            self.engine.distrust()
            await self._discard_running()
            log.warning("version %d is refused: %s", order.version, error)
            return report(applied=False, reason=str(error), **error.measured)
        except TransferError as error:
            log.warning("version %d was not received: %s", order.version, error)
            return report(applied=False, reason=str(error))
        finally:
            if self.agreement.has_passed:  # nothing is trained before engine and learner agree
                self._verified.set()
        async with self._adopted:
            self._adopted.notify_all()
        return report(
            applied=True,
            paused_s=self.engine.stats().paused_s - paused_before_s,
            update_s=time.monotonic() - started_s,
            transfer_gb_per_s=order.size_bytes / 1e9 / max(moved_s, 1e-6),
            **measured,
        )

    async def _scores(self, order: UpdateOrder) -> list[float]:
        """The engine's log-probabilities of the probe, in nats, one sequence after the other."""
        return [*chain(*await asyncio.gather(*map(self.engine.score, order.probe_ids)))]

    async def _discard_running(self) -> None:
        """Abort every request. The weights are dirty from now on."""
        self.discards += 1
        await self._pause()
        await self.engine.abort_requests()

    async def _pause(self) -> None:
        """Pause the engine, and mark its weights dirty."""
        self.clock.pause(True)
        await self.engine.begin_update()
