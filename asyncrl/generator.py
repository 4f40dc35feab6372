"""The generator: lease tickets, sample their groups with the weights of the moment, score them, hand them over.

Nothing here waits for the learner: weights change under running requests, and every token remembers which
version sampled it. The process holds no durable state; when it dies, its tickets are issued again.

consumes  tickets   from  buffer.lease          waits for the credit that the learner's version grants
consumes  weights   from  control.next_order    while requests are running
produces  groups    to    buffer.put            unblocks the learner in buffer.take
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from asyncrl.algo.trainable import GroupLimits, trainable
from asyncrl.buffer.base import GeneratorBuffer, PutOutcome
from asyncrl.control.base import GeneratorControl, Heartbeat, Hello, Stop
from asyncrl.control.membership import holder_name
from asyncrl.engine.base import Engine, SamplingSpec
from asyncrl.engine.sampler import Sampler
from asyncrl.errors import EngineError, ResultError, RewardError, StoreError, TransferError, WireError
from asyncrl.progress import beat, begin
from asyncrl.telemetry.base import Tracker
from asyncrl.types import Group, GroupTimes, History, Prompt, Ticket, Weights, time_of_day
from asyncrl.weights.base import Staging, UpdateOrder, UpdateReport
from asyncrl.weights.refusal import ProbeRefused
from asyncrl.wire.group_frames import encode_group

log = logging.getLogger(__name__)

_LEASE_AT_ONCE = 4
"""Tickets per request: small, so that generators that start together share the credit."""
_SHOWN_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A stream of tickets: training, or held-out evaluation. Earlier lanes are served first."""

    name: str
    buffer: GeneratorBuffer
    prompt: Callable[[int], Prompt]
    spec: SamplingSpec
    limits: GroupLimits
    """What the learner lets pass: `rollouts` of them are sampled."""
    greedy: bool = False
    """Each ticket also takes a greedy response, for its reward."""
    minimum_version: Callable[[Ticket], int]
    """Oldest policy version that may start the ticket."""

    @property
    def sequences(self) -> int:
        """Sampled per ticket."""
        return self.limits.rollouts + self.greedy


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorSettings:
    """Numbers of the loop."""

    max_running: int
    lease_s: float
    heartbeat_s: float
    probe_limit: float
    dtype: str = "float32"
    """Of the model: what differences of its log-probabilities are ordinary."""
    wire_key: bytes = b""


class _RunIsOver(Exception):  # not an error: unwinds the task group
    pass


class Generator:
    """One generator process's work. Create it, then `await run(hello)` once."""

    def __init__(
        self,
        *,
        engine: Engine,
        lanes: Sequence[Lane],
        sampler: Sampler,
        staging: Staging,
        control: GeneratorControl,
        tracker: Tracker,
        settings: GeneratorSettings,
        on_version: Callable[[int], None] = lambda version: None,
    ) -> None:
        """`on_version` hears of every version that begins to sample."""
        self._engine = engine
        self._lanes = lanes
        self._sampler = sampler
        self._staging = staging
        self._control = control
        self._tracker = tracker
        self._settings = settings
        self._on_version = on_version
        self._held: dict[str, dict[int, int]] = {lane.name: {} for lane in lanes}  # ticket id -> sequences
        self._order: UpdateOrder | None = None
        self._ordered = asyncio.Event()
        self._adopted = asyncio.Condition()
        self._verified = asyncio.Event()
        self._verified.set()
        self._newest = Weights(0)  # the last that sampled
        self._spoiled = 0  # how often weights turned out wrong after they had sampled
        self._updating = False
        self._groups = 0
        self._rewards_failed = 0
        self._started_s = time.monotonic()

    async def run(self, hello: Hello) -> None:
        """Generate until the learner says that the run is over."""
        self._id, self._incarnation = hello.generator_id, hello.incarnation
        await self._control.join(hello)
        self._on_version(self._version)
        begin("generate")
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                tasks.create_task(self._lease_forever())
                tasks.create_task(self._renew_forever())
                tasks.create_task(self._beat_forever())
                tasks.create_task(self._hear_orders())
                tasks.create_task(self._obey_orders())
                tasks.create_task(self._show_progress())
        except* _RunIsOver:
            log.info("the run is over")
        finally:
            begin("leave")
            try:
                await self._return_tickets()
            except StoreError as error:
                log.warning("the tickets held here are not given back, their leases run out: %s", error)
            await self._control.leave()

    @property
    def _version(self) -> int:
        return self._engine.weights.version

    # --- tickets ---------------------------------------------------------------------------------------------------

    @property
    def _holder(self) -> str:
        return holder_name(self._id, self._incarnation)

    async def _lease_forever(self) -> None:
        pause_s = 0.01
        while True:
            leased = 0
            for lane in self._lanes:
                leased += await self._lease(lane)
            pause_s = 0.01 if leased else min(pause_s * 2, 0.25)
            await asyncio.sleep(pause_s)

    async def _lease(self, lane: Lane) -> int:
        room = self._settings.max_running - sum(sum(held.values()) for held in self._held.values())
        count = min(room // lane.sequences, _LEASE_AT_ONCE)
        if self._version < 0 or (count < 1 and self._holds_anything):
            return 0
        lease = await asyncio.to_thread(lane.buffer.lease, self._holder, max(count, 1))
        # Of a learner that went back to a checkpoint: its order is on the way, and who has its weights may sample them now.
        useless = [ticket.id for ticket in lease.tickets if self._newest not in ticket.history]
        if useless:
            await asyncio.to_thread(lane.buffer.give_back, self._holder, useless)
        held = self._held[lane.name]
        for ticket in lease.tickets:
            # A store that was rolled back issues again what is being sampled here.
            if ticket.id in useless or ticket.id in held:
                continue
            held[ticket.id] = lane.sequences
            self._tasks.create_task(self._produce(lane, ticket))
        if lease.closed and lane is self._lanes[-1]:
            raise _RunIsOver
        return len(lease.tickets) - len(useless)

    @property
    def _holds_anything(self) -> bool:
        return any(self._held.values())

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(self._settings.lease_s / 3)
            # With dirty weights nothing is renewed: what this generator cannot sample, another one shall.
            for lane in self._lanes if self._version >= 0 else ():
                if held := list(self._held[lane.name]):
                    await asyncio.to_thread(lane.buffer.renew, self._holder, held)

    async def _return_tickets(self) -> None:
        for lane in self._lanes:
            if held := list(self._held[lane.name]):
                await asyncio.to_thread(lane.buffer.give_back, self._holder, held)

    # --- one group -------------------------------------------------------------------------------------------------

    async def _produce(self, lane: Lane, ticket: Ticket) -> None:
        """Hand over, give back, or fail. When cancelled, the ticket is still held: leaving gives it back."""
        spoiled, leased_at = self._spoiled, time_of_day()
        try:
            if not await self._reaches(lane.minimum_version(ticket), ticket.history):
                await self._give_back(lane, ticket)
                return
            spoiled, sampling_at = self._spoiled, time_of_day()
            prompt = lane.prompt(ticket.id)
            group = await self._sampler.group(prompt, ticket.id, lane.limits, lane.spec, greedy=lane.greedy)
            await self._verified.wait()
            if self._spoiled == spoiled:
                times = GroupTimes(leased_at, sampling_at, time_of_day())
                await self._hand_over(lane, replace(group, lane=lane.name, times=times))
            else:  # sampled in part by weights that failed the probe
                await self._give_back(lane, ticket)
        except RewardError as error:
            await self._fail(lane, ticket, str(error))
        except EngineError as error:
            if self._spoiled != spoiled:
                await self._give_back(lane, ticket)
            elif isinstance(error, ResultError):
                await self._fail(lane, ticket, str(error))
            else:
                raise

    async def _reaches(self, minimum: int, history: History) -> bool:
        """Wait for weights of `history`, at least version `minimum`; False when they do not come within the time of a lease."""
        try:
            async with asyncio.timeout(self._settings.lease_s), self._adopted:
                await self._adopted.wait_for(lambda: self._version >= minimum and self._engine.weights in history)
        except TimeoutError:
            log.warning("version %d has not arrived within %.0f s; its tickets are given back", minimum, self._settings.lease_s)
            return False
        return True

    async def _hand_over(self, lane: Lane, group: Group) -> None:
        """Raises ResultError for a group that the learner would not let pass."""
        try:
            if reason := trainable(group, lane.limits):
                raise ResultError(f"the group is untrainable: {reason}")
            frame = encode_group(group, self._settings.wire_key)
        except WireError as error:
            raise ResultError(str(error)) from error
        warn_at_s = time.monotonic() + 30.0
        while (outcome := await asyncio.to_thread(lane.buffer.put, self._holder, group.ticket_id, frame)) is PutOutcome.FULL:
            if time.monotonic() > warn_at_s:
                warn_at_s += 30.0
                where = {"ticket_id": group.ticket_id, "lane": lane.name}
                log.warning("the store is full; group %d is kept and offered until there is room", group.ticket_id, extra=where)
            await asyncio.sleep(0.2)
        self._held[lane.name].pop(group.ticket_id)
        self._groups += outcome is PutOutcome.STORED

    async def _give_back(self, lane: Lane, ticket: Ticket) -> None:
        self._held[lane.name].pop(ticket.id)  # first: before we hear its answer the store may issue it to us again
        await asyncio.to_thread(lane.buffer.give_back, self._holder, [ticket.id])

    async def _fail(self, lane: Lane, ticket: Ticket, reason: str) -> None:
        self._rewards_failed += 1
        where = {"ticket_id": ticket.id, "lane": lane.name}
        log.warning("ticket %d of lane %s failed: %s", ticket.id, lane.name, reason, extra=where)
        dead = Group.dead(ticket.id, reason, generator_id=self._id, version=max(self._version, 0), lane=lane.name)
        tombstone = encode_group(dead, self._settings.wire_key)
        self._held[lane.name].pop(ticket.id)  # first, as above
        if await asyncio.to_thread(lane.buffer.fail, self._holder, ticket.id, reason, tombstone):
            log.error("ticket %d of lane %s failed for the last time, and is dead", ticket.id, lane.name, extra=where)

    # --- weights ---------------------------------------------------------------------------------------------------

    async def _hear_orders(self) -> None:
        """The newest order counts. A stop does not wait for an update that is under way: its sender may be gone."""
        while not isinstance(order := await self._control.next_order(), Stop):
            self._order = order
            self._ordered.set()
        log.info("the learner says stop: %s", order.reason)
        raise _RunIsOver

    async def _obey_orders(self) -> None:
        while True:
            await self._ordered.wait()
            self._ordered.clear()
            assert self._order is not None
            await self._control.report(await self._adopt(self._order))

    async def _adopt(self, order: UpdateOrder) -> UpdateReport:
        """stage, pause, load, finish, probe. Groups that end between pause and verdict wait for it."""
        paused_before_s, started_s = self._engine.stats().paused_s, time.monotonic()
        weights = order.weights
        try:
            order = await asyncio.to_thread(self._staging.stage, order)  # requests run on
            self._updating = True
            self._verified.clear()
            if self._newest not in History.parse(order.history):  # of a learner that went back: what runs is of no use to it
                await self._discard_running()
            await self._engine.begin_update()
            await self._engine.receive(order)
            await self._engine.finish_update(weights)
            self._newest = weights
            self._on_version(order.version)
            probe_max = await self._probe(order)
        except ProbeRefused as error:
            log.warning("version %d is refused: %s", order.version, error)
            return UpdateReport(
                version=order.version, lineage=weights.lineage, applied=False, reason=str(error), probe_max=error.difference
            )
        except TransferError as error:
            log.warning("version %d was not received: %s", order.version, error)
            return UpdateReport(version=order.version, lineage=weights.lineage, applied=False, reason=str(error))
        finally:
            self._updating = False
            self._verified.set()
        async with self._adopted:
            self._adopted.notify_all()
        return UpdateReport(
            version=order.version,
            lineage=weights.lineage,
            applied=True,
            probe_max=probe_max,
            paused_s=self._engine.stats().paused_s - paused_before_s,
            transfer_s=time.monotonic() - started_s,
        )

    async def _probe(self, order: UpdateOrder) -> float:
        """Largest log-probability difference to the learner on the probe; beyond the limit the weights are dirty."""
        scores = await self._engine.score(order.probe_ids)
        difference = float(np.abs(scores - np.array(order.probe_logprobs, dtype=np.float32)).max())
        if difference <= self._settings.probe_limit:  # NaN is not
            return difference
        await self._discard_running()
        raise ProbeRefused(difference, limit=self._settings.probe_limit, dtype=self._settings.dtype)

    async def _discard_running(self) -> None:
        """What is being sampled is given back, and nothing is sampled until good weights arrive."""
        self._spoiled += 1
        await self._engine.begin_update()  # pauses, and marks the weights dirty
        await self._engine.abort_requests()

    # --- being seen ------------------------------------------------------------------------------------------------

    async def _show_progress(self) -> None:
        """To the supervisor. A loop that turns while the engine stands still is none."""
        while True:
            await self._engine.progress()
            beat()
            await asyncio.sleep(_SHOWN_S)

    async def _beat_forever(self) -> None:
        tokens_before, at_s, logged_at_s = 0, time.monotonic(), 0.0
        while True:
            now_s = time.monotonic()
            metrics = self._metrics(tokens_before, max(now_s - at_s, 1e-6))
            tokens_before, at_s = int(metrics["sampled_tokens"]), now_s
            self._control.beat(
                Heartbeat(
                    generator_id=self._id,
                    incarnation=self._incarnation,
                    version=self._version,
                    state=self._state(),
                    metrics=metrics,
                )
            )
            if now_s - logged_at_s >= 5.0:
                logged_at_s = now_s
                self._tracker.log(metrics)
            await asyncio.sleep(self._settings.heartbeat_s)

    def _metrics(self, tokens_before: int, elapsed_s: float) -> Mapping[str, float]:
        stats = self._engine.stats()
        alive_s = time.monotonic() - self._started_s
        return {
            "sampled_tokens": stats.sampled_tokens,
            "tokens_per_s": (stats.sampled_tokens - tokens_before) / elapsed_s,
            "running_requests": stats.running_requests,
            "paused_s": stats.paused_s,
            "idle_s": alive_s - self._sampler.busy.total_s(),
            "alive_s": alive_s,
            "groups": self._groups,
            "rewards_failed": self._rewards_failed,
            "version": self._version,
        }

    def _state(self) -> str:
        if self._updating:
            return "updating"
        if self._version < 0:
            return "dirty"
        if self._sampler.busy.running:
            return "sampling"
        return "waiting_weights" if self._holds_anything else "waiting_tickets"
