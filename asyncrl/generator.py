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
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from asyncrl.buffer.base import GeneratorBuffer, PutOutcome
from asyncrl.control.base import GeneratorControl, Heartbeat, Hello, Stop
from asyncrl.control.membership import holder_name
from asyncrl.engine.base import Engine, SamplingSpec
from asyncrl.errors import EngineError, RewardError, TransferError
from asyncrl.rewards.base import RewardInput, Scorer
from asyncrl.telemetry.base import Tracker
from asyncrl.types import Group, Prompt, Rollout, Ticket
from asyncrl.weights.base import UpdateOrder, UpdateReport
from asyncrl.wire.schema import encode_group

log = logging.getLogger(__name__)

_LEASE_AT_ONCE = 4
"""Tickets per request: small, so that generators that start together share the credit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A stream of tickets: training, or held-out evaluation. Earlier lanes are served first."""

    name: str
    buffer: GeneratorBuffer
    prompt: Callable[[int], Prompt]
    spec: SamplingSpec
    group_size: int
    minimum_version: Callable[[Ticket], int]
    """Oldest policy version that may start the ticket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorSettings:
    """Numbers of the loop."""

    max_running: int
    lease_s: float
    heartbeat_s: float
    probe_limit: float
    wire_key: bytes = b""


class _RunIsOver(Exception):  # not an error: unwinds the task group
    pass


@dataclass(slots=True)
class _Busy:
    """Seconds in which at least one group was being sampled."""

    running: int = 0
    busy_s: float = 0.0
    _since_s: float = field(default_factory=time.monotonic)

    @contextmanager
    def sampling(self) -> Any:
        self.total_s()
        self.running += 1
        try:
            yield
        finally:
            self.total_s()
            self.running -= 1

    def total_s(self) -> float:
        now_s = time.monotonic()
        self.busy_s += (now_s - self._since_s) * (self.running > 0)
        self._since_s = now_s
        return self.busy_s


class Sampler:
    """Samples and scores whole groups; in training and in `asyncrl eval` alike."""

    def __init__(self, engine: Engine, scorer: Scorer, decode: Callable[[Sequence[int]], str], generator_id: str) -> None:
        self._engine = engine
        self._scorer = scorer
        self._decode = decode
        self._generator_id = generator_id
        self.busy = _Busy()

    async def group(self, prompt: Prompt, ticket_id: int, size: int, spec: SamplingSpec) -> Group:
        """The scored group of one ticket. Raises RewardError and EngineError."""
        started_s = time.monotonic()
        with self.busy.sampling():
            rollouts = await self._engine.sample(prompt.token_ids, size, spec)
        sampled_s = time.monotonic()
        scored = await self._score(prompt, rollouts)
        return Group(
            ticket_id=ticket_id,
            rollouts=scored,
            generator_id=self._generator_id,
            # The engine may be dirty by now; then the newest token tells.
            finished_version=max(self._engine.version, *(span.version for r in rollouts for span in r.version_spans)),
            sampling_s=sampled_s - started_s,
            reward_s=time.monotonic() - sampled_s,
        )

    async def _score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> tuple[Rollout, ...]:
        inputs = [
            RewardInput(
                prompt=prompt.text,
                response=self._decode(rollout.response_ids.tolist()),
                row=prompt.row,
                truncated=rollout.finish_reason == "length",
            )
            for rollout in rollouts
        ]
        scores = await self._scorer.score(inputs)
        return tuple(
            replace(rollout, reward=score.total, reward_parts=score.parts)
            for rollout, score in zip(rollouts, scores, strict=True)
        )


class Generator:
    """One generator process's work. Create it, then `await run(hello)` once."""

    def __init__(
        self,
        *,
        engine: Engine,
        lanes: Sequence[Lane],
        sampler: Sampler,
        control: GeneratorControl,
        tracker: Tracker,
        settings: GeneratorSettings,
    ) -> None:
        self._engine = engine
        self._lanes = lanes
        self._sampler = sampler
        self._control = control
        self._tracker = tracker
        self._settings = settings
        self._held: dict[str, dict[int, int]] = {lane.name: {} for lane in lanes}  # ticket id -> sequences
        self._adopted = asyncio.Condition()
        self._verified = asyncio.Event()
        self._verified.set()
        self._spoiled = 0  # how often weights turned out wrong after they had sampled
        self._updating = False
        self._groups = 0
        self._started_s = time.monotonic()

    async def run(self, hello: Hello) -> None:
        """Generate until the learner says that the run is over."""
        self._id, self._incarnation = hello.generator_id, hello.incarnation
        await self._control.join(hello)
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                tasks.create_task(self._lease_forever())
                tasks.create_task(self._renew_forever())
                tasks.create_task(self._beat_forever())
                tasks.create_task(self._obey_orders())
        except* _RunIsOver:
            log.info("the run is over")
        finally:
            await self._return_tickets()
            await self._control.leave()

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
        count = min(room // lane.group_size, _LEASE_AT_ONCE)
        if self._engine.version < 0 or (count < 1 and self._holds_anything):
            return 0
        lease = await asyncio.to_thread(lane.buffer.lease, self._holder, max(count, 1))
        for ticket in lease.tickets:
            self._held[lane.name][ticket.id] = lane.group_size
            self._tasks.create_task(self._produce(lane, ticket))
        if lease.closed and lane is self._lanes[-1]:
            raise _RunIsOver
        return len(lease.tickets)

    @property
    def _holds_anything(self) -> bool:
        return any(self._held.values())

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(self._settings.lease_s / 3)
            # With dirty weights nothing is renewed: what this generator cannot sample, another one shall.
            for lane in self._lanes if self._engine.version >= 0 else ():
                if held := list(self._held[lane.name]):
                    await asyncio.to_thread(lane.buffer.renew, self._holder, held)

    async def _return_tickets(self) -> None:
        for lane in self._lanes:
            if held := list(self._held[lane.name]):
                await asyncio.to_thread(lane.buffer.give_back, self._holder, held)

    # --- one group -------------------------------------------------------------------------------------------------

    async def _produce(self, lane: Lane, ticket: Ticket) -> None:
        await self._attempt(lane, ticket)
        self._held[lane.name].pop(ticket.id)  # not when cancelled: leaving gives back what is held

    async def _attempt(self, lane: Lane, ticket: Ticket) -> None:
        spoiled = self._spoiled
        try:
            if not await self._reaches(lane.minimum_version(ticket)):
                await self._give_back(lane, ticket)
                return
            spoiled = self._spoiled
            group = await self._sampler.group(lane.prompt(ticket.id), ticket.id, lane.group_size, lane.spec)
            await self._verified.wait()
            if self._spoiled == spoiled:
                await self._hand_over(lane, group)
            else:  # sampled in part by weights that failed the probe
                await self._give_back(lane, ticket)
        except RewardError as error:
            await self._fail(lane, ticket, str(error))
        except EngineError:
            if self._spoiled == spoiled:
                raise
            await self._give_back(lane, ticket)

    async def _reaches(self, minimum: int) -> bool:
        """Wait for weights of at least version `minimum`; False when they do not come within the time of a lease."""
        try:
            async with asyncio.timeout(self._settings.lease_s), self._adopted:
                await self._adopted.wait_for(lambda: self._engine.version >= minimum)
        except TimeoutError:
            log.warning("version %d has not arrived within %.0f s; its tickets are given back", minimum, self._settings.lease_s)
            return False
        return True

    async def _hand_over(self, lane: Lane, group: Group) -> None:
        frame = encode_group(group, self._settings.wire_key)
        warn_at_s = time.monotonic() + 30.0
        while (outcome := await asyncio.to_thread(lane.buffer.put, self._holder, group.ticket_id, frame)) is PutOutcome.FULL:
            if time.monotonic() > warn_at_s:
                warn_at_s += 30.0
                log.warning("the store is full; group %d is kept and offered again until there is room", group.ticket_id)
            await asyncio.sleep(0.2)
        self._groups += outcome is PutOutcome.STORED

    async def _give_back(self, lane: Lane, ticket: Ticket) -> None:
        await asyncio.to_thread(lane.buffer.give_back, self._holder, [ticket.id])

    async def _fail(self, lane: Lane, ticket: Ticket, reason: str) -> None:
        log.warning("ticket %d of lane %s failed: %s", ticket.id, lane.name, reason)
        dead = Group.dead(ticket.id, reason, generator_id=self._id, version=max(self._engine.version, 0))
        tombstone = encode_group(dead, self._settings.wire_key)
        if await asyncio.to_thread(lane.buffer.fail, self._holder, ticket.id, reason, tombstone):
            log.error("ticket %d of lane %s failed for the last time and is counted dead: %s", ticket.id, lane.name, reason)

    # --- weights ---------------------------------------------------------------------------------------------------

    async def _obey_orders(self) -> None:
        while True:
            order = await self._control.next_order()
            if isinstance(order, Stop):
                log.info("the learner says stop: %s", order.reason)
                raise _RunIsOver
            await self._control.report(await self._adopt(order))

    async def _adopt(self, order: UpdateOrder) -> UpdateReport:
        """pause, receive, finish, probe. Groups that end before the probe has passed wait for its verdict."""
        paused_before_s, started_s = self._engine.stats().paused_s, time.monotonic()
        self._updating = True
        self._verified.clear()
        try:
            await self._engine.begin_update()
            await self._engine.receive(order)
            await self._engine.finish_update(order.version)
            probe_max = await self._probe(order)
        except TransferError as error:
            log.warning("version %d was not received: %s", order.version, error)
            return UpdateReport(version=order.version, applied=False, reason=str(error))
        finally:
            self._updating = False
            self._verified.set()
        async with self._adopted:
            self._adopted.notify_all()
        return UpdateReport(
            version=order.version,
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
        self._spoiled += 1
        await self._engine.begin_update()  # pauses, and marks the weights dirty
        await self._engine.abort_requests()
        raise TransferError(
            f"the probe differs from the learner's by {difference:.4g} nats, allowed is {self._settings.probe_limit}: "
            "the weights in the engine are not those that were sent"
        )

    # --- being seen ------------------------------------------------------------------------------------------------

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
                    version=self._engine.version,
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
        }

    def _state(self) -> str:
        if self._updating:
            return "updating"
        if self._engine.version < 0:
            return "dirty"
        if self._sampler.busy.running:
            return "sampling"
        return "waiting_weights" if self._holds_anything else "waiting_tickets"
