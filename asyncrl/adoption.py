"""How a generator changes its weights while requests run: stage, pause, load, resume, probe.

The engine's weights are in one of three states:

    verified   they passed the probe (or are the initial model): tickets may start
    updating   from the pause to the probe's verdict: requests go on, groups that end wait for the verdict
    dirty      a transfer or the probe failed (`version` is negative): nothing is sampled until others arrive

consumes  orders   from  control.next_order   the newest order wins
produces  reports  to    control.report       applied, or the reason why not
"""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from asyncrl.control.base import GeneratorControl, Stop
from asyncrl.engine.base import Engine
from asyncrl.errors import TransferError
from asyncrl.lineage import History, Weights
from asyncrl.weights.base import Staging, UpdateOrder, UpdateReport
from asyncrl.weights.refusal import ProbeRefused

log = logging.getLogger(__name__)


class Adoption:
    """The weights of one generator's engine. `listen` and `run` are its two tasks."""

    def __init__(
        self,
        engine: Engine,
        staging: Staging,
        control: GeneratorControl,
        *,
        probe_limit: float,
        dtype: str,
        on_version: Callable[[int], None],
    ) -> None:
        """`on_version` is called with the first version, and with each that begins to sample later."""
        self._engine, self._staging, self._control = engine, staging, control
        self._probe_limit, self._dtype, self._on_version = probe_limit, dtype, on_version
        self._order: UpdateOrder | None = None
        self._ordered = asyncio.Event()
        self._adopted = asyncio.Condition()
        self._verified = asyncio.Event()
        self._verified.set()
        self.newest = Weights(0)
        """The last weights that sampled."""
        self.discards = 0
        """How often everything in flight was thrown away; a group that saw this change is not handed over."""

    @property
    def version(self) -> int:
        """Version of the weights in use; negative while they are dirty."""
        return self._engine.weights.version

    @property
    def is_updating(self) -> bool:
        """Whether a verdict is outstanding."""
        return not self._verified.is_set()

    async def verdict(self) -> None:
        """Wait until no update is under way."""
        await self._verified.wait()

    async def reaches(self, minimum: int, history: History, *, within_s: float) -> bool:
        """Wait for weights of `history`, at least version `minimum`; False when `within_s` have passed."""
        try:
            async with asyncio.timeout(within_s), self._adopted:
                await self._adopted.wait_for(
                    lambda: self.version >= minimum and self._engine.weights in history
                )
        except TimeoutError:
            log.warning(
                "version %d has not arrived within %.0f s; its tickets are given back", minimum, within_s
            )
            return False
        return True

    async def listen(self) -> None:
        """Keep the newest order until the learner says stop.

        A stop does not wait for an update that is under way: its sender may be gone.
        """
        while not isinstance(order := await self._control.next_order(), Stop):
            self._order = order
            self._ordered.set()
        log.info("the learner says stop: %s", order.reason)

    async def run(self) -> None:
        """Adopt the newest order, report, and wait for the next one."""
        self._on_version(self.version)
        while True:
            await self._ordered.wait()
            self._ordered.clear()
            assert self._order is not None
            await self._control.report(await self._adopt(self._order))

    async def _adopt(self, order: UpdateOrder) -> UpdateReport:
        paused_before_s, started_s = self._engine.stats().paused_s, time.monotonic()
        report = partial(UpdateReport, version=order.version, lineage=order.weights.lineage)
        try:
            staged = await asyncio.to_thread(self._staging.stage, order)  # requests run on
            self._verified.clear()
            # After the learner went back to a checkpoint, it cannot use groups of the weights that it lost.
            if self.newest not in History.parse(order.history):
                await self._discard_running()
            await self._engine.begin_update()
            await self._engine.receive(staged)
            await self._engine.finish_update(order.weights)
            self.newest = order.weights
            self._on_version(order.version)
            probe_max = await self._probe(order)
        except ProbeRefused as error:
            log.warning("version %d is refused: %s", order.version, error)
            return report(applied=False, reason=str(error), probe_max=error.difference)
        except TransferError as error:
            log.warning("version %d was not received: %s", order.version, error)
            return report(applied=False, reason=str(error))
        finally:
            self._verified.set()
        async with self._adopted:
            self._adopted.notify_all()
        paused_s = self._engine.stats().paused_s - paused_before_s
        return report(
            applied=True, probe_max=probe_max, paused_s=paused_s, transfer_s=time.monotonic() - started_s
        )

    async def _probe(self, order: UpdateOrder) -> float:
        """Score the probe that the learner scored too: the largest difference of a log-probability, in nats.

        Raises ProbeRefused beyond the limit, and for NaN.
        """
        scores = await self._engine.score(order.probe_ids)
        difference = float(np.abs(scores - np.array(order.probe_logprobs, dtype=np.float32)).max())
        if not difference <= self._probe_limit:
            await self._discard_running()
            raise ProbeRefused(difference, limit=self._probe_limit, dtype=self._dtype)
        return difference

    async def _discard_running(self) -> None:
        """Abort every request. The weights are dirty from here on."""
        self.discards += 1
        await self._engine.begin_update()  # pauses the engine, and marks its weights dirty
        await self._engine.abort_requests()
