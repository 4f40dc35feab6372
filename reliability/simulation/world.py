"""One run from the first lease to the last commit, with everything that goes wrong on the way."""

import collections
import functools
import math
import os
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from asyncrl.algo.staleness import lag_bound
from asyncrl.buffer import connection as connection_module
from asyncrl.buffer import intake as intake_module
from asyncrl.buffer import redis as redis_module
from asyncrl.buffer import shards as shards_module
from asyncrl.buffer.base import BufferRules
from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.redis import RedisBuffer
from asyncrl.buffer.shards import ledgers_of, shard_names
from asyncrl.control import client as client_module
from asyncrl.control import zmq as hub_module
from asyncrl.errors import BufferGap, CheckpointError
from asyncrl.hosting import progress as progress_module
from asyncrl.lineage import INITIAL, Weights
from asyncrl.run.checkpoint import CheckpointStore

from .client import LATEST_S, OF_A_LEARNER, Connection, Network
from .content import LIMITS, Tokens, encode
from .control import Update, Wire, strange_message, virtual_control
from .engine import Engine, Process, virtual_time
from .faults import Faults
from .invariants import check_lineage, check_nothing_is_left
from .lane import RUN, Lane, require
from .processes import KEY, GeneratorProcess, LearnerProcess, Published, TrainedWeights
from .step_deaths import StepDeathsTold
from .store import Snapshot, VirtualStore, lane_of
from .violation import Violation
from .watch import LaneWatch

EPOCH_S = 1e9
"""The store's clock at the beginning."""
PATIENCE_S = 3000.0
"""After the last fault a run ends within this time, plus what the store's clock was turned back."""
MEMORY = "/dev/shm"
"""If set, checkpoints are written there: the simulated disk loses nothing, and a real one takes time."""
FOREVER_S = 1e7
STORM_S = (5.0, 40.0)
"""Faults come in storms: between two of them the run gets on, so that later steps, with checkpoints, meet
faults as well."""
SNAPSHOTS = 4
DEADLY_SHARE = 0.03
SHARDS = (1, 4)
AMBUSHED = {"reject": 1.0, "commit": 2.0, "recover": 1.0, "close": 1.0, "take": 0.1}
"""Share of the chance, by function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What may be another at every start of the learner."""

    groups: int
    window: int
    """Both of a shard."""
    max_lag: int
    drop: bool

    @classmethod
    def draw(cls, random: random.Random, *, shards: int) -> "Settings":
        groups = random.randint(1, 4 if shards == 1 else 2)
        return cls(
            groups=groups,
            window=random.choice([1, groups, 2 * groups, 3 * groups]),
            max_lag=random.choice([0, 1, 1, 2]),
            drop=random.random() < 0.4,
        )

    def max_age(self, shards: int) -> int:
        """Of a group when it is trained."""
        if self.drop:
            return self.max_lag
        return lag_bound(
            self.max_lag, window=shards * self.window, groups=shards * self.groups, shards=shards
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The size of a run."""

    steps: int
    shards: int
    ranks: int
    every: int
    keep: int
    generators: int
    held_at_most: int
    sampling_s: float
    training_s: float
    fsync_s: float
    """0: nothing that was answered is lost; else the time between two."""
    faults_s: float
    """All storms together, at most."""

    @classmethod
    def draw(cls, random: random.Random, *, shards: int) -> "Scenario":
        return cls(
            steps=random.randint(3, 9),
            shards=shards,
            ranks=random.randint(1, 3),
            every=random.randint(1, 3),
            keep=random.choice([1, 1, 2, 3]),
            generators=random.randint(1, 3),
            held_at_most=random.randint(2, 6),
            sampling_s=random.choice([0.5, 2.0, 6.0]),
            training_s=random.choice([1.0, 3.0, 10.0]),
            fsync_s=random.choice([0.0, 0.2, 1.0, 5.0]),
            faults_s=random.uniform(20.0, 120.0),
        )


class World:
    """Everything of one seed."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.engine = Engine(seed)
        chance = self.engine.random
        shards = chance.choice(SHARDS)
        self.settings = Settings.draw(chance, shards=shards)
        self.rules = BufferRules(
            groups=self.settings.groups,
            lease_s=chance.choice([10.0, 40.0]),
            max_attempts=chance.randint(1, 3),
            # Holders die so often that all would be suspects.
            max_deaths=chance.choice([1 << 30, 1 << 30, 3, 5]),
            max_bytes=chance.choice([200, 800, 1 << 30]),
        )
        self.scenario = Scenario.draw(chance, shards=shards)
        self.faults = Faults.draw(chance)
        if self.faults.chances["torn_checkpoint"] > 0.5:  # there is an older one to fall back on, soon
            self.scenario = replace(self.scenario, every=1, keep=3)
        is_counted = self.rules.max_deaths < 1 << 30
        self.deadly_tickets = {i for i in range(1, 100) if is_counted and chance.random() < DEADLY_SHARE}
        """Whoever samples one dies."""
        self.deadly_samples: set[str] = set()
        """Whoever trains on one dies."""
        self.directory = directory
        self.step_under_way = directory / "step_under_way.json"
        self.step_deaths = StepDeathsTold()
        self.clock_offset_s, self.turned_back_s = 0.0, 0.0
        self.store = VirtualStore(
            clock=lambda: EPOCH_S + self.engine.now_s + self.clock_offset_s, after=self._after
        )
        self.network = Network(self.engine, self.store, self.faults)
        self.network.before_transaction = self._before
        self.network.before_request = self._ambush
        self.produced: dict[int, set[str]] = {}
        """Ticket id -> samples that may be trained."""
        self.sampled_by: dict[str, set[tuple[int, int]]] = {}
        """Sample -> (version, serial number) of the weights."""
        self.windows: dict[str, int] = {}
        """Of every learner's handle."""
        self.is_closed = False
        self.has_changed = False
        """Learners have had different settings."""
        self._numbers = 0
        self.lanes = [LaneWatch(self, name, shard) for shard, name in enumerate(shard_names("train", shards))]
        self._lane_named = {lane.name: lane for lane in self.lanes}
        self.published = Published(Weights(0), INITIAL, 0)
        self.wire = Wire(self.engine, self.faults)
        self.updates: dict[int, Update] = {}
        """By the number in their order."""
        self.forgot_s = -math.inf
        """When the store last lost something."""
        self.learner: LearnerProcess | None = None
        self.learners: list[LearnerProcess] = []
        self.generators: dict[int, GeneratorProcess] = {}
        self._incarnations = 0
        self._samples = 0
        self._snapshots = [self.store.snapshot()]
        self._replicas = list(self._snapshots)
        self._at_take = self._snapshots[0]
        """Just before the last TAKE."""
        self._before_take = self._snapshots
        """With its learner, but without the last take."""
        self._last_take: tuple[str, int, tuple[int, ...]] = ("", 0, ())
        """Its lane, its number, and its ids."""
        self._is_forgotten = False
        self._snapshot_at_s = 0.0
        self._is_finished, self._is_over = False, False
        self._storms_left_s, self._calm_since_s = self.scenario.faults_s, 0.0
        self._storm_from_version = 0
        self.drained = False
        self.outcomes = collections.Counter[str]()
        self.trace: collections.deque[tuple[Any, ...]] = collections.deque(maxlen=60)
        """The last calls of the store."""

    # -- the run

    def run(self) -> None:
        """Raises Violation."""
        clocks = (
            connection_module,
            intake_module,
            redis_module,
            shards_module,
            progress_module,
            client_module,
            hub_module,
        )
        with virtual_time(self.engine, *clocks), virtual_control(self.engine, self.wire):
            try:
                self._start_learner()
                for slot in range(self.scenario.generators):
                    self._start_generator(slot)
                for name, mean_s in self.faults.means_s.items():
                    self._schedule(name, mean_s)
                self._storm()
                self.engine.run(lambda: self._is_over, self._deadline_s)
                self._check_end()
                self.engine.start(Process("drain"), self._drain)
                self.engine.run(lambda: self.drained, self._deadline_s)
            finally:
                self.engine.close()

    def _deadline_s(self) -> float:
        return (
            max(self._calm_since_s, self.engine.now_s if self.faults.is_on else 0.0)
            + PATIENCE_S
            + 2 * self.turned_back_s
        )

    def _storm(self) -> None:
        lasts_s = min(self._storms_left_s, self.engine.random.uniform(*STORM_S))
        self._storms_left_s -= lasts_s
        self.faults.is_on = True
        self.engine.at(lasts_s, self._calm)

    def _calm(self) -> None:
        """Until there are new weights."""
        if self.faults.is_on:
            self.faults.is_on, self._calm_since_s = False, self.engine.now_s
            self._storm_from_version = self.published.weights.version + 1

    def publish(self, published: Published) -> None:
        """The learner has new weights."""
        self.published = published
        if (
            not self.faults.is_on
            and self._storms_left_s > 0
            and published.weights.version >= self._storm_from_version
        ):
            self.engine.at(self.engine.random.uniform(0.0, self.scenario.training_s), self._resume_storms)

    def _resume_storms(self) -> None:
        if not (self.faults.is_on or self._is_finished):
            self._storm()

    # -- processes come and go

    def _start_learner(self) -> None:
        if self._is_finished:
            return
        kept = sorted(self.directory.glob("step-*"))
        if len(kept) > 1 and self.faults.strikes("torn_checkpoint"):
            self._damage(kept[-1])
        if self.learners and self.faults.strikes("changed_settings"):
            self._change_settings()
        self._incarnations += 1
        self.learner = LearnerProcess(self, f"learner.{self._incarnations}", is_first=not self.learners)
        self.wire.learner = self.learner.process
        self.learners.append(self.learner)

    def _damage(self, checkpoint: Path) -> None:
        file = self.engine.random.choice(sorted(path for path in checkpoint.rglob("*") if path.is_file()))
        match self.engine.random.randrange(3):
            case 0:
                file.unlink()
            case 1:
                file.write_bytes(b"")
            case 2:
                file.write_bytes(file.read_bytes()[:-1] + b"?")

    def _change_settings(self) -> None:
        """The generators start anew with the run."""
        self.has_changed = True
        self.settings = Settings.draw(self.engine.random, shards=self.scenario.shards)
        self.rules = replace(self.rules, groups=self.settings.groups)
        for generator in self.generators.values():
            if generator.process.is_alive:
                self.engine.kill(generator.process)
                self.generator_died(generator)

    def next_number(self) -> int:
        """For what must have a name of its own."""
        self._numbers += 1
        return self._numbers

    def _start_generator(self, slot: int) -> None:
        if not self._is_finished:
            self._incarnations += 1
            self.generators[slot] = GeneratorProcess(self, f"g{slot}:{self._incarnations}")

    def learner_ended(self, learner: LearnerProcess) -> None:
        """A supervisor starts the next one, unless another has taken its place."""
        if self.learner is learner and not self._is_finished:
            self.engine.at(self.engine.random.uniform(0.5, 3.0), lambda: self._replace_learner(learner))

    def _replace_learner(self, ended: LearnerProcess) -> None:
        if self.learner is ended:
            self._start_learner()

    def generator_died(self, generator: GeneratorProcess) -> None:
        """A supervisor starts the next one; the control plane notices by its silence."""
        self.generator_left(generator)

    def generator_left(self, generator: GeneratorProcess) -> None:
        for slot, one in self.generators.items():
            if one is generator:
                self.engine.at(
                    self.engine.random.uniform(0.5, 5.0), functools.partial(self._start_generator, slot)
                )

    # -- what the processes tell

    def sample(self, holder: str, ticket_id: int, sampled_by: Sequence[Published]) -> bytes:
        """The frame of a new sample, whose rollouts begin and end anywhere in its sampling time."""
        random = self.engine.random
        self._samples += 1
        name, rollouts = f"{holder}#{self._samples}", []
        self.sampled_by[name] = set()
        for _ in range(random.randint(1, LIMITS.rollouts)):
            first = random.randrange(len(sampled_by))
            parts = sampled_by[first : random.randint(first + 1, len(sampled_by))]
            self.sampled_by[name] |= {(part.weights.version, part.serial) for part in parts}
            rollouts.append((int(random.random() > 0.2), [part.weights for part in parts]))
        frame = encode(ticket_id, name, rollouts, padding=random.choice([0, 20, 80]))
        if self.faults.strikes("garbage_frame"):
            shards = len(self.lanes)  # so that the neighbour may be of the same step
            neighbour = (
                ticket_id + shards if ticket_id <= shards or random.random() < 0.5 else ticket_id - shards
            )
            return random.choice([b"garbage", b"", frame[:-1], *[encode(neighbour, name, rollouts)] * 2])
        if self.faults.strikes("foreign_group"):
            return self._foreign(ticket_id, name, rollouts)
        self.produced.setdefault(ticket_id, set()).add(name)
        if self.faults.strikes("deadly_group"):
            self.deadly_samples.add(name)
        return frame

    def _foreign(self, ticket_id: int, name: str, rollouts: Sequence[Tokens]) -> bytes:
        """Authentic, but nobody can train on it, or it is of another lane."""
        reward, tokens = rollouts[0]
        return self.engine.random.choice(
            [
                encode(ticket_id, name, rollouts, lane="eval"),
                encode(ticket_id, name, rollouts, token=LIMITS.vocabulary),
                encode(ticket_id, name, rollouts, token=-1),
                encode(ticket_id, name, []),
                encode(ticket_id, name, [(reward, [])]),
                encode(ticket_id, name, [(reward, tokens)] * (LIMITS.rollouts + 1)),
                encode(ticket_id, name, [(reward, [tokens[0]] * LIMITS.max_tokens)]),
                encode(ticket_id, name, [(10**10, tokens)]),
                encode(ticket_id, name, [(reward, [Weights(-1)])]),
            ]
        )

    def learner_finished(self, learner: LearnerProcess, version: int) -> None:
        if self.learner is learner:
            require(version == self.scenario.steps, "the learner stopped early", version)
            self._is_finished = True
            self._calm()
            # Generators see the end, and replaced learners.
            self.engine.at(self.engine.random.choice([0.0, 70.0]), self._end)

    def _end(self) -> None:
        self._is_over = True

    # -- the store

    def _before(self, function: str) -> None:
        if function == "take":
            self._at_take = self.store.snapshot()
        if self.engine.now_s - self._snapshot_at_s >= max(self.scenario.fsync_s, 0.2):
            self._snapshot()
        for lane in self.lanes:
            lane.before()

    def _snapshot(self) -> None:
        self._snapshot_at_s = self.engine.now_s
        self._snapshots = [*self._snapshots, self.store.snapshot()][-SNAPSHOTS:]
        if self.engine.random.random() < 0.3:
            self._replicas.append(self._snapshots[-1])
            if len(self._replicas) > SNAPSHOTS:  # any may be the one that stays behind
                self._replicas.pop(self.engine.random.randrange(SNAPSHOTS))

    def _after(self, key: bytes, name: str, raw: tuple[bytes, ...], reply: Any) -> None:
        """A function of the store, or UNLINK, has run."""
        arguments, lane = tuple(argument.decode(errors="replace") for argument in raw), lane_of(key)
        self.trace.append((round(self.engine.now_s, 3), lane, name, *arguments, reply))
        self._lane_named[lane].after(name, arguments, reply)

    def assigned(self, watch: LaneWatch, lane: Lane) -> None:
        """A take of a shard is new."""
        number = max(lane.takes)
        known = {"owner": lane.meta["owner"], "last": str(number - 1)}
        older = [
            one for one in self._snapshots if known.items() <= Lane(one[0], watch.name, lane).meta.items()
        ]
        self._before_take = [*older, self._at_take]
        self._last_take, self._is_forgotten = (watch.name, number, lane.takes[number][2]), False

    def stored(self, watch: LaneWatch, lane: Lane) -> None:
        """A request that the store has forgotten comes when its answer would be another."""
        name, number, ids = self._last_take
        is_other = len(lane.ready) >= len(ids) and tuple(sorted(lane.ready)[: len(ids)]) != ids
        if self._is_forgotten and name == watch.name and is_other:
            self.network.repeat_take(name, number)

    def open_lanes(self, connection: StoreConnection) -> list[RedisBuffer]:
        """A new process's handles on the shards."""
        return [RedisBuffer(connection, RUN, self.rules, lane=lane.name) for lane in self.lanes]

    def durable_ids(self, lane: LaneWatch) -> set[int]:
        """Those of a shard that every kept checkpoint holds."""
        if self._is_over:  # the whole ledger is as good as saved
            return set(range(1, lane.look().issued + 1))
        steps = sorted(self.directory.glob("step-*"))
        if not steps:
            return set()
        state = checkpoint_store(self.directory).state(int(steps[0].name[5:]))
        ledger = ledgers_of(state["ledger"], len(self.lanes))[lane.shard]
        return {*range(1, ledger.watermark + 1), *ledger.above}

    def _go_back(self, snapshot: Snapshot) -> None:
        """All nodes, or one: the shards may be on several."""
        random = self.engine.random
        is_one_node = len(self.lanes) > 1 and random.random() < 0.5
        lanes = (
            random.sample(self.lanes, random.randint(1, len(self.lanes) - 1)) if is_one_node else self.lanes
        )
        self.store.restore(snapshot, lanes=[lane.name for lane in lanes] if is_one_node else None)
        self._snapshots = [self.store.snapshot()]
        self.forgot_s = self.engine.now_s
        for lane in lanes:
            lane.store_is_another()
        if self.faults.strikes("echo"):
            self.network.echo(OF_A_LEARNER, longest_s=random.choice([1.0, 5.0, 20.0]))

    # -- faults

    def _schedule(self, name: str, mean_s: float) -> None:
        def strike() -> None:
            if self.faults.is_on:
                self.faults.count(name)
                getattr(self, f"_{name}")()
            if not self._is_finished:
                self._schedule(name, mean_s)

        self.engine.at(self.engine.random.expovariate(1 / mean_s), strike)

    def _ambush(self, function: str) -> None:
        """Right before a rare call, where the schedule would hardly ever strike: store or caller changes."""
        share = AMBUSHED.get(function, 0.0)
        if share and self.faults.strikes("ambush", share=share, also_in_calm=function == "close"):
            random = self.engine.random
            kinds = [
                self._store_kill,
                self._store_wipe,
                self._store_failover,
                self._store_relapse,
                self._second_learner,
            ]
            random.choice([*kinds, *[self._store_relapse] * (4 if function == "commit" else 1)])()
            self.engine.sleep(random.uniform(0.0, random.choice([1.0, 5.0, 20.0])))

    def any_generator(self) -> GeneratorProcess:
        return self.generators[self.engine.random.randrange(self.scenario.generators)]

    def _generator_kill(self) -> None:
        generator = self.any_generator()
        if generator.process.is_alive:
            self.engine.kill(generator.process)
            self.generator_died(generator)

    def _generator_pause(self) -> None:
        """The control plane may take it for dead."""
        self.any_generator().process.paused_until_s = self.engine.now_s + self.engine.random.uniform(
            1.0, 90.0
        )

    def _generator_hang(self) -> None:
        """Nobody but the supervisor ends it."""
        generator = self.any_generator()
        generator.process.paused_until_s = FOREVER_S

        def replace() -> None:
            if generator.process.is_alive:
                self.engine.kill(generator.process)
                self.generator_died(generator)

        self.engine.at(self.engine.random.uniform(5.0, 60.0), replace)

    def _strange_message(self) -> None:
        strange_message(self)

    def _generator_leave(self) -> None:
        self.any_generator().is_leaving = True

    def _learner_kill(self) -> None:
        learner = self.learner
        if learner is not None and learner.process.is_alive:
            self.engine.kill(learner.process)
            self.learner_ended(learner)

    def _learner_hang(self) -> None:
        learner = self.learner
        if learner is None:
            return
        learner.process.paused_until_s = FOREVER_S

        def replace() -> None:
            if learner.process.is_alive:
                self.engine.kill(learner.process)
                self.learner_ended(learner)

        self.engine.at(self.engine.random.uniform(5.0, 60.0), replace)

    def _learner_pause(self) -> None:
        if self.learner is not None:
            self.learner.process.paused_until_s = self.engine.now_s + self.engine.random.uniform(1.0, 60.0)

    def _second_learner(self) -> None:
        """The old learner sleeps, and wakes unaware that another has the lock, perhaps with its epoch."""
        self._learner_pause()
        if self.faults.strikes("usurper_of_nothing"):
            self.engine.random.choice([self._store_wipe, self._store_failover])()
        self.engine.at(self.engine.random.uniform(0.5, 5.0), self._start_learner)

    def _store_kill(self) -> None:
        random = self.engine.random
        self.network.down_until_s = self.engine.now_s + random.uniform(0.2, 5.0)
        self.network.loading_until_s = self.network.down_until_s + random.uniform(0.0, 0.5)
        if self.scenario.fsync_s:
            self._go_back(random.choice(self._snapshots))

    def _store_failover(self) -> None:
        """To a replica that was left behind, and that may have seen what never became history."""
        self.network.down_until_s = self.engine.now_s + self.engine.random.uniform(0.2, 3.0)
        self._go_back(self.engine.random.choice(self._replicas))

    def _store_relapse(self) -> None:
        """It knows its learner but not this one's last take, with which the learner is still busy."""
        random, now_s = self.engine.random, self.engine.now_s
        self.network.down_until_s = now_s + random.uniform(0.2, 1.0)
        if self.learner is not None:
            self.learner.process.paused_until_s = now_s + random.uniform(0.0, 30.0)
        self._go_back(random.choice(self._before_take))
        self._is_forgotten = True
        self.network.echo({"take", "reject", "commit"}, longest_s=20.0)

    def _store_wipe(self) -> None:
        self.network.down_until_s = self.engine.now_s + self.engine.random.choice([0.0, 2.0])
        self._go_back(VirtualStore(clock=self.store.clock).snapshot())

    def _store_pause(self) -> None:
        self.network.paused_until_s = self.engine.now_s + self.engine.random.uniform(1.0, 40.0)

    def _functions_lost(self) -> None:
        self.store.libraries.clear()

    def _clock_jump(self) -> None:
        by_s = self.engine.random.choice([-3600.0, -30.0, 30.0, 3600.0])
        self.clock_offset_s += by_s
        self.turned_back_s += max(0.0, -by_s)

    def _out_of_memory(self) -> None:
        self.store.out_of_memory = True

        def relieve() -> None:
            self.store.out_of_memory = False

        self.engine.at(self.engine.random.uniform(1.0, 15.0), relieve)

    # -- the end

    def _check_end(self) -> None:
        weights = TrainedWeights()
        state = checkpoint_store(self.directory).load(weights)
        require(
            state is not None and state["version"] == self.scenario.steps,
            "the last checkpoint is not there",
            state,
        )
        assert state is not None
        self.ledgers = ledgers_of(state["ledger"], len(self.lanes))
        try:
            check_lineage(weights.history, self.ledgers, self.produced, self.sampled_by)
        except CheckpointError as error:
            raise Violation(f"an id was trained twice: {error}") from error
        for process in [one.process for one in self.generators.values()] + [
            one.process for one in self.learners
        ]:
            self.engine.kill(process)

    def _drain(self) -> None:
        """Whatever is still issued is consumed too: then nothing is left."""
        buffers = self.open_lanes(Connection(self.network, self.engine.process))
        self.engine.sleep(2 * LATEST_S)
        for lane, buffer, ledger in zip(self.lanes, buffers, self.ledgers, strict=True):
            self._drain_lane(lane, buffer, ledger)
        self.drained = True

    def _drain_lane(self, lane: LaneWatch, buffer: RedisBuffer, ledger: Ledger) -> None:
        limit = max(buffer.audit().issued, ledger.watermark, *ledger.above)
        buffer.recover(ledger, version=self.scenario.steps, limit=limit)
        while ledger.consumed < limit:
            for ticket in buffer.lease("drain", 4).tickets:
                buffer.put(
                    "drain", ticket.id, self.sample("drain", lane.name_of(ticket.id), [self.published])
                )
            self._take_one(buffer, ledger, limit)
        buffer.commit(ledger.takes, ledger.chain)
        check_nothing_is_left(lane.look())

    def _take_one(self, buffer: RedisBuffer, ledger: Ledger, limit: int) -> None:
        try:
            take = buffer.take(ledger, 1, window=1)
        except BufferGap:
            buffer.recover(ledger, version=self.scenario.steps, limit=limit)
            return
        if take is None:
            self.engine.sleep(60.0)
        else:
            ledger.consume(take.ids)


def checkpoint_store(directory: Path) -> CheckpointStore:
    """For looking at what is on the disk."""
    return CheckpointStore(directory, KEY, 1)


def simulate(seed: int) -> World:
    """Run a seed. Raises Violation."""
    with tempfile.TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else None) as directory:
        world = World(seed, Path(directory))
        try:
            world.run()
        except Exception as error:
            error.add_note("\n".join(map(str, world.trace)))
            raise
        return world
