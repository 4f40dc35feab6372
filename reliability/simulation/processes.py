"""Generators and learner: the loops are the simulation's; what touches store or ledger is shipped code."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.algo.filters import GroupOutcome
from asyncrl.buffer.base import PutOutcome
from asyncrl.buffer.intake import Collected, Intake
from asyncrl.buffer.judge import DISCARDED_LINEAGE, Gate, make_judge
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.run_record import RunRecord, StoredRun
from asyncrl.buffer.shards import ShardedBuffer, ShardedIntake, ledgers_of
from asyncrl.buffer.shards import join as of_lane
from asyncrl.control.base import Heartbeat, Hello, Stop
from asyncrl.errors import BufferFenced, CheckpointError, RunError, StoreError
from asyncrl.launch.same_bytes import hand_out
from asyncrl.launch.step_deaths import StepDeaths
from asyncrl.lineage import INITIAL, History, Weights
from asyncrl.run.checkpoint import CheckpointStore
from asyncrl.run.manifest import FileOps
from asyncrl.types import Group, Ticket
from asyncrl.weights.base import UpdateOrder, UpdateReport

from .client import Connection
from .content import DEAD, LANE, LIMITS, decode, encode
from .control import CONFIG_HASH, RELEASE, Client, Hub, join
from .engine import Process
from .lane import RUN, require
from .ranks import Ranks
from .violation import Violation

if TYPE_CHECKING:
    from .world import World

KEY = b"key"
LONGEST_PAUSE_S = 20.0
"""Whoever waits in vain asks less often: a simulated hour is short."""
WEIGHTS = "weights.json"
THE_END = "the training is done"
STALL_S = 1e9
"""The engine has a deadline of its own."""


@dataclass(frozen=True, slots=True)
class Published:
    """What the learner sends to the generators."""

    weights: Weights
    history: History
    serial: int
    """The truth, which only the simulation knows: no two weights have the same."""


class GeneratorProcess:
    """Leases, samples, renews; several tickets at once."""

    def __init__(self, world: "World", name: str) -> None:
        self.world, self.engine = world, world.engine
        self.process = Process(name)
        shards = world.open_lanes(Connection(world.network, self.process))
        self.buffer = shards[0] if len(shards) == 1 else ShardedBuffer(shards)
        self.published = Published(Weights(0), INITIAL, 0)
        self.control = Client(world, self.process)
        self.spoiled = 0
        """How often weights turned out to be lost after they had sampled."""
        self.held: set[int] = set()
        self.is_leaving = False
        self._thread(self.control.serve, self._hello())
        self._thread(self._begin)

    def _thread(self, body: Any, *arguments: Any) -> None:
        def until_it_fails() -> None:
            try:
                body(*arguments)
            except StoreError:
                self._die()

        self.engine.start(self.process, until_it_fails)

    def _hello(self) -> Hello:
        generator_id, _, incarnation = self.process.name.partition(":")
        return Hello(
            generator_id=generator_id,
            incarnation=incarnation,
            release=RELEASE,
            config_hash=CONFIG_HASH,
            version=0,
        )

    def _begin(self) -> None:
        if not join(self.control, self.engine):  # such as while who had the name may be alive
            self._die()
        self._beat()
        for loop in (self._lease_forever, self._renew_forever, self._obey_forever):
            self._thread(loop)

    def _beat(self) -> None:
        generator_id, _, incarnation = self.process.name.partition(":")
        version = self.published.weights.version
        self.control.beat(
            Heartbeat(generator_id=generator_id, incarnation=incarnation, version=version, state="sampling")
        )

    def _die(self) -> None:
        self.world.generator_died(self)
        self.engine.exit()

    def _lease_forever(self) -> None:
        random, longest_s = self.engine.random, 1.0
        while not self.is_leaving:
            self.engine.sleep(random.uniform(0.2, longest_s))
            longest_s = min(1.2 * longest_s, LONGEST_PAUSE_S)
            if len(self.held) >= self.world.scenario.held_at_most:
                continue
            lease = self.buffer.lease(self.process.name, random.randint(1, 4))
            require(
                self.world.is_closed or not lease.closed, "generators are told of the end before it is there"
            )
            useless = [ticket.id for ticket in lease.tickets if self.published.weights not in ticket.history]
            if useless:
                self.buffer.give_back(self.process.name, useless)
            for ticket in lease.tickets:
                if ticket.id in useless or ticket.id in self.held:
                    continue
                longest_s = 1.0
                self.held.add(ticket.id)
                self._thread(self._produce, ticket)
            if lease.closed:
                break
        self.is_leaving = True
        self.buffer.give_back(self.process.name, sorted(self.held))
        self.control.say_goodbye()
        self.world.generator_left(self)
        self.engine.exit()

    def _renew_forever(self) -> None:
        while True:
            self.engine.sleep(self.world.rules.lease_s / 3)
            if self.held:
                self.buffer.renew(self.process.name, sorted(self.held))

    def _obey_forever(self) -> None:
        while not isinstance(order := self.control.wait_for_order(), Stop):
            if self.world.faults.strikes("false_report"):
                never = order.version + 1000  # the next one may be under way when a late report on it arrives
                other = self.engine.random.choice([(order.version, -1), (never, order.weights.lineage)])
                self.control.tell(UpdateReport(version=other[0], lineage=other[1], applied=True))
            self.control.tell(self._adopt(order))
        if order.reason != THE_END:
            require("refused when coming back" in order.reason, "stopped before the end", order)
            self._die()
        require(self.world.is_closed, "stopped before the end", order)
        self.is_leaving = True

    def _adopt(self, order: UpdateOrder) -> UpdateReport:
        """In the order of asyncrl.generator."""
        update, until_s = self.world.updates[order.details["update"]], self.engine.now_s + order.deadline_s
        told: dict[str, Any] = {"version": order.version, "lineage": order.weights.lineage}
        random = self.engine.random
        self.engine.sleep(random.uniform(0.01, 1.0))
        if self.world.faults.strikes("failed_transfer"):
            if random.random() < 0.5:
                self.engine.sleep(max(until_s - self.engine.now_s, 0.0))
            return UpdateReport(**told, applied=False, reason="broken, or late")
        if not update.is_safe and random.random() < 0.5:
            return UpdateReport(**told, applied=False, reason="the next version was written over it")
        history = History.parse(order.history)
        self.spoiled += self.published.weights not in history
        self.published = Published(order.weights, history, update.serial)
        self._beat()
        self.engine.sleep(self.engine.random.uniform(0.0, 0.5))
        return UpdateReport(**told, applied=True)

    def _produce(self, ticket: Ticket) -> None:
        self._attempt(ticket)
        if not self.is_leaving:
            self.held.discard(ticket.id)

    def _attempt(self, ticket: Ticket) -> None:
        world, waited_until_s = self.world, self.engine.now_s + self.world.rules.lease_s
        while (
            self.published.weights.version < ticket.minimum_version
            or self.published.weights not in ticket.history
        ):
            if self.engine.now_s > waited_until_s:
                self.buffer.give_back(self.process.name, [ticket.id])
                return
            self.engine.sleep(0.5)
        random, spoiled, sampled_by = self.engine.random, self.spoiled, []
        parts = random.randint(1, 3)
        for _ in range(parts):
            sampled_by.append(self.published)
            self.engine.sleep(random.expovariate(parts / world.scenario.sampling_s))
        if ticket.id in world.deadly_tickets:
            self._die()
        if self.is_leaving:
            return
        if self.spoiled != spoiled:
            self.buffer.give_back(self.process.name, [ticket.id])
            return
        if world.faults.strikes("reward_fails"):
            self.buffer.fail(self.process.name, ticket.id, "why", encode(ticket.id, DEAD, []))
            return
        frame = world.sample(self.process.name, ticket.id, sampled_by)
        if world.faults.strikes("late_group"):
            self.engine.sleep(random.uniform(5.0, 60.0))
        pause_s = 0.5
        while self.buffer.put(self.process.name, ticket.id, frame) is PutOutcome.FULL and not self.is_leaving:
            self.engine.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


@dataclass(slots=True)
class WatchedLedger(Ledger):
    """The shipped ledger; the world sees every take that enters it."""

    learner: Any = None
    shard: int = 0

    def consume(self, ids: tuple[int, ...]) -> None:
        owner = self.learner.shards[self.shard]._owner
        self.learner.world.lanes[self.shard].consumed(owner, self.takes + 1, self.chain, ids)
        Ledger.consume(self, ids)
        self.learner.takes.append((self.shard, ids))

    def count_rejected(self, reason: str, groups: int = 1) -> None:
        Ledger.count_rejected(self, reason, groups)
        self.learner.allow(self.learner.version)


@dataclass(slots=True)
class TrainedWeights:
    """A trainer for `CheckpointStore`: its weights are the list of everything they were trained on."""

    history: list[dict[str, Any]] = field(default_factory=list)
    rank: int = 0

    def broadcast(self, value: bytes | None) -> bytes:
        assert value is not None
        return value

    def save(self, directory: Path) -> None:
        (directory / WEIGHTS).write_text(json.dumps(self.history))

    def load(self, directory: Path) -> None:
        self.history = json.loads((directory / WEIGHTS).read_text())


class Files(FileOps):
    """A slow disk, so that a learner can die between any two operations; it obeys the run's lock."""

    def __init__(self, learner: "LearnerProcess") -> None:
        self._learner = learner

    def _before(self) -> None:
        world = self._learner.world
        world.engine.sleep(world.engine.random.uniform(0.0, 0.2))
        if world.learner is not self._learner:
            raise OSError("the lock of the run is held by another learner")

    def write(self, path: Path, data: bytes) -> None:
        self._before()
        super().write(path, data)

    def fsync(self, path: Path) -> None:
        """Nothing: the simulated disk loses nothing."""

    def rename(self, source: Path, target: Path) -> None:
        self._before()
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self._before()
        super().remove(path)


class LearnerProcess:
    """Takes, trains, publishes, saves, commits, in the order of asyncrl.learner and launch.learner_runs."""

    def __init__(self, world: "World", name: str, *, is_first: bool) -> None:
        self.world, self.engine, self.is_first = world, world.engine, is_first
        self.process = Process(name)
        self.settings, self.max_age = world.settings, world.settings.max_age(world.scenario.shards)
        self.connection = Connection(world.network, self.process)
        self.shards = world.open_lanes(self.connection)
        self.buffer = self.shards[0] if len(self.shards) == 1 else ShardedBuffer(self.shards)
        world.windows |= {shard._owner: self.settings.window for shard in self.shards}
        self.weights = TrainedWeights()
        self.takes: list[tuple[int, tuple[int, ...]]] = []
        """(shard, ids)"""
        self.version = 0
        self.published: Published | None = None
        """What its generators are told to read."""
        self.engine.start(self.process, self._run)

    def _run(self) -> None:
        try:
            self._learn()
        except CheckpointError as error:
            if "lock of the run" not in str(error):
                raise Violation(f"{type(error).__name__}: {error}") from error
        except RunError as error:
            raise Violation(f"the learner gives up: {error}") from error
        except BufferFenced:
            self.world.faults.count("fenced")
        except StoreError:
            self.world.faults.count("learner_lost_store")
        self.world.learner_ended(self)
        self.engine.exit()

    def _learn(self) -> None:
        scenario = self.world.scenario
        checkpoints = CheckpointStore(self.world.directory, KEY, scenario.keep, Files(self))
        state = checkpoints.load(self.weights) or {"version": 0, "ledger": {}, "history": str(INITIAL)}
        version = state["version"]
        history, lineage = History.parse(state["history"]), self.world.next_number()
        self.history = history.resumed(version, lineage=lineage, longest_lag=self.max_age)
        record = StoredRun(name=RUN, config_json="{}", config_hash="", release="", key_id="")
        RunRecord(self.connection, KEY).claim(record, fresh=version == 0)
        self.deaths = StepDeaths(self.world.step_under_way)
        self.world.step_deaths.learner_started(self.deaths)
        self.intakes = self._intakes(ledgers_of(state["ledger"], len(self.shards)))
        self.intake = self.intakes[0] if len(self.intakes) == 1 else ShardedIntake(self.intakes)
        self._ranks = Ranks(self.engine, self.process, scenario.ranks)
        self.hub = Hub(self.world, self)
        self._publish(version, self.intake.recover)
        while version < scenario.steps:
            collected = hand_out(
                self._ranks.say,
                lambda version=version: self._poll(version),
                ending=lambda: b"",
                is_in_touch=lambda: False,  # the supervisor is not simulated
            )
            assert not isinstance(collected, bytes), "nobody has asked to stop"
            self.engine.sleep(self.engine.random.uniform(0.1, scenario.training_s))
            self._train(version, collected)
            self._ranks.meet(version - state["version"], collected.groups)
            version += 1
            self._publish(version, self.intake.open)
            if self.world.learner is self:
                self.deaths.end(version - 1)
                self.world.step_deaths.ended(version - 1)
            if version == scenario.steps or version % scenario.every == 0:
                self._save(checkpoints, version)
        self.buffer.close()
        self.hub.stop(THE_END)
        self.world.learner_finished(self, version)

    def stands_at(self, shard: int, owner: str, takes: int) -> bool:
        """Whether `owner` is its handle on a shard and `takes` what its ledger has."""
        return self.shards[shard]._owner == owner and self.intakes[shard].ledger.takes == takes

    def _intakes(self, ledgers: Sequence[Ledger]) -> tuple[Intake, ...]:
        def judge_reward(outcome: GroupOutcome) -> str | None:
            return "zero_reward" if outcome.rewards[0] == 0 else None

        intakes: list[Intake] = []
        gate = Gate(lane=LANE, decode=decode, limits=LIMITS, condemned=self._condemned)
        for shard, (buffer, ledger) in enumerate(zip(self.shards, ledgers, strict=True)):
            watched = WatchedLedger.from_dict(ledger.to_dict())
            watched.learner, watched.shard = self, shard
            intakes.append(
                Intake(
                    buffer=buffer,
                    ledger=watched,
                    gate=replace(gate, name_of=partial(of_lane, shard, shards=len(ledgers))),
                    judge=make_judge([judge_reward], drop_older_than=self.max_age, history=self.history),
                    groups=self.settings.groups,
                    window=self.settings.window,
                    max_lag=self.settings.max_lag,
                    max_refills=10_000,
                    stall_s=STALL_S,
                    history=self.history,
                )
            )
        return tuple(intakes)

    def _publish(self, version: int, announce: Any) -> None:
        serial = self.weights.history[-1]["serial"] if self.weights.history else 0
        self.published = Published(self.history.weights(version), self.history, serial)
        if self.world.learner is self:
            self.world.publish(self.published)
        self.hub.announce(version)
        self.version = version
        self.allow(version)
        announce(version)

    def allow(self, version: int) -> None:
        """The credit that this learner may open, by its definition."""
        shards, trained = len(self.shards), sum(entry["groups"] for entry in self.weights.history[:version])
        for lane, intake in zip(self.world.lanes, self.intakes, strict=True):
            credit = (
                trained // shards
                + intake.ledger.total_rejected
                + (self.settings.max_lag + 1) * self.settings.groups
            )
            lane.credit = max(lane.credit, credit)

    def _condemned(self, frame: bytes) -> str | None:
        reason = self.deaths.reason(frame)
        require(
            reason is None or self.world.step_deaths.may_condemn(frame),
            "set aside, and killed too few learners",
            frame,
        )
        return reason

    def _poll(self, version: int) -> Collected:
        longest_s = 1.0
        while (collected := self.intake.poll(version, wait_s=0.0)) is None:
            self.hub.check()
            self.engine.sleep(self.engine.random.uniform(0.2, longest_s))
            longest_s = min(1.2 * longest_s, LONGEST_PAUSE_S)
        if self.world.learner is self:  # else it is about to hear that another has its place
            self.deaths.begin(version, collected.frames)
            self.world.step_deaths.began(version, collected.frames)
        return collected

    def _train(self, version: int, collected: Collected) -> None:
        if any(group.generator_id in self.world.deadly_samples for group in collected.groups):
            self.world.learner_ended(self)
            self.engine.exit()
        entry: dict[str, Any] = {
            "version": version,
            "serial": self.world.next_number(),
            "groups": self.settings.groups * len(self.shards),
            "max_age": self.max_age,
            "takes": self.takes,
            "trained": [(group.ticket_id, group.generator_id, oldest(group)) for group in collected.groups],
            "rejected": [(group.ticket_id, reason) for group, reason in collected.rejected],
        }
        stale = [ticket_id for ticket_id, reason in entry["rejected"] if reason == "stale"]
        # What an earlier learner's steps, now lost, gave credit for.
        may_be = self.settings.drop or not self.is_first
        require(
            may_be or not stale,
            "a group is too old that the anchored window should have taken in time",
            version,
            stale,
        )
        self._check_lost(
            [group for group, reason in collected.rejected if reason == DISCARDED_LINEAGE], version
        )
        self.weights.history.append(json.loads(json.dumps(entry)))
        self.takes = []

    def _check_lost(self, groups: Sequence[Group], version: int) -> None:
        """What is thrown away as lost was sampled by weights that did not lead here, or is too old."""
        serials = [0, *(entry["serial"] for entry in self.weights.history)]
        for group in groups:
            weights = self.world.sampled_by[group.generator_id]
            is_lost = any(one > version or serials[one] != serial for one, serial in weights)
            is_old = version - min(weights)[0] > self.max_age
            # An earlier learner may have forgotten what was too old for its settings.
            require(
                is_lost or is_old or self.world.has_changed,
                "a good group was called lost",
                version,
                group,
                weights,
            )

    def _save(self, checkpoints: CheckpointStore, version: int) -> None:
        ledger = self.intake.settled
        oldest = checkpoints.save(
            version, self.weights, {"version": version, "ledger": ledger, "history": str(self.history)}
        )
        self.intake.commit(checkpoints.state(oldest)["ledger"], version)


def oldest(group: Group) -> int:
    """The oldest version that sampled a token of it."""
    return min(span.version for rollout in group.rollouts for span in rollout.version_spans)
