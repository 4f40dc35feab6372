"""Processes of a run without models: shipped loops, protocol, control plane, checkpoints; a toy engine, a hash for weights."""

import asyncio
import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from asyncrl import progress
from asyncrl.algo.filters import GroupOutcome
from asyncrl.algo.trainable import GroupLimits
from asyncrl.buffer.base import BufferRules, PutOutcome
from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.gate import Gate
from asyncrl.buffer.intake import Collected, Intake, make_judge
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.redis import RedisBuffer
from asyncrl.buffer.run_record import RunRecord, StoredRun
from asyncrl.config.schema import ControlConfig
from asyncrl.control.base import Hello
from asyncrl.control.client import ControlClient
from asyncrl.control.zmq import ControlHub
from asyncrl.engine.base import SamplingSpec
from asyncrl.engine.fake import FakeEngine, logits_of, logprobs_of
from asyncrl.engine.sampler import Sampler
from asyncrl.errors import RewardError
from asyncrl.generator import Generator, GeneratorSettings, Lane
from asyncrl.launch.keys import RunKeys
from asyncrl.launch.roles import NOT_MENDED_BY_A_RESTART, run_role
from asyncrl.rewards.base import RewardInput, Score
from asyncrl.trainer.checkpoint import CheckpointStore
from asyncrl.trainer.files import RunLock
from asyncrl.types import Group, Prompt
from asyncrl.weights.base import Sent, UpdateOrder
from asyncrl.wire.decoder import GroupDecoder
from asyncrl.wire.schema import decode_group

from .helpers import CoreEngine
from .hosts import move_to
from .lineage import FoldedWeights, digest

RUN, KEY, PROBE = "chaos", b"key", (1, 2, 3, 4)
KEYS = RunKeys(bytes(32))
"""Between hosts."""
B, MAX_LAG, WINDOW, EVERY, KEEP = 8, 2, 8, 5, 2
RULES = BufferRules(groups=B, lease_s=2.0)
CONTROL = ControlConfig(heartbeat_s=0.25, timeout_s=1.5)
"""Four and ten times faster than the defaults, so that a minute holds more faults."""
RETRY_S = 60.0
FRAME_S = 2.0
HELPERS = {"decoder": ("learner", "decoder_process"), "engine core": ("generator", "os.read(0, 1)")}
"""Kind of process: whose child it is, and what its command line has."""
JOIN_S = 10.0
"""A generator that comes when the run is just over finds nobody for so long."""
FINISH = "finish"
"""A file: the learner's next step is its last."""
EVENTS = "events.jsonl"


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
    """Processes of their own for the engine's core and for decoding."""

    def connect(self) -> StoreConnection:
        return StoreConnection(self.store, password=self.password, retry_s=RETRY_S)


def start(role: Callable[..., None], place: Place, name: str, signs: str, *arguments: Any) -> None:
    """What a forked process does: its own network and log, its place on the board `signs`, the exit status of a shipped role."""
    os.environ |= progress.variable(os.open(signs, os.O_RDWR), 0)
    if place.network is not None:
        move_to(place.network)
    log = os.open(place.directory / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {os.getpid()} %(levelname)s %(message)s", force=True)
    run_role(lambda: role(place, name, *arguments))


class Lines:
    """Appends whole lines to a file that several processes share. `time.monotonic` is one clock for all of them."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, line: str) -> None:
        os.write(self._file, line.encode() + b"\n")


# --- generator -------------------------------------------------------------------------------------------------------


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
        return [Score(total=float(len(one.response) % 5), parts={"toy": float(len(one.response) % 5)}) for one in inputs]

    async def close(self) -> None: ...


class Nowhere:
    """A tracker and a staging without work."""

    def log(self, *_: Any, **__: Any) -> None: ...
    def samples(self, *_: Any) -> None: ...
    def close(self) -> None: ...

    def stage(self, order: UpdateOrder) -> UpdateOrder:
        return order


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
    engine, incarnation = await _engine(place, seed), uuid.uuid4().hex[:12]
    buffer = WatchedBuffer(place.connect(), RUN, RULES)
    buffer.lines = Lines(place.directory / f"put-{name}-{incarnation}.txt")
    lane = Lane(
        name="train",
        buffer=buffer,
        prompt=lambda ticket_id: Prompt(token_ids=(ticket_id % 16,), text="", row={}),
        spec=SamplingSpec(temperature=1.0, max_response_tokens=8),
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
        sampler=Sampler(engine, Rewards(), lambda ids: "x" * len(ids), name),
        staging=Nowhere(),
        control=control,
        tracker=Nowhere(),
        settings=GeneratorSettings(
            max_running=12, lease_s=RULES.lease_s, heartbeat_s=CONTROL.heartbeat_s, probe_limit=1e-3, wire_key=KEY
        ),
    ).run(Hello(generator_id=name, incarnation=incarnation, release="r", config_hash="c", version=0, pid=os.getpid()))


# --- learner ---------------------------------------------------------------------------------------------------------


class OrdersOnly:
    """A publisher whose weights follow from the version, and the sender of every generator."""

    one_host = True

    def __init__(self) -> None:
        self.order: UpdateOrder | None = None

    def announce(self, version: int) -> None:
        logprobs = logprobs_of(logits_of(version))[list(PROBE[1:])]
        self.order = UpdateOrder(
            version=version,
            transport="disk",
            deadline_s=5.0,
            details={},
            probe_ids=PROBE,
            probe_logprobs=tuple(map(float, logprobs)),
        )

    def publish(self, *_: Any) -> float:
        raise NotImplementedError("weights follow from the version")

    def open_sender(self, workers: int) -> "OrderSender":
        return OrderSender(self)

    def close(self) -> None: ...


class OrderSender:
    """Answers at once, through a pipe, because the hub waits for something readable."""

    def __init__(self, publisher: OrdersOnly) -> None:
        self._publisher = publisher
        self._readable, self._writable = os.pipe()
        self._replies: list[UpdateOrder | Sent] = []

    def fileno(self) -> int:
        return self._readable

    def prepare(self, transport: str) -> bool:
        if self._publisher.order is not None:
            self._reply(self._publisher.order)
        return self._publisher.order is not None

    def transfer(self) -> None:
        self._reply(Sent(seconds=0.0))

    def _reply(self, reply: UpdateOrder | Sent) -> None:
        self._replies.append(reply)
        os.write(self._writable, b"x")

    def replies(self) -> list[Any]:
        if self._replies:
            os.read(self._readable, 4096)
        replies, self._replies = self._replies, []
        return replies

    def restart(self) -> None:
        self.replies()

    def close(self) -> None:
        os.close(self._readable)
        os.close(self._writable)


@dataclass(slots=True)
class WatchedLedger(Ledger):
    """Keeps the ids of the takes of the current step."""

    current: list[tuple[int, ...]] = field(default_factory=list)
    on_take: Callable[[], None] = lambda: None

    def consume(self, ids: tuple[int, ...]) -> None:
        Ledger.consume(self, ids)
        self.current.append(ids)
        self.on_take()


class Learner:
    """Takes, trains, publishes, saves, commits, in the order of asyncrl.learner and asyncrl.launch.head."""

    def __init__(self, place: Place, checkpoints: Path) -> None:
        self._place = place
        self._lines = Lines(place.directory / EVENTS)
        self._weights = FoldedWeights(place.directory / "manifests")
        self._checkpoints = CheckpointStore(checkpoints, KEY, KEEP)
        state = self._checkpoints.load(self._weights) or {"version": 0, "ledger": Ledger().to_dict()}
        self.version: int = state["version"]
        self._contents: dict[int, str] = {}
        self._decoder = GroupDecoder(KEY, frame_s=FRAME_S) if place.has_helpers else None
        connection = place.connect()
        self._record = RunRecord(connection, KEY)
        self._stored = StoredRun(name=RUN, config_json="{}", config_hash="c", release="r", key_id="k")
        self._record.claim(self._stored, fresh=self.version == 0)
        self._intake = self._make_intake(RedisBuffer(connection, RUN, RULES), state["ledger"])
        self._orders = OrdersOnly()
        self._hub = ControlHub(
            place.control,
            self._orders,
            CONTROL,
            transport="disk",
            deadline_s=5.0,
            release="r",
            config_hash="c",
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
            gate=Gate(lane="train", decode=self._decode, limits=GroupLimits(vocabulary=1000, rollouts=2, max_tokens=100)),
            judge=make_judge([_reject_zero], drop_older_than=MAX_LAG + 1),
            groups=B,
            window=WINDOW,
            max_lag=MAX_LAG,
            max_refills=1000,
            stall_s=90.0,
        )

    def _decode(self, frame: bytes) -> Group:
        group = self._decoder.decode(frame) if self._decoder else decode_group(frame, KEY)
        self._contents[group.ticket_id] = digest(frame)
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
                if is_last or self.version % EVERY == 0:
                    self._save()
            self._intake.buffer.close()
        except BaseException as error:
            self._hub.stop(repr(error), farewell=isinstance(error, NOT_MENDED_BY_A_RESTART))
            raise
        self._hub.stop("the training is done")

    def _collect(self) -> Collected:
        while (collected := self._intake.poll(self.version, wait_s=0.5)) is None:
            self._hub.check()
            progress.beat()
            self._record.renew(replace(self._stored, control_endpoint=self._hub.endpoint))
        return collected

    def _train(self, collected: Collected) -> None:
        progress.begin("step")
        time.sleep(0.005)
        ledger = self._intake.ledger
        self._weights.train(
            {
                "version": self.version,
                "takes": ledger.current,
                "trained": [(group.ticket_id, self._contents.pop(group.ticket_id)) for group in collected.groups],
                "rejected": [(group.ticket_id, reason) for group, reason in collected.rejected],
            }
        )
        ledger.current = []
        self._contents.clear()
        self.version += 1
        self._say("step", version=self.version)

    def _publish(self, announce: Callable[[int], None]) -> None:
        self._orders.announce(self.version)
        self._hub.announce(self.version)
        announce(self.version)

    def _save(self) -> None:
        state = {"version": self.version, "ledger": self._intake.settled.to_dict()}
        oldest = self._checkpoints.state(self._checkpoints.save(self.version, self._weights, state))["ledger"]
        self._intake.commit(oldest["takes"], oldest["chain"], self.version)

    def _say(self, event: str, **values: Any) -> None:
        self._lines.write(json.dumps({"at_s": time.monotonic(), "pid": os.getpid(), "event": event, **values}))


def _reject_zero(outcome: GroupOutcome) -> str | None:
    return "zero_reward" if not any(outcome.rewards) else None


def learner(place: Place, name: str, checkpoints: Path) -> None:
    """Holds the run's lock: one file on each host."""
    with RunLock(checkpoints.with_suffix(".lock")):
        Learner(place, checkpoints).run()
