"""The generator: lease tickets, sample their groups with the newest weights, score them, hand them over.

The generator never waits for the learner: weights change under running requests, and every token records the
version that sampled it. The process holds no durable state; if it dies, its tickets are issued again.

consumes  tickets   from  buffer.lease          waits for the credit that the learner's version grants
consumes  weights   from  control.next_order    while requests are running (`adoption.py`)
produces  groups    to    buffer.put            unblocks the learner in buffer.take
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from asyncrl.adoption import Adoption
from asyncrl.algo.trainable import GroupLimits, trainable
from asyncrl.buffer.base import GeneratorBuffer, PutOutcome
from asyncrl.control.base import GeneratorControl, Hello
from asyncrl.engine.base import Engine, SamplingSpec
from asyncrl.engine.duty import Duty
from asyncrl.engine.sampler import GroupSampler
from asyncrl.errors import AsyncRLError, EngineError, ResultError, StoreError, WireError, reason_of, ungrouped
from asyncrl.heartbeats import Heartbeats
from asyncrl.hosting.progress import begin
from asyncrl.telemetry.base import Tracker
from asyncrl.types import Group, GroupTimes, Prompt, Ticket, time_of_day
from asyncrl.weights.agreement import Agreement
from asyncrl.weights.base import Staging
from asyncrl.wire.group_frames import encode_group

log = logging.getLogger(__name__)

TICKETS_PER_LEASE = 4  # few, so that generators that start together share the credit
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 0.25
STORE_FULL_S = 30.0  # between two warnings


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A stream of tickets: training, or held-out evaluation. Earlier lanes are served first."""

    name: str
    buffer: GeneratorBuffer
    prompt: Callable[[int], Prompt]
    spec: SamplingSpec
    limits: GroupLimits  # what the learner accepts; `limits.rollouts` responses are sampled
    greedy: bool = False  # whether each ticket also takes a greedy response, for its reward
    minimum_version: Callable[[Ticket], int]  # the oldest policy version that may start the ticket

    @property
    def sequences(self) -> int:
        """Return the number of requests to the engine per ticket."""
        return self.limits.rollouts + self.greedy


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorSettings:
    """Numbers of the loop."""

    max_running: int  # the engine's slots; most sequences held at the same time, but for episodes
    most_held: int  # at the same time where there are episodes; 0 if there are none
    lease_s: float
    heartbeat_s: float
    wire_key: bytes = b""


class _RunIsOver(Exception):  # not an error: unwinds the task group
    pass


@dataclass(kw_only=True, eq=False)
class Generator:
    """The work of one generator process. Create it, then `await run(hello)` once."""

    engine: Engine
    lanes: Sequence[Lane]
    sampler: GroupSampler
    staging: Staging
    control: GeneratorControl
    tracker: Tracker
    agreement: Agreement
    settings: GeneratorSettings
    on_version: Callable[[int], None] = lambda version: None  # called when a version begins to sample

    def __post_init__(self) -> None:
        self._weights = Adoption(
            engine=self.engine,
            clock=self.sampler.clock,
            staging=self.staging,
            control=self.control,
            agreement=self.agreement,
            on_version=self.on_version,
        )
        # Number of sequences of each ticket that is held, by lane and ticket id.
        self._held: dict[str, dict[int, int]] = {lane.name: {} for lane in self.lanes}
        self._duty = Duty(self.engine, self.sampler.clock, self.settings.max_running, self.settings.most_held)
        self._heartbeats = Heartbeats(
            engine=self.engine,
            sampler=self.sampler,
            weights=self._weights,
            control=self.control,
            tracker=self.tracker,
            every_s=self.settings.heartbeat_s,
            duty=self._duty,
            holds_tickets=lambda: any(self._held.values()),
        )

    async def run(self, hello: Hello) -> None:
        """Generate until the run is over. Raises EngineError, StoreError and ControlError."""
        self._id, self._holder = hello.generator_id, hello.holder
        await self.control.join(hello)
        begin("generate")
        try:
            with ungrouped():
                await self._run_tasks(hello)
        finally:
            begin("leave")
            try:
                for lane in self.lanes:
                    if held := list(self._held[lane.name]):
                        await asyncio.to_thread(lane.buffer.give_back, self._holder, held)
            except StoreError as error:
                log.warning("tickets were not given back; they are free when their leases end: %s", error)
            await self.control.leave()

    async def _run_tasks(self, hello: Hello) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                tasks.create_task(self._lease_forever())
                tasks.create_task(self._renew_forever())
                tasks.create_task(self._listen())
                tasks.create_task(self._weights.run())
                tasks.create_task(self._heartbeats.run(hello))
                tasks.create_task(self._heartbeats.show_progress())
        except* _RunIsOver:
            log.info("the run is over")

    async def _listen(self) -> None:
        await self._weights.listen()
        raise _RunIsOver

    async def _lease_forever(self) -> None:
        pause_s = SHORTEST_PAUSE_S
        while True:
            is_first = self._weights.version == 0 and not self._heartbeats.groups  # the learner waits
            leased = await self._lease(self.lanes[-1]) if is_first else 0
            leased = leased or sum([await self._lease(lane) for lane in self.lanes])
            pause_s = SHORTEST_PAUSE_S if leased else min(pause_s * 2, LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s)

    async def _lease(self, lane: Lane) -> int:
        """Lease tickets that there is room for, and start to sample them. Return their number."""
        room = self._duty.room(sum(sum(held.values()) for held in self._held.values()))
        # A group of an evaluation may be larger than those of training, which would take each place first.
        least = int(room > 0 and lane is not self.lanes[-1])
        count = min(max(room // lane.sequences, least), TICKETS_PER_LEASE)
        if self._weights.version < 0 or (count < 1 and any(self._held.values())):
            return 0
        lease = await asyncio.to_thread(lane.buffer.lease, self._holder, max(count, 1))
        # Of a learner that went back to a checkpoint: others may have its weights; here they are yet to come.
        foreign = [ticket.id for ticket in lease.tickets if self._weights.newest not in ticket.history]
        if foreign:
            await asyncio.to_thread(lane.buffer.give_back, self._holder, foreign)
        held = self._held[lane.name]
        for ticket in lease.tickets:
            # A store that was rolled back may issue a ticket that is already being sampled here.
            if ticket.id not in foreign and ticket.id not in held:
                held[ticket.id] = lane.sequences
                self._tasks.create_task(self._produce(lane, ticket))
        if lease.closed and lane is self.lanes[-1]:
            raise _RunIsOver
        return len(lease.tickets) - len(foreign)

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(self.settings.lease_s / 3)
            # Nothing is renewed while the weights are dirty, so that other generators get the tickets.
            for lane in self.lanes if self._weights.version >= 0 else ():
                if held := list(self._held[lane.name]):
                    await asyncio.to_thread(lane.buffer.renew, self._holder, held)

    async def _produce(self, lane: Lane, ticket: Ticket) -> None:
        """Hand over, give back, or fail. A ticket whose task is cancelled stays held; `run` gives it back."""
        discards, leased_at = self._weights.discards, time_of_day()
        try:
            minimum = lane.minimum_version(ticket)
            if not await self._weights.reaches(minimum, ticket.history, within_s=self.settings.lease_s):
                await self._give_back(lane, ticket)
                return
            discards, sampling_at = self._weights.discards, time_of_day()
            prompt = lane.prompt(ticket.id)
            group = await self.sampler.group(prompt, ticket.id, lane.limits, lane.spec, greedy=lane.greedy)
            await self._weights.verdict()
            if self._weights.discards != discards:
                # Weights that failed the probe, or that the learner lost, sampled a part of the group.
                await self._give_back(lane, ticket)
                return
            times = GroupTimes(leased_at, sampling_at, time_of_day())
            await self._hand_over(lane, replace(group, lane=lane.name, times=times))
        except StoreError:
            raise
        except Exception as error:
            is_engines = isinstance(error, EngineError)
            if is_engines and self._weights.discards != discards:
                await self._give_back(lane, ticket)
            elif is_engines and not isinstance(error, ResultError):
                raise
            else:
                await self._fail(lane, ticket, error)

    async def _hand_over(self, lane: Lane, group: Group) -> None:
        """Put the group into the store. Raises ResultError for a group that the learner would refuse."""
        try:
            if reason := trainable(group, lane.limits):
                raise ResultError(f"the group is untrainable: {reason}")
            frame = encode_group(group, self.settings.wire_key)
        except WireError as error:
            raise ResultError(str(error)) from error
        put = partial(lane.buffer.put, self._holder, group.ticket_id, frame)
        warn_at_s = time.monotonic() + STORE_FULL_S
        while (outcome := await asyncio.to_thread(put)) is PutOutcome.FULL:
            if time.monotonic() > warn_at_s:
                warn_at_s += STORE_FULL_S
                where = {"ticket_id": group.ticket_id, "lane": lane.name}
                message = "the store is full; group %d is kept and offered until there is room"
                log.warning(message, group.ticket_id, extra=where)
            await asyncio.sleep(0.2)
        self._held[lane.name].pop(group.ticket_id)
        self._heartbeats.groups += outcome is PutOutcome.STORED

    async def _give_back(self, lane: Lane, ticket: Ticket) -> None:
        # First, because the store may issue the ticket to this generator again before its reply arrives.
        self._held[lane.name].pop(ticket.id)
        await asyncio.to_thread(lane.buffer.give_back, self._holder, [ticket.id])

    async def _fail(self, lane: Lane, ticket: Ticket, error: Exception) -> None:
        self._heartbeats.failed += 1
        where = {"ticket_id": ticket.id, "lane": lane.name}
        reason, trace = reason_of(error), None if isinstance(error, AsyncRLError) else error
        message = "ticket %d of lane %s failed: %s"
        log.warning(message, ticket.id, lane.name, reason, extra=where, exc_info=trace)
        version = max(self._weights.version, 0)
        dead = Group.dead(ticket.id, reason, generator_id=self._id, version=version, lane=lane.name)
        tombstone = encode_group(dead, self.settings.wire_key)
        self._held[lane.name].pop(ticket.id)  # first, as in `_give_back`
        if await asyncio.to_thread(lane.buffer.fail, self._holder, ticket.id, reason, tombstone):
            log.error("ticket %d of lane %s is dead: no attempt is left", ticket.id, lane.name, extra=where)
