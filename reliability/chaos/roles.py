"""Processes of a run without models: shipped loops, protocol, control plane, checkpoints; a toy engine, a
hash for weights."""

import asyncio
import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.algo.filters import GroupOutcome
from asyncrl.algo.trainable import GroupLimits
from asyncrl.buffer.base import BufferRules, PutOutcome, Take
from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.intake import Collected, Intake
from asyncrl.buffer.judge import Gate, make_judge
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.redis import RedisBuffer
from asyncrl.buffer.run_record import RunRecord, StoredRun
from asyncrl.buffer.watch import AuditWatch
from asyncrl.config.sections import ControlConfig
from asyncrl.control.base import Hello
from asyncrl.control.client import ControlClient
from asyncrl.control.membership import RunIdentity
from asyncrl.control.zmq import ControlHub
from asyncrl.engine.base import SamplingSpec
from asyncrl.engine.fake import FakeEngine
from asyncrl.engine.sampler import GroupSampler, Sampler
from asyncrl.errors import CheckpointError, RewardError
from asyncrl.generator import Generator, GeneratorSettings, Lane
from asyncrl.hosting import progress
from asyncrl.launch.roles import NOT_FIXED_BY_A_RESTART, run_role
from asyncrl.launch.step_deaths import StepDeaths
from asyncrl.rewards.base import RewardInput, Score
from asyncrl.run.checkpoint import CheckpointStore
from asyncrl.run.keys import RunKeys
from asyncrl.run.lock import RunLock
from asyncrl.types import Group, Prompt
from asyncrl.weights.agreement import Agreement
from asyncrl.wire.group_frames import decode_group
from tests.support.nowhere import Nowhere

from .helpers import CoreEngine, OrdersOnly, doom
from .hosts import move_to
from .lineage import FoldedWeights, digest

RUN, KEY = "chaos", b"key"
KEYS = RunKeys(bytes(32))
"""Between hosts."""
B, MAX_LAG, WINDOW, EVERY, KEEP = 8, 2, 8, 5, 2
RULES = BufferRules(groups=B, lease_s=2.0)
CONTROL = ControlConfig(heartbeat_s=0.25, timeout_s=1.5)
"""Four and ten times faster than the defaults, so that a minute holds more faults."""
RETRY_S = 60.0
HELPERS = {"engine core": ("generator", "os.read(0, 1)")}
"""Kind of process: whose child it is, and what its command line has."""
JOIN_S = 10.0
"""A generator that comes when the run is just over finds nobody for so long."""
FINISH = "finish"
"""A file: the learner's next step is its last."""
EVENTS = "events.jsonl"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a process finds the others. Addresses may be those of proxies."""

    directory: Path
    store: str
    control: str
    """Where the learner listens, or what leads there."""
    password: str | None = None
    network: Path | None = None
    has_helpers: bool = False
    """A process of its own for the engine's core."""

    def connect(self) -> StoreConnection:
        return StoreConnection(self.store, password=self.password, retry_s=RETRY_S)


def start(role: Callable[..., None], place: Place, name: str, signs: str, *arguments: Any) -> None:
    """What a forked process does: its own network and log, its place on the board `signs`, the exit status of
    a shipped role."""
    os.environ |= progress.variable(os.open(signs, os.O_RDWR), 0)
    if place.network is not None:
        move_to(place.network)
    log = os.open(place.directory / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s {os.getpid()} %(levelname)s %(message)s", force=True
    )
    run_role(lambda: role(place, name, *arguments))


class Lines:
    """Appends whole lines to a file that processes share. They all have one clock, `time.monotonic`."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, line: str) -> None:
        os.write(self._file, line.encode() + b"\n")


def step_record(checkpoints: Path) -> Path:
    """Of the learner that saves there: the step under way."""
    return checkpoints.with_suffix(".step.json")


# --- generator ------------------------------------------------------------------------------------


class WatchedBuffer(RedisBuffer):
    """Notes what it is about to hand over."""

    lines: Lines

    def put(self, holder: str, ticket_id: int, frame: bytes) -> PutOutcome:
        self.lines.write(f"{ticket_id} {digest(frame)} {time.monotonic():.3f}")
        return super().put(holder, ticket_id, frame)


class Rewards:
    """Depends on the response alone; one group in a hundred raises."""

    def __init__(self) -> None:
        self._calls = 0

    async def score(self, inputs: Sequence[RewardInput]) -> list[Score]:
        self._calls += 1
        if self._calls % 100 == 0:
            raise RewardError("part toy: told to raise")
        return [
            Score(total=float(len(one.response) % 5), parts={"toy": float(len(one.response) % 5)})
            for one in inputs
        ]

    async def close(self) -> None: ...


def generator(place: Place, name: str, seed: int) -> None:
    """The shipped generator on the toy engine."""
    asyncio.run(_generate(place, name, seed))


async def _engine(place: Place, seed: int) -> FakeEngine:
    if not place.has_helpers:
        return FakeEngine(token_s=0.002, seed=seed)
    engine = CoreEngine(token_s=0.002, seed=seed)
    await engine.begin()
    return engine


async def _generate(place: Place, name: str, seed: int) -> None:
    engine = await _engine(place, seed)
    sampler = Sampler(engine, Rewards(), lambda ids, raw=False: "x" * len(ids), name)
    spec = SamplingSpec(temperature=1.0, max_response_tokens=8)
    await generate(place, name, engine, sampler, partial(_prompt, place), spec)


async def generate(
    place: Place,
    name: str,
    engine: FakeEngine,
    sampler: GroupSampler,
    prompt: Callable[[int], Prompt],
    spec: SamplingSpec,
    *,
    max_running: int = 12,
) -> None:
    """Run the shipped generator until the run is over."""
    incarnation = uuid.uuid4().hex[:12]
    buffer = WatchedBuffer(place.connect(), RUN, RULES)
    buffer.lines = Lines(place.directory / f"put-{name}-{incarnation}.txt")
    lane = Lane(
        name="train",
        buffer=buffer,
        prompt=prompt,
        spec=spec,
        limits=GroupLimits(vocabulary=1000, rollouts=2, max_tokens=100),
        minimum_version=lambda ticket: ticket.minimum_version,
    )
    control = ControlClient(
        place.control,
        heartbeat_s=CONTROL.heartbeat_s,
        timeout_s=CONTROL.timeout_s,
        join_s=JOIN_S,
        wire_key=KEY,
        keys=KEYS.join.control,
    )
    await Generator(
        engine=engine,
        lanes=[lane],
        sampler=sampler,
        staging=Nowhere(),
        control=control,
        tracker=Nowhere(),
        agreement=Agreement(limit=1e-3, dtype="float32"),
        settings=GeneratorSettings(
            max_running=max_running,
            most_held=4 * max_running,
            lease_s=RULES.lease_s,
            heartbeat_s=CONTROL.heartbeat_s,
            wire_key=KEY,
        ),
    ).run(
        Hello(
            generator_id=name,
            incarnation=incarnation,
            release="r",
            config_hash="c",
            version=0,
            pid=os.getpid(),
        )
    )


def _prompt(place: Place, ticket_id: int) -> Prompt:
    doom(place.directory, "ticket", [ticket_id])
    return Prompt(token_ids=(ticket_id % 16,), text="", row={})


# --- learner --------------------------------------------------------------------------------------


@dataclass(slots=True)
class WatchedLedger(Ledger):
    """Keeps the ids of the takes of the current step."""

    current: list[tuple[int, ...]] = field(default_factory=list)
    on_take: Callable[[], None] = lambda: None

    def consume(self, ids: tuple[int, ...]) -> None:
        Ledger.consume(self, ids)
        self.current.append(ids)
        self.on_take()


class JudgedBuffer(RedisBuffer):
    """Tells which frames the learner refuses, and why."""

    say: Callable[..., None]

    def reject_frame(
        self, take: Take, ticket_id: int, frame: bytes, reason: str, *, final: bool = False, old: bool = False
    ) -> Take:
        self.say("refused", id=ticket_id, content=digest(frame), reason=reason)
        return super().reject_frame(take, ticket_id, frame, reason, final=final, old=old)


class Learner:
    """Takes, trains, publishes, saves and commits in the order of asyncrl.learner and launch.learner_runs."""

    def __init__(self, place: Place, checkpoints: Path) -> None:
        self._place = place
        self._lines = Lines(place.directory / EVENTS)
        self._weights = FoldedWeights(place.directory / "manifests")
        self._checkpoints = CheckpointStore(checkpoints, KEY, KEEP)
        state = self._checkpoints.load(self._weights) or {"version": 0, "ledger": Ledger().to_dict()}
        self.version: int = state["version"]
        self._decoded: list[tuple[Group, bytes]] = []
        self._is_overdue = False
        self._deaths = StepDeaths(step_record(checkpoints))
        connection = place.connect()
        self._record = RunRecord(connection, KEY)
        self._stored = StoredRun(name=RUN, config_json="{}", config_hash="c", release="r", key_id="k")
        self._record.claim(self._stored, fresh=self.version == 0)
        buffer = JudgedBuffer(connection, RUN, RULES)
        buffer.say = self._say
        self._intake = self._make_intake(buffer, state["ledger"])
        self._watch = AuditWatch("training", buffer.audit)
        self._orders = OrdersOnly()
        self._hub = ControlHub(
            place.control,
            self._orders,
            CONTROL,
            RunIdentity(release="r", config_hash="c"),
            transport="disk",
            deadline_s=5.0,
            wire_key=KEY,
            keys=KEYS.control,
            on_dead=self._intake.buffer.revoke,
        )

    def _make_intake(self, buffer: RedisBuffer, saved: dict[str, Any]) -> Intake:
        ledger = WatchedLedger.from_dict(saved)
        ledger.on_take = lambda: self._say("take")
        return Intake(
            buffer=buffer,
            ledger=ledger,
            gate=Gate(
                lane="train",
                decode=self._decode,
                limits=GroupLimits(vocabulary=1000, rollouts=2, max_tokens=100),
                condemned=self._deaths.reason,
            ),
            judge=make_judge([_reject_zero], drop_older_than=MAX_LAG + 1),
            groups=B,
            window=WINDOW,
            max_lag=MAX_LAG,
            max_refills=1000,
            stall_s=90.0,
        )

    def _decode(self, frame: bytes) -> Group:
        group = decode_group(frame, KEY)
        self._decoded.append((group, frame))
        return group

    def run(self) -> None:
        """Until the file `finish` is there, and one step longer."""
        self._publish(self._intake.recover)
        finish = self._place.directory / FINISH
        is_last = False
        try:
            while not is_last:
                is_last = finish.exists()
                if is_last:
                    self._intake.window = 1  # strict order: what is consumed in the end is 1..N
                self._train(self._collect())
                self._publish(self._intake.open)
                if is_last or self._is_overdue or self.version % EVERY == 0:
                    while not (is_saved := self._save()) and is_last:
                        time.sleep(0.1)
                    self._is_overdue = not is_saved
            self._intake.buffer.close()
        except BaseException as error:
            self._hub.stop(repr(error), farewell=isinstance(error, NOT_FIXED_BY_A_RESTART))
            raise
        self._hub.stop("the training is done")

    def _collect(self) -> Collected:
        while (collected := self._intake.poll(self.version, wait_s=0.5)) is None:
            self._hub.check()
            progress.beat()
            self._watch.audit()
            if self._watch.is_recovery_due():
                self._intake.recover(self.version)
            self._record.renew(replace(self._stored, control_endpoint=self._hub.endpoint))
        return collected

    def _train(self, collected: Collected) -> None:
        progress.begin("step")
        # Not by ticket: a refused frame may say any.
        frame_of = {id(group): frame for group, frame in self._decoded}
        frames = {group.ticket_id: frame_of[id(group)] for group in collected.groups}
        self._deaths.begin(self.version, list(frames.values()))
        time.sleep(0.005)
        doom(self._place.directory, "step", frames)
        ledger: Any = self._intake.ledger
        self._weights.train(
            {
                "version": self.version,
                "takes": ledger.current,
                "trained": [(ticket_id, digest(frame)) for ticket_id, frame in frames.items()],
                "rejected": [(group.ticket_id, reason) for group, reason in collected.rejected],
            }
        )
        ledger.current = []
        self._decoded.clear()
        self._deaths.end(self.version)
        self.version += 1
        self._say("step", version=self.version, last=max(frames))

    def _publish(self, announce: Callable[[int], None]) -> None:
        self._orders.announce(self.version)
        self._hub.announce(self.version)
        announce(self.version)

    def _save(self) -> bool:
        state = {"version": self.version, "ledger": self._intake.settled}
        try:
            oldest = self._checkpoints.state(self._checkpoints.save(self.version, self._weights, state))[
                "ledger"
            ]
        except CheckpointError:
            log.exception("step %d is not saved", self.version)
            return False
        self._intake.commit(oldest, self.version)
        return True

    def _say(self, event: str, **values: Any) -> None:
        self._lines.write(
            json.dumps({"at_s": time.monotonic(), "pid": os.getpid(), "event": event, **values})
        )


def _reject_zero(outcome: GroupOutcome) -> str | None:
    return "zero_reward" if not any(outcome.rewards) else None


def learner(place: Place, name: str, checkpoints: Path) -> None:
    """Holds the run's lock: one file on each host."""
    with RunLock(checkpoints.with_suffix(".lock")):
        Learner(place, checkpoints).run()
