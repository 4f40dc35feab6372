"""The generator's loop on toy engine and memory buffer: what it stores, gives back, refuses, survives."""

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hiredis import pack_command
from numpy.typing import ArrayLike

from asyncrl import generator as generator_module
from asyncrl.algo.staleness import credit_limit
from asyncrl.algo.trainable import GroupLimits
from asyncrl.buffer.base import BufferRules, Lease, PutOutcome
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.memory import MemoryBuffer
from asyncrl.control.base import Heartbeat, Hello, Stop, Welcome
from asyncrl.engine.base import EngineStats, SamplingSpec
from asyncrl.engine.fake import EOS, FakeEngine, logits_of, logprobs_of
from asyncrl.engine.sampler import Sampler
from asyncrl.errors import ConfigError, EngineError, RewardError, StoreError, TransferError, WireError
from asyncrl.generator import Generator, GeneratorSettings, Lane
from asyncrl.lineage import INITIAL, History, Weights
from asyncrl.rewards.base import ABSTAINED, RewardInput, Score
from asyncrl.telemetry.logs import setup_logging
from asyncrl.types import Group, Prompt, Rollout
from asyncrl.weights.agreement import Agreement
from asyncrl.weights.base import UpdateOrder, UpdateReport
from asyncrl.weights.staging import HostStaging
from asyncrl.wire.group_frames import decode_group
from tests.support.nowhere import Nowhere
from tests.support.publications import Learner
from tests.support.waiting import LONG_S, elapse, in_virtual_time, until

B, G = 2, 3
PER_SLOT = 4
PROBE = ((1, 2, 3, 4), (2, 3, 1))


class Control:
    """The learner's end, in this process: orders go in, reports and heartbeats come out."""

    def __init__(self) -> None:
        self.orders: asyncio.Queue[UpdateOrder | Stop] = asyncio.Queue()
        self.reports: asyncio.Queue[UpdateReport] = asyncio.Queue()
        self.beats: list[Heartbeat] = []
        self.events: list[str] = []

    async def join(self, hello: Hello) -> Welcome:
        self.events.append("join")
        return Welcome(version=0)

    async def next_order(self) -> UpdateOrder | Stop:
        return await self.orders.get()

    async def report(self, report: UpdateReport) -> None:
        await self.reports.put(report)

    def beat(self, heartbeat: Heartbeat) -> None:
        self.beats.append(heartbeat)

    async def leave(self) -> None:
        self.events.append("leave")


class Packing(MemoryBuffer):
    """Refuses what the client of a real store cannot send, such as a bool."""

    def lease(self, holder: str, count: int) -> Lease:
        pack_command((holder, count))
        return super().lease(holder, count)


class Rewards:
    def __init__(self, fails: Callable[[RewardInput], bool] = lambda one: False) -> None:
        self.fails = fails

    async def score(self, inputs: Sequence[RewardInput]) -> list[Score]:
        if any(self.fails(one) for one in inputs):
            raise RewardError("part judge: raised ValueError")
        lengths = [float(len(one.response)) for one in inputs]
        return [Score(total=length, parts={"length": length}, answer=f"{length:g}") for length in lengths]

    async def close(self) -> None:
        pass


class Staging:
    """A transfer that takes as long as the test likes, and fails if told so."""

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self.arrived.set()
        self.error = ""

    def stage(self, order: UpdateOrder) -> UpdateOrder:
        assert self.arrived.wait(LONG_S)
        if self.error:
            raise TransferError(self.error)
        return order

    def close(self) -> None: ...


class World:
    """One generator with everything around it."""

    def __init__(
        self,
        *,
        max_lag: int = 1,
        rewards: Rewards | None = None,
        token_s: float = 0.0,
        max_running: int = 12,
        greedy: bool = False,
        on_version: Callable[[int], None] = lambda version: None,
        quantisation: str = "",
        staging: HostStaging | None = None,
    ) -> None:
        self.learner = MemoryBuffer(BufferRules(groups=B, lease_s=30.0, max_attempts=2))
        self.max_lag = max_lag
        self.learner.recover(
            Ledger(), version=0, limit=credit_limit(0, max_lag=max_lag, groups=B, rejected=0)
        )
        self.engine = FakeEngine(token_s=token_s)
        self.control = Control()
        self.staging = staging or Staging()
        self.certified = True  # whether the initial model passes the probe before anything else happens
        self.floor = 0.0  # how far the learner's log-probabilities of the first weights are from the engine's
        lane = Lane(
            name="train",
            buffer=self.learner.peer(),
            prompt=lambda ticket_id: Prompt(token_ids=(ticket_id,), text=f"prompt {ticket_id}", row={}),
            spec=SamplingSpec(temperature=1.0, max_response_tokens=6),
            limits=GroupLimits(vocabulary=1000, rollouts=G, max_tokens=100),
            greedy=greedy,
            minimum_version=lambda ticket: ticket.minimum_version,
        )
        self.generator = Generator(
            engine=self.engine,
            lanes=[lane],
            sampler=Sampler(self.engine, rewards or Rewards(), lambda ids, **_: "x" * len(ids), "g0"),
            staging=self.staging,
            control=self.control,
            tracker=Nowhere(),
            agreement=Agreement(limit=1e-3, dtype="float32", quantisation=quantisation),
            settings=GeneratorSettings(
                max_running=max_running,
                most_held=max_running * PER_SLOT,
                lease_s=30.0,
                heartbeat_s=0.01,
            ),
            on_version=on_version,
        )

    def order(self, version: int, *, probe_error: ArrayLike = 0.0, history: History = INITIAL) -> UpdateOrder:
        predicted = [token for ids in PROBE for token in ids[1:]]
        initial, truth = (logprobs_of(logits_of(each))[predicted] for each in (0, version))
        initial, truth = initial + self.floor, truth + probe_error
        return UpdateOrder(
            version=version,
            transport="disk",
            deadline_s=1.0,
            details={},
            probe_ids=PROBE,
            probe_logprobs=tuple(float(value) for value in truth),
            initial_logprobs=tuple(float(value) for value in initial),
            history=str(history),
            size_bytes=5_000_000,
        )

    async def reported(self) -> UpdateReport:
        return await asyncio.wait_for(self.control.reports.get(), LONG_S)

    def run(self, script: Callable[["World"], Any]) -> None:
        async def play() -> None:
            hello = Hello(generator_id="g0", incarnation="i", release="r", config_hash="c", version=0)
            task = asyncio.create_task(self.generator.run(hello))
            try:
                if self.certified:
                    await self.control.orders.put(self.order(0))
                    assert (await self.reported()).applied
                await script(self)
                await self.control.orders.put(Stop(reason="test"))
            finally:
                if not task.done() and self.control.orders.empty():
                    task.cancel()
                await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), LONG_S)
            if not task.cancelled() and (error := task.exception()):
                raise error

        in_virtual_time(play())


def test_it_samples_what_it_holds_credit_for_and_no_more():
    world = World()

    async def script(world: World) -> None:
        await until(lambda: world.learner.audit().ready == 4)
        await elapse(0.1)

    world.run(script)
    audit = world.learner.audit()
    assert (audit.issued, audit.ready, audit.leased, audit.missing) == (4, 4, 0, 0)
    take = world.learner.take(Ledger(), 4, window=4)
    groups = [decode_group(frame) for frame in world.learner.frames(take.ids)]
    assert [group.ticket_id for group in groups] == [1, 2, 3, 4]
    for group in groups:
        assert len(group.rollouts) == G
        for rollout in group.rollouts:
            assert rollout.prompt_ids.tolist() == [group.ticket_id]
            np.testing.assert_allclose(
                rollout.behaviour_logprobs, logprobs_of(logits_of(0))[rollout.response_ids], atol=1e-6
            )
            assert rollout.reward == rollout.reward_parts["length"] == len(rollout.response_ids)
            assert rollout.answer == str(len(rollout.response_ids))
    assert world.control.events == ["join", "leave"]


def test_until_a_group_is_handed_over_what_is_trained_comes_before_the_evaluation(monkeypatch):
    world = World(max_running=2 * G)
    asked = MemoryBuffer(BufferRules(groups=8, lease_s=30.0, max_attempts=2))
    asked.recover(Ledger(), version=0, limit=8)
    (train,) = world.generator.lanes
    single = replace(train.limits, rollouts=1)
    evaluation = replace(train, name="eval", buffer=asked.peer(), limits=single)
    world.generator = replace(world.generator, lanes=[evaluation, train])
    sampler, begun = world.generator.sampler, list[int]()
    respond = sampler.group

    async def group(prompt: Prompt, ticket_id: int, limits: GroupLimits, *rest: Any, **options: Any) -> Group:
        begun.append(limits.rollouts)
        return await respond(prompt, ticket_id, limits, *rest, **options)

    monkeypatch.setattr(sampler, "group", group)

    async def script(world: World) -> None:
        await until(lambda: world.learner.audit().ready == 4 and asked.audit().ready == 8)

    world.run(script)
    assert begun[:6] == [G, G, 1, 1, 1, 1] and sorted(begun) == [1] * 8 + [G] * 4


def test_a_group_of_an_evaluation_that_is_larger_than_those_of_training_does_not_wait_for_their_end():
    """It needs most places of the engine, and groups of training take all but one as they become free."""
    world = World(max_running=4 * G + 1, max_lag=99, token_s=0.5)
    asked = Packing(BufferRules(groups=8, lease_s=30.0, max_attempts=2))
    asked.recover(Ledger(), version=0, limit=0)
    (train,) = world.generator.lanes
    evaluation = replace(train, name="eval", buffer=asked, limits=replace(train.limits, rollouts=4 * G))
    world.generator = replace(world.generator, lanes=[evaluation, train])

    async def script(world: World) -> None:
        await until(lambda: world.learner.audit().ready >= 8)
        asked.set_version(0, limit=4)
        await until(lambda: asked.audit().ready == 4)
        assert world.learner.audit().ready < 60, "of 200"

    world.run(script)


def test_a_group_that_is_larger_than_the_engine_is_sampled_alone():
    world = World(max_running=1, greedy=True)

    async def script(world: World) -> None:
        await until(lambda: world.learner.audit().ready == 4)

    world.run(script)


def test_it_leases_more_tickets_while_episodes_wait_for_their_environment(monkeypatch):
    """Six slots: two groups of responses fill them, eight groups of episodes that never sample may be held."""
    world = World(max_lag=9, max_running=2 * G)
    sampler = world.generator.sampler
    respond, may_sample = sampler.group, threading.Event()

    async def play(*arguments: Any, **options: Any) -> Group:
        with sampler.clock.group(G):
            while not may_sample.is_set():
                await elapse(0.01)
        return await respond(*arguments, **options)

    monkeypatch.setattr(sampler, "group", play)
    monkeypatch.setattr("asyncrl.engine.duty.WINDOW_S", 0.2)
    held = world.generator._held["train"]

    async def script(world: World) -> None:
        await until(lambda: len(held) == 2 * PER_SLOT)
        await elapse(0.1)
        assert len(held) == 2 * PER_SLOT
        assert world.generator._duty.metrics() == {"engine/occupancy": 0.0, "episodes/duty": 0.0}
        may_sample.set()
        await until(lambda: world.learner.audit().ready == 10 * B)

    world.run(script)


def test_a_ticket_that_comes_again_while_it_is_sampled_is_sampled_once():
    world = World(token_s=0.05, max_running=24)

    async def script(world: World) -> None:
        await until(lambda: world.learner.audit().leased == 4)
        world.learner.revoke("g0:i")  # as a store that was rolled back: it knows of no lease
        await until(lambda: world.learner.audit().leased == 4)
        await until(lambda: world.learner.audit().ready == 4)
        assert world.engine.stats().sampled_tokens <= 4 * G * 6

    world.run(script)
    counters = world.learner.audit().counters
    assert (counters["put"], counters.get("duplicate", 0)) == (4, 0)


def test_a_failing_reward_gives_the_ticket_back_and_then_counts_it_dead():
    world = World(rewards=Rewards(fails=lambda one: one.prompt == "prompt 2"))

    async def script(world: World) -> None:
        await until(lambda: world.learner.audit().ready == 4)

    world.run(script)
    assert world.learner.audit().counters["failed"] == 2
    take = world.learner.take(Ledger(), 4, window=4)
    dead = [group for group in map(decode_group, world.learner.frames(take.ids)) if group.dead_reason]
    assert [(group.ticket_id, group.dead_reason, group.rollouts) for group in dead] == [
        (2, "part judge: raised ValueError", ())
    ]


def test_a_response_for_which_all_functions_abstain_is_a_failed_reward_and_never_scores_0():
    class Abstaining(Rewards):
        async def score(self, inputs: Sequence[RewardInput]) -> list[Score]:
            scores = await super().score(inputs)
            if inputs[0].prompt == "prompt 2":
                scores[-1] = Score(total=0.0, parts={})
            return scores

    world = World(rewards=Abstaining())

    async def script(world: World) -> None:
        await until(lambda: world.learner.audit().ready == 4)

    world.run(script)
    take = world.learner.take(Ledger(), 4, window=4)
    dead = [group for group in map(decode_group, world.learner.frames(take.ids)) if group.dead_reason]
    assert [(group.ticket_id, group.dead_reason) for group in dead] == [(2, ABSTAINED)]


UNUSABLE: dict[str, Callable[[list[Rollout]], list[Rollout]]] = {
    "a log-probability that is NaN": lambda made: [
        replace(made[0], behaviour_logprobs=made[0].behaviour_logprobs * np.nan)
    ],
    "a log-probability that is -inf": lambda made: [
        replace(made[0], behaviour_logprobs=made[0].behaviour_logprobs - np.inf)
    ],
    "an empty answer": lambda made: [
        replace(made[0], response_ids=NONE, action_mask=NONE, behaviour_logprobs=NONE, version_spans=())
    ],
    "an answer without versions": lambda made: [replace(made[0], version_spans=())],
    "a token of no vocabulary": lambda made: [replace(made[0], response_ids=made[0].response_ids - 1000)],
    "an answer too few": lambda made: [],
}
NONE = np.empty(0, dtype=np.int32)


def only_dead(world: World) -> Group:
    """Run until four groups are there; the one that failed both of its attempts."""

    async def script(world: World) -> None:
        await until(lambda: world.learner.audit().ready == 4)

    world.run(script)
    counters = world.learner.audit().counters
    assert (counters["failed"], counters["dead"], counters.get("returned", 0)) == (2, 1, 0)
    groups = [decode_group(frame) for frame in world.learner.frames((1, 2, 3, 4))]
    (dead,) = [group for group in groups if group.dead_reason]
    return dead


@pytest.mark.parametrize("fault", UNUSABLE)
@pytest.mark.parametrize("greedy", [False, True])
def test_an_answer_that_nobody_can_train_on_fails_its_ticket_and_not_the_generator(fault, greedy):
    world = World(greedy=greedy)
    sample, read = world.engine.sample, world.generator.sampler.decode

    async def sample_badly(
        prompt_ids: Sequence[int], count: int, spec: SamplingSpec, **_: Any
    ) -> list[Rollout]:
        made = await sample(prompt_ids, count, spec)
        return UNUSABLE[fault](made) + made[1:] if prompt_ids == (2,) else made

    def read_strictly(token_ids: Sequence[int]) -> str:
        assert all(0 <= token < 1000 for token in token_ids), "a tokenizer raises what it likes"
        return read(token_ids)

    world.engine.sample = sample_badly
    world.generator.sampler.decode = read_strictly

    assert only_dead(world).ticket_id == 2


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RewardError("no such item: \ud83d"), "no such item: ?"),
        (ConfigError("model.tool_parser: there are tools"), "model.tool_parser: there are tools"),
        (UnicodeError("\udc80"), "UnicodeError: ?"),
        (ExceptionGroup("two", [ExceptionGroup("one", [TypeError("\udc80")])]), "TypeError: ?"),
    ],
)
def test_whatever_a_ticket_raises_is_its_failed_attempt_and_the_generator_lives_on(error, reason):
    world = World()
    group = world.generator.sampler.group

    async def poisonous(prompt: Prompt, *arguments: Any, **options: Any) -> Group:
        if prompt.token_ids == (2,):
            raise error
        return await group(prompt, *arguments, **options)

    world.generator.sampler.group = poisonous  # type: ignore[method-assign]

    dead = only_dead(world)
    assert (dead.ticket_id, dead.dead_reason) == (2, reason)


def test_an_encoder_that_refuses_a_group_fails_its_ticket(monkeypatch):
    """Whatever the judge does not know: a frame has limits of its own."""
    encode = generator_module.encode_group

    def encode_strictly(group: Group, key: bytes) -> bytes:
        if group.ticket_id == 2 and group.rollouts:
            raise WireError("too many of something")
        return encode(group, key)

    monkeypatch.setattr(generator_module, "encode_group", encode_strictly)
    world = World()

    async def script(world: World) -> None:
        await until(lambda: world.learner.audit().ready == 4)

    world.run(script)
    (frame,) = world.learner.frames((2,))
    assert decode_group(frame).dead_reason == "too many of something"


def test_synchronous_tickets_wait_for_their_version():
    world = World(max_lag=0)

    async def script(world: World) -> None:
        await until(lambda: world.learner.audit().ready == 2)
        world.learner.set_version(1, limit=credit_limit(B, max_lag=0, groups=B, rejected=0))
        await until(lambda: world.learner.audit().leased == 2)
        await until(lambda: world.control.beats[-1].metrics["stalled_s"] > 0.04)
        assert world.learner.audit().ready == 2  # leased, but not started with weights of version 0
        stalled_s = world.control.beats[-1].metrics["stalled_s"]
        await world.control.orders.put(world.order(1))
        await until(lambda: world.learner.audit().ready == 4)
        beats = len(world.control.beats)
        await until(lambda: len(world.control.beats) > beats + 2)
        first, last = (world.control.beats[at].metrics for at in (beats + 1, -1))
        assert 0.04 < stalled_s <= last["stalled_s"] <= last["idle_s"] + last["paused_s"]
        assert last["stalled_s"] == first["stalled_s"], "now there are no tickets, which is another cause"

    world.run(script)
    take = world.learner.take(Ledger(), 4, window=4)
    versions = {
        group.ticket_id: {span.version for rollout in group.rollouts for span in rollout.version_spans}
        for group in map(decode_group, world.learner.frames(take.ids))
    }
    assert versions == {1: {0}, 2: {0}, 3: {1}, 4: {1}}


def test_an_update_under_running_requests_is_reported_with_its_probe():
    world = World(token_s=0.02)
    receive = world.engine.receive

    async def receive_slowly(order: UpdateOrder) -> None:
        await elapse(0.25)
        await receive(order)

    world.engine.receive = receive_slowly

    async def script(world: World) -> None:
        await until(lambda: world.engine.stats().running_requests > 0)
        await world.control.orders.put(world.order(1))
        report = await world.reported()
        assert report.applied, report
        assert report.version == 1 and report.probe_max < 1e-5
        assert report.paused_s == pytest.approx(0.25) and report.update_s >= 0.2499
        # At most all of the update was spent on moving the version's 5 MB.
        assert 5e-3 / report.update_s <= report.transfer_gb_per_s <= 5e-3 / 0.2499
        await until(lambda: world.learner.audit().ready == 4)

    world.run(script)
    take = world.learner.take(Ledger(), 4, window=4)
    for group in map(decode_group, world.learner.frames(take.ids)):
        for rollout in group.rollouts:
            for token, version, logprob in zip(
                rollout.response_ids, rollout.versions, rollout.behaviour_logprobs, strict=True
            ):
                assert logprob == pytest.approx(logprobs_of(logits_of(int(version)))[token], abs=1e-6)


def test_an_order_that_is_repeated_while_it_is_carried_out_is_carried_out_once():
    world = World(token_s=0.005)

    async def script(world: World) -> None:
        world.staging.arrived.clear()
        for _ in range(2):
            await world.control.orders.put(world.order(1))
            await until(lambda: world.control.orders.empty())
        world.staging.arrived.set()
        assert (await world.reported()).version == 1
        await world.control.orders.put(world.order(2))
        assert (await world.reported()).version == 2
        await world.control.orders.put(world.order(2))  # the report may have been lost
        assert (await world.reported()).version == 2

    world.run(script)


def test_a_stop_does_not_wait_for_an_update_whose_sender_is_gone():
    world = World(token_s=0.005)

    async def script(world: World) -> None:
        world.staging.arrived.clear()
        await world.control.orders.put(world.order(1))
        await until(lambda: world.control.orders.empty())
        await world.control.orders.put(Stop(reason="test"))
        await until(lambda: "leave" in world.control.events)
        world.staging.arrived.set()

    world.run(script)
    assert world.learner.audit().leased == 0, "the tickets are given back"


def test_a_store_that_is_gone_before_the_tickets_are_given_back_is_no_failure(monkeypatch):
    world = World(token_s=0.05)

    async def script(world: World) -> None:
        await until(lambda: world.learner.audit().leased > 0)

        def refuse(*_: object) -> None:
            raise StoreError("gone")

        monkeypatch.setattr(world.generator.lanes[0].buffer, "give_back", refuse)

    world.run(script)


def test_sampling_goes_on_while_weights_arrive_and_after_they_did_not():
    world = World(token_s=0.005)

    async def script(world: World) -> None:
        world.staging.arrived.clear()
        world.staging.error = "the peer is gone"
        await world.control.orders.put(world.order(1))
        await until(lambda: world.learner.audit().ready == 4)
        assert (
            world.engine.weights.version,
            world.engine.stats().paused_s,
            world.control.reports.qsize(),
        ) == (0, 0.0, 0)
        world.staging.arrived.set()
        report = await world.reported()
        assert (report.applied, report.reason) == (False, "the peer is gone")
        assert (world.engine.weights.version, world.engine.stats().paused_s) == (0, 0.0)
        (rollout,) = await world.engine.sample((1,), 1, world.generator.lanes[0].spec)
        assert {span.version for span in rollout.version_spans} == {0}
        world.staging.error = ""
        await world.control.orders.put(world.order(1))
        assert (await world.reported()).applied
        assert world.engine.weights.version == 1

    world.run(script)
    take = world.learner.take(Ledger(), 4, window=4)
    for group in map(decode_group, world.learner.frames(take.ids)):
        assert {span.version for rollout in group.rollouts for span in rollout.version_spans} == {0}


def test_weights_that_fail_the_probe_sample_nothing_and_what_they_sampled_is_given_back(monkeypatch):
    world = World(token_s=0.02)
    monkeypatch.setattr(world.engine, "distrust", distrust := Mock())

    async def script(world: World) -> None:
        await until(lambda: world.engine.stats().running_requests > 0)
        await world.control.orders.put(world.order(1, probe_error=0.1))
        report = await world.reported()
        assert not report.applied
        assert "probe differs" in report.reason and report.probe_max == pytest.approx(0.1, rel=1e-3)
        distrust.assert_called_once_with()
        await until(lambda: world.learner.audit().reissue == world.learner.audit().issued)
        assert world.engine.weights.version == -1
        await until(lambda: world.control.beats[-1].state == "dirty")
        assert world.learner.audit().ready == 0
        world.learner.set_version(2, limit=0)
        await world.control.orders.put(world.order(2))
        assert (await world.reported()).applied
        await until(lambda: world.learner.audit().ready == 4)

    world.run(script)
    take = world.learner.take(Ledger(), 4, window=4)
    for group in map(decode_group, world.learner.frames(take.ids)):
        assert {span.version for rollout in group.rollouts for span in rollout.version_spans} == {2}


@pytest.mark.parametrize("token", [0, -1])
def test_each_sequence_of_the_probe_counts(token):
    world = World()
    wrong = np.zeros(sum(len(ids) - 1 for ids in PROBE))
    wrong[token] = 0.1

    async def script(world: World) -> None:
        await world.control.orders.put(world.order(1, probe_error=wrong))
        report = await world.reported()
        assert not report.applied and report.probe_max == pytest.approx(0.1, rel=1e-3)

    world.run(script)


def test_an_engine_that_began_with_another_model_is_refused_though_its_updates_agree():
    world = World()
    world.certified = False
    world.floor = 0.1

    async def script(world: World) -> None:
        for version in (1, 2):
            await world.control.orders.put(world.order(version))
            report = await world.reported()
            assert not report.applied and "before the first update" in report.reason
            assert (report.floor_max, report.probe_max) == (
                pytest.approx(0.1, rel=1e-3),
                pytest.approx(0.0, abs=1e-5),
            )
            assert world.engine.weights.version == -1

    world.run(script)


def test_a_quantised_engine_adopts_its_versions_but_no_wrong_tensor_and_no_nan(tmp_path):
    learner, world = Learner(), World(quantisation="quantization: fp8", staging=HostStaging(tmp_path))
    world.floor = 0.4
    world.certified = False
    sums = list(learner.sums[1])
    details = {"slot": learner.slots[1].describe(), "layout": learner.layout.to_plain()}

    def order(version: int, probe_error: float, sums: list[int]) -> UpdateOrder:
        made = world.order(version, probe_error=probe_error)
        return replace(made, transport="slot", details={**details, "checksums": sums})

    async def script(world: World) -> None:
        for version, error, sent, said in (
            (1, 0.45, sums, ""),
            (2, 0.45, [*sums[:-1], sums[-1] + 1], "tensor 'w39' has checksum"),
            (3, 1.3, sums, "the probe differs from the learner's by 1.3 nats"),
            (4, float("nan"), sums, "the probe differs from the learner's by nan"),
            (5, 0.3, sums, ""),
        ):
            await world.control.orders.put(order(version, error, sent))
            report = await world.reported()
            assert report.applied is (not said) and said in report.reason, version

    world.run(script)
    learner.close()


def test_no_group_is_handed_over_before_the_probe_has_passed_once():
    world = World()
    world.certified = False

    async def script(world: World) -> None:
        await until(lambda: world.engine.stats().sampled_tokens > 0)
        await elapse(1.0)
        world.staging.error = "nobody sent"
        await world.control.orders.put(world.order(0))
        assert not (await world.reported()).applied
        await elapse(1.0)
        world.staging.error = ""
        await world.control.orders.put(world.order(0, probe_error=0.1))
        assert "the probe differs" in (await world.reported()).reason
        await elapse(1.0)
        assert world.learner.audit().ready == 0
        await world.control.orders.put(world.order(0))
        assert (await world.reported()).applied
        await until(lambda: world.learner.audit().ready == 4)

    world.run(script)


def test_the_floor_is_taken_before_the_first_update_and_from_then_on_holds():
    world = World()
    world.floor = 5e-4

    async def script(world: World) -> None:
        world.staging.error = "nobody sent"
        await world.control.orders.put(world.order(1))
        report = await world.reported()
        assert not report.applied and report.probe_limit == 0
        world.staging.error = ""
        for version in (2, 3):  # the engine no longer has the first weights
            await world.control.orders.put(world.order(version))
            report = await world.reported()
            assert report.applied and report.floor_mean == pytest.approx(5e-4, rel=1e-2)

    world.run(script)


def greedy_response(version: int) -> list[int]:
    """What the toy policy says at temperature 0: one token for ever, or the end at once."""
    token = int(logits_of(version).argmax())
    return [token] if token == EOS else [token] * 6


def test_a_greedy_response_gives_each_group_its_reward_and_is_not_kept():
    world = World(greedy=True, rewards=Rewards())
    asked: list[tuple[int, float]] = []
    sample = world.engine.sample

    async def recorded(prompt_ids: Sequence[int], count: int, spec: SamplingSpec, **_: Any) -> list[Rollout]:
        asked.append((count, spec.temperature))
        return await sample(prompt_ids, count, spec)

    world.engine.sample = recorded  # type: ignore[method-assign]

    async def script(world: World) -> None:
        await until(lambda: world.learner.audit().ready == 4)

    world.run(script)
    assert sorted(asked) == [(1, 0.0)] * 4 + [(G, 1.0)] * 4
    for group in map(decode_group, world.learner.frames((1, 2, 3, 4))):
        assert len(group.rollouts) == G
        assert group.greedy_reward == len(greedy_response(0))


def test_the_greedy_response_takes_a_place_among_the_running():
    # Room for two groups, or for one with its greedy response.
    world = World(greedy=True, token_s=0.05, max_running=2 * G + 1)
    most = 0

    async def script(world: World) -> None:
        nonlocal most
        while world.learner.audit().ready < 4:
            most = max(most, world.engine.stats().running_requests)
            await elapse(0.005)

    world.run(script)
    assert most == G + 1


def test_a_greedy_response_that_cannot_be_scored_fails_the_ticket():
    world = World(
        greedy=True, rewards=Rewards(fails=lambda one: len(one.response) == len(greedy_response(0)))
    )

    async def script(world: World) -> None:
        await until(lambda: world.learner.audit().ready == 4)

    world.run(script)
    for group in map(decode_group, world.learner.frames((1, 2, 3, 4))):
        assert group.dead_reason == "part judge: raised ValueError"
        assert group.greedy_reward is None


def test_a_failed_probe_drops_the_greedy_response_too():
    world = World(greedy=True, token_s=0.02)

    async def script(world: World) -> None:
        await until(lambda: world.engine.stats().running_requests > 0)
        await world.control.orders.put(world.order(1, probe_error=0.1))
        assert not (await world.reported()).applied
        await until(lambda: world.learner.audit().reissue == world.learner.audit().issued)
        assert world.engine.stats().running_requests == 0
        world.learner.set_version(2, limit=0)
        await world.control.orders.put(world.order(2))
        await until(lambda: world.learner.audit().ready == 4)

    world.run(script)
    for group in map(decode_group, world.learner.frames((1, 2, 3, 4))):
        assert group.greedy_reward == len(greedy_response(2))


BACK_AT_2 = History(9, (Weights(0), Weights(2)))
"""Of a learner that went back to version 2."""


@pytest.mark.parametrize(
    "version", [2, 5, 7], ids=["when it went back", "at the same number", "at a higher number"]
)
def test_weights_of_a_discarded_lineage_start_no_ticket(version):
    """The learner went back from version 5 to 2; this generator still has 5, and the store tells it."""
    world = World()
    back = MemoryBuffer(BufferRules(groups=B, lease_s=30.0, max_attempts=2))
    back.recover(Ledger(), version=version, limit=2 * version + 4, history=BACK_AT_2)

    async def script(world: World) -> None:
        world.learner.set_version(5, limit=0)
        await world.control.orders.put(world.order(5))
        assert (await world.reported()).applied
        await until(lambda: world.learner.audit().ready == 4)
        world.generator.lanes[0].buffer._store = back._store  # type: ignore[attr-defined]
        await until(lambda: back.audit().counters.get("returned", 0) >= 8)
        assert back.audit().ready == 0
        await world.control.orders.put(world.order(version, history=BACK_AT_2))
        await until(lambda: back.audit().ready == 2 * version + 4)

    world.run(script)
    assert sampled_by(back, 2 * version + 4) == {BACK_AT_2.weights(version)}


def test_a_ticket_waits_for_weights_of_its_history_though_others_are_new_enough():
    world = World()
    # Its tickets wait for version 2 or newer.
    world.learner.recover(Ledger(), version=3, limit=4, history=BACK_AT_2)

    async def script(world: World) -> None:
        await until(lambda: world.learner.audit().leased == 4)
        await world.control.orders.put(world.order(5))  # of the learner that has died
        assert (await world.reported()).applied
        await elapse(0.1)
        assert (world.learner.audit().leased, world.engine.stats().sampled_tokens) == (4, 0)
        await world.control.orders.put(world.order(3, history=BACK_AT_2))
        await until(lambda: world.learner.audit().ready == 4)

    world.run(script)
    assert sampled_by(world.learner, 4) == {Weights(3, 9)}


def sampled_by(learner: MemoryBuffer, groups: int) -> set[Weights]:
    """What sampled the first groups, all together."""
    decoded = map(decode_group, learner.frames(range(1, groups + 1)))
    return {span.weights for group in decoded for rollout in group.rollouts for span in rollout.version_spans}


@pytest.mark.parametrize("version", [3, 5, 6])
def test_an_order_of_another_history_gives_back_what_runs_even_after_a_failed_update(version):
    world = World(token_s=0.05)

    async def script(world: World) -> None:
        await until(lambda: world.engine.stats().sampled_tokens >= 4 * G)  # of version 0
        await world.control.orders.put(world.order(5))
        assert (await world.reported()).applied
        broken = world.order(6)  # its requests are kept, with tokens of version 5
        broken.details["tensors"] = {"logits": [0.0]}  # type: ignore[index]
        await world.control.orders.put(broken)
        assert not (await world.reported()).applied
        world.learner.recover(Ledger(), version=version, limit=4, history=BACK_AT_2)
        await world.control.orders.put(world.order(version, history=BACK_AT_2))
        report = await world.reported()
        assert (report.applied, report.version, report.lineage) == (True, version, 9)
        await until(lambda: world.learner.audit().ready == 4)

    world.run(script)
    assert sampled_by(world.learner, 4) == {Weights(version, 9)}


def test_what_runs_goes_on_under_a_learner_that_continues_its_history():
    """Weights that the next learner has loaded are not lost: when it takes over, nothing is given back."""
    world = World(token_s=0.05)

    async def script(world: World) -> None:
        await world.control.orders.put(world.order(2))
        assert (await world.reported()).applied
        sampled = world.engine.stats().sampled_tokens
        await until(lambda: world.engine.stats().sampled_tokens >= sampled + 4 * G)
        await world.control.orders.put(world.order(3, history=BACK_AT_2))
        assert (await world.reported()).applied
        await until(lambda: world.learner.audit().ready == 4)

    world.run(script)
    assert sampled_by(world.learner, 4) >= {Weights(2), Weights(3, 9)}
    assert world.learner.audit().counters.get("returned", 0) == 0


def test_log_lines_carry_the_version_that_samples(tmp_path):
    context = setup_logging("g0", tmp_path, console=False)
    world = World(on_version=context.follow)

    async def script(world: World) -> None:
        await until(lambda: world.learner.audit().ready == 4)
        logging.getLogger("test").info("before")
        await world.control.orders.put(world.order(1))
        await world.reported()
        logging.getLogger("test").info("after")

    try:
        world.run(script)
    finally:
        for handler in [handler for handler in logging.getLogger().handlers if context in handler.filters]:
            logging.getLogger().removeHandler(handler)
            handler.close()
    lines = [json.loads(line) for line in (tmp_path / "g0.jsonl").read_text().splitlines()]
    assert [(line["version"], line["event"]) for line in lines if line["logger"] == "test"] == [
        (0, "before"),
        (1, "after"),
    ]


def test_a_full_store_keeps_the_group_with_the_generator():
    world = World(max_running=G)
    offered: list[int] = []
    put = world.generator.lanes[0].buffer.put

    def full_twice(holder: str, ticket_id: int, frame: bytes) -> PutOutcome:
        offered.append(ticket_id)
        return PutOutcome.FULL if len(offered) < 3 else put(holder, ticket_id, frame)

    world.generator.lanes[0].buffer.put = full_twice  # type: ignore[method-assign]

    async def script(world: World) -> None:
        await until(lambda: world.learner.audit().ready >= 1)
        assert world.learner.audit().issued <= 2  # it leased nothing while it sat on a group

    world.run(script)
    assert offered[:3] == [1, 1, 1]


def test_leaving_gives_every_ticket_back_at_once():
    world = World(token_s=0.5)

    async def script(world: World) -> None:
        await until(lambda: world.learner.audit().leased == 4)

    world.run(script)
    audit = world.learner.audit()
    assert (audit.leased, audit.reissue, audit.missing) == (0, 4, 0)


def test_a_closed_run_ends_the_generator():
    world = World()

    async def script(world: World) -> None:
        world.learner.close()
        await until(lambda: "leave" in world.control.events)

    world.run(script)


@pytest.mark.parametrize("during", ["sampling", "an update"])
def test_an_engine_that_dies_ends_the_generator_with_its_own_error(during):
    world = World(token_s=0.02)

    async def script(world: World) -> None:
        await until(lambda: world.engine.stats().running_requests > 0)
        if during == "an update":
            world.staging.arrived.clear()
            await world.control.orders.put(world.order(1))
        world.engine.kill()
        world.staging.arrived.set()
        await until(lambda: "leave" in world.control.events)

    with pytest.raises(EngineError, match=r"the engine has died|the request was aborted"):
        world.run(script)
    audit = world.learner.audit()
    assert (audit.leased, audit.missing) == (0, 0), "the tickets are given back all the same"


def test_it_gets_on_only_while_its_engine_does(monkeypatch):
    """The supervisor's sign of life: an event loop that turns under an engine that stands still is none."""
    beats: list[str] = []
    monkeypatch.setattr("asyncrl.heartbeats.PROGRESS_S", 0.01)
    monkeypatch.setattr("asyncrl.heartbeats.beat", lambda: beats.append("beat"))
    monkeypatch.setattr(generator_module, "begin", beats.append)
    world, goes_on = World(), asyncio.Event()
    monkeypatch.setattr(world.engine, "progress", goes_on.wait)

    async def script(world: World) -> None:
        await until(lambda: world.learner.audit().ready == 4)
        await elapse(0.1)
        assert beats == ["generate"]
        goes_on.set()
        await until(lambda: beats.count("beat") >= 3)

    world.run(script)
    assert beats[-1] == "leave"


def test_its_speed_is_that_of_a_minute_and_not_of_the_group_that_has_just_ended():
    world, beats = World(), list[Heartbeat]()

    async def script() -> None:
        began_s = time.monotonic()

        def stats() -> EngineStats:  # a group of 6,000 tokens ends every six seconds
            groups = int((time.monotonic() - began_s + 1e-3) // 6)
            return EngineStats(sampled_tokens=6000 * groups, running_requests=8, paused_s=0.0)

        heartbeats = world.generator._heartbeats
        heartbeats.engine, heartbeats.every_s = Mock(stats=stats), 1.0
        heartbeats.duty.engine, heartbeats.control = heartbeats.engine, Mock(beat=beats.append)
        task = asyncio.create_task(heartbeats.run(Mock(generator_id="g0", incarnation="1")))
        await elapse(180.0)
        assert task.cancel()

    in_virtual_time(script())
    speeds = [beat.metrics["tokens_per_s"] for beat in beats[60:]]
    assert len(speeds) >= 119 and speeds == pytest.approx([1000.0] * len(speeds), abs=101.0)
