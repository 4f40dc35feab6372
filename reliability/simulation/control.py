"""The control plane: the shipped hub and client under the virtual clock, over a wire that loses, delays and
repeats messages.

Strangers speak too. What stands in: sockets, threads, and the publisher of weights.
"""

from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import zmq

from asyncrl.control import client as client_module
from asyncrl.control import zmq as hub_module
from asyncrl.control.base import Heartbeat, Hello, Leave, Stop, Welcome
from asyncrl.control.client import ControlClient
from asyncrl.control.membership import RunIdentity
from asyncrl.control.messages import CODEC
from asyncrl.control.zmq import ControlHub
from asyncrl.errors import ControlRefused
from asyncrl.lineage import Weights
from asyncrl.weights.base import UpdateOrder, UpdateReport

from .engine import Engine, Process
from .faults import Faults
from .lane import require
from .violation import Violation

if TYPE_CHECKING:
    from .processes import LearnerProcess
    from .world import World

HEARTBEAT_S, TIMEOUT_S, DEADLINE_S = 6.0, 18.0, 5.0
ROUND_S = 1.0
"""The hub's, while nothing happens."""
RECENT = 20
RELEASE, CONFIG_HASH = "1.0", "abc"


def finish(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """What it returns; all that it waits for waits in virtual time."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise Violation("a coroutine waits for asyncio")


class Inbox:
    """Messages of one end, for a thread that waits for them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.messages: deque[Any] = deque()
        self._answer: Callable[[float, Any], None] | None = None

    def put(self, message: Any) -> None:
        self.messages.append(message)
        self.wake()

    def wake(self) -> None:
        if self._answer is not None:
            self._answer(0.0, None)

    def wait(self, seconds: float) -> None:
        if not self.messages:
            answer, wait = self._engine.wait()
            self._answer = answer
            self._engine.at(max(seconds, 0.0), lambda: answer(0.0, None))
            wait()
            self._answer = None

    def get(self) -> Any:
        """Raises zmq.Again."""
        if not self.messages:
            raise zmq.Again
        return self.messages.popleft()


class Router:
    """The learner's socket."""

    def __init__(self, wire: "Wire", process: Process) -> None:
        self._wire, self.process, self.inbox = wire, process, Inbox(wire.engine)

    def recv_multipart(self, flags: int) -> tuple[bytes, bytes]:
        peer, data = self.inbox.get()
        return peer, data

    def send_multipart(self, frames: list[bytes], flags: int) -> None:
        if not self._wire.to_generator(self, *frames):
            raise zmq.ZMQError(zmq.EHOSTUNREACH)

    def getsockopt_string(self, option: int) -> str:
        return "virtual"


class Dealer:
    """A generator's socket."""

    def __init__(self, wire: "Wire", process: Process, peer: bytes) -> None:
        self._wire, self.process, self.peer, self.inbox = wire, process, peer, Inbox(wire.engine)
        self.last_arrival_s = 0.0
        self.is_sign = False
        """What is sent next is a sign of life."""

    async def send(self, data: bytes, flags: int) -> None:
        if not self._wire.has_learner:
            raise zmq.Again
        self._wire.to_learner(self.peer, data, is_sign=self.is_sign)

    async def poll(self, milliseconds: float) -> bool:
        self.inbox.wait(milliseconds / 1000)
        return bool(self.inbox.messages)

    async def recv(self, flags: int) -> bytes:
        data: bytes = self.inbox.get()
        return data

    def close(self, linger: int = 0) -> None:
        """Nothing: who dies is not reached any more."""


class Wire:
    """Between all generators and the learner that listens. Learner to generator: in order, or not at all."""

    def __init__(self, engine: Engine, faults: Faults) -> None:
        self.engine, self._faults = engine, faults
        self.learner: Process | None = None
        """That came last."""
        self.router: Router | None = None
        """Its socket."""
        self.dealers: dict[bytes, Dealer] = {}
        self.heard_at_s: dict[bytes, float] = {}
        """Peer -> when its own sign of life has last arrived."""
        self._recent: deque[tuple[bytes, bytes]] = deque(maxlen=RECENT)

    @property
    def has_learner(self) -> bool:
        return self.router is not None and self.router.process.is_alive

    def listen(self, process: Process) -> Router:
        router = Router(self, process)
        if process is self.learner:  # else another has its place, and generators have gone there
            self.router = router
            self._recent.clear()
        return router

    def connect(self, process: Process) -> Dealer:
        peer = b"%032x" % self.engine.random.getrandbits(128)
        self.dealers[peer] = Dealer(self, process, peer)
        return self.dealers[peer]

    def to_learner(self, peer: bytes, data: bytes, *, is_sign: bool) -> None:
        random, faults, router = self.engine.random, self._faults, self.router
        if faults.strikes("lost_message"):
            return

        def deliver(peer: bytes, data: bytes, *, is_sign: bool = False) -> None:
            if router is self.router:  # what is under way ends with its connection
                self.arrive(peer, data, is_sign=is_sign)

        self._recent.append((peer, data))
        delay_s = random.expovariate(1 / 0.005)
        if faults.strikes("late_message"):
            delay_s = random.uniform(0.0, random.choice([1.0, 10.0, 60.0]))
        self.engine.at(delay_s, lambda: deliver(peer, data, is_sign=is_sign))
        if faults.strikes("repeated_message"):
            again, longest_s = random.choice(self._recent), random.choice([1.0, 10.0, 120.0])
            self.engine.at(random.uniform(0.0, longest_s), lambda: deliver(*again))

    def arrive(self, peer: bytes, data: bytes, *, is_sign: bool = False) -> None:
        if self.has_learner:
            assert self.router is not None
            if is_sign:
                self.heard_at_s[peer] = self.engine.now_s
            self.router.inbox.put((peer, data))

    def to_generator(self, router: Router, peer: bytes, data: bytes) -> bool:
        dealer = self.dealers.get(peer)
        if router is not self.router or dealer is None or not dealer.process.is_alive:
            return False
        random, now_s = self.engine.random, self.engine.now_s
        if self._faults.strikes("lost_order"):
            return True
        delay_s = (
            random.uniform(0.0, random.choice([2.0, 30.0])) if self._faults.strikes("late_order") else 0.005
        )
        dealer.last_arrival_s = max(dealer.last_arrival_s, now_s + delay_s)
        for _ in range(2 if self._faults.strikes("repeated_order") else 1):
            self.engine.at(dealer.last_arrival_s - now_s, lambda: self._deliver(router, dealer, data))
        return True

    def _deliver(self, router: Router, dealer: Dealer, data: bytes) -> None:
        if router is self.router:  # else the connection is another
            dealer.inbox.put(data)


@dataclass(slots=True, eq=False)
class Update:
    """One version that one generator is told to read."""

    serial: int
    learner: Process
    is_pinned: bool = True

    @property
    def is_safe(self) -> bool:
        """Nothing is written over it yet."""
        return self.is_pinned and self.learner.is_alive


class Orders:
    """In the place of the shipped publisher."""

    one_host = True

    def __init__(self, world: "World", learner: "LearnerProcess") -> None:
        self._world, self._learner = world, learner
        self.pinned: dict[str, Update] = {}
        """By reader."""

    def order(self, reader: str, transport: str) -> UpdateOrder | None:
        self.release(reader)
        newest, world = self._learner.published, self._world
        if newest is None or world.faults.strikes("failed_transfer"):
            return None  # in the second case, a copy of it is being made
        if world.faults.strikes("failed_transfer", share=0.5):
            raise OSError("cannot")
        update, number = Update(newest.serial, self._learner.process), world.next_number()
        self.pinned[reader] = world.updates[number] = update
        return UpdateOrder(
            version=newest.weights.version, transport=transport, deadline_s=DEADLINE_S, details={"update": number},
            probe_ids=((),), probe_logprobs=(), initial_logprobs=(), history=str(newest.history),
        )  # fmt: skip

    def release(self, reader: str) -> None:
        if update := self.pinned.pop(reader, None):
            update.is_pinned = False


class Hub(ControlHub):
    """The shipped one, and what must hold after each of its rounds."""

    def __init__(self, world: "World", learner: "LearnerProcess") -> None:
        self._world, self._learner = world, learner
        self._orders = Orders(world, learner)
        publisher: Any = self._orders
        config: Any = SimpleNamespace(heartbeat_s=HEARTBEAT_S, timeout_s=TIMEOUT_S)
        super().__init__(
            "virtual", publisher, config, RunIdentity(release=RELEASE, config_hash=CONFIG_HASH),
            transport="tcp", deadline_s=DEADLINE_S, on_dead=learner.buffer.revoke,
        )  # fmt: skip

    def _wait(self) -> None:
        self._inbox.wait(ROUND_S)

    def _wake_up(self) -> None:
        self._inbox.wake()

    @property
    def _inbox(self) -> Inbox:
        router: Any = self._router
        inbox: Inbox = router.inbox
        return inbox

    def _round(self) -> None:
        before = {
            member.holder: self._peers.peer(member.holder) for member in self._membership.members.values()
        }
        super()._round()
        self._check_pins()
        router: Any = self._router
        if self._world.wire.router is not router:
            return
        living = {one.process.name: one for one in self._world.generators.values() if one.process.is_alive}
        now_members = {member.holder for member in self._membership.members.values()}
        for holder, peer in before.items():
            dealer = self._world.wire.dealers.get(peer or b"")
            if dealer is None or holder not in living or dealer.process is not living[holder].process:
                continue  # dead, or a stranger that was first with its name
            if holder not in now_members and not living[holder].is_leaving:
                silent_s = self._world.engine.now_s - self._world.wire.heard_at_s.get(dealer.peer, 0.0)
                require(
                    silent_s > HEARTBEAT_S, "a member was thrown out that had just spoken", holder, silent_s
                )
        for holder in self._schedule.members.keys() & living.keys():
            self._check_weights(holder, living[holder].published.weights)

    def _check_pins(self) -> None:
        """What nobody reads must not stay pinned, and what is read must."""
        updating = {holder for holder, member in self._schedule.members.items() if member.order is not None}
        pinned = self._orders.pinned.keys()
        require(pinned == updating, "other versions are pinned than are read", pinned, updating)

    def _check_weights(self, holder: str, truth: Weights) -> None:
        member = self._schedule.members[holder]
        if member.order is None and (believed := member.version) >= 0:
            # A history forgets what is old.
            name = self._learner.history.weights(believed) if believed else Weights(0)
            require(
                name == truth, "the learner believes that a generator has other weights", holder, name, truth
            )


class Client(ControlClient):
    """The shipped one, driven by threads of the simulation."""

    def __init__(self, world: "World", process: Process) -> None:
        super().__init__("virtual", heartbeat_s=HEARTBEAT_S, timeout_s=TIMEOUT_S)
        self._world, self._process = world, process
        self._orders = Inbox(world.engine)
        self.welcome: Future[Welcome] = Future()

    def _connect(self) -> None:
        dealer: Any = self._world.wire.connect(self._process)
        self._socket = dealer

    def serve(self, hello: Hello) -> None:
        """What `join` starts as a task."""
        answer: Any = self.welcome
        self._hello, self._heard_at_s, self._answer = hello, self._world.engine.now_s, answer
        self._connect()
        finish(self._serve())

    async def _send(self, message: Any) -> bool:
        dealer: Any = self._socket
        dealer.is_sign = isinstance(message, Hello | Heartbeat)
        return await super()._send(message)

    def _put(self, order: UpdateOrder | Stop) -> None:
        super()._put(order)
        self._orders.wake()

    def wait_for_order(self) -> UpdateOrder | Stop:
        while not self._arrived.is_set():
            self._orders.wait(60.0)
        order: UpdateOrder | Stop = finish(self.next_order())
        return order

    def tell(self, report: UpdateReport) -> None:
        finish(self.report(report))

    def say_goodbye(self) -> None:
        """What `leave` says."""
        assert self._hello is not None
        if self._is_member:
            finish(
                self._send(Leave(generator_id=self._hello.generator_id, incarnation=self._hello.incarnation))
            )


def join(client: Client, engine: Engine) -> bool:
    """Whether the learner lets it in."""
    while not client.welcome.done():
        engine.sleep(0.5)
    return not isinstance(client.welcome.exception(), ControlRefused)


def strange_message(world: "World") -> None:
    """From somebody who knows the names in the leases, or a member that says what it may not."""
    random, generator = world.engine.random, world.any_generator()
    generator_id, _, incarnation = generator.process.name.partition(":")
    newest = world.published.weights
    mine: dict[str, Any] = {"generator_id": generator_id, "incarnation": incarnation}
    hello: dict[str, Any] = {"release": RELEASE, "config_hash": CONFIG_HASH, "version": newest.version}
    message = random.choice(
        [
            Heartbeat(**mine, version=newest.version, state="sampling"),
            Leave(**mine),
            Leave(**mine),
            Hello(**mine, **hello),
            Hello(**mine | {"incarnation": "other"}, **hello),
            Hello(generator_id=f"x{random.randrange(5)}", incarnation="x", **hello),
            Hello(generator_id="y", incarnation="y", **hello | {"release": "2.0"}),
            UpdateReport(version=newest.version, lineage=newest.lineage + 1, applied=True),
            UpdateReport(version=newest.version + 1, lineage=newest.lineage, applied=True),
            Stop(reason="stop"),
            None,
        ]
    )
    data = CODEC.encode(message) if message else b"garbage"
    peers = [peer for peer, dealer in world.wire.dealers.items() if dealer.process is not generator.process]
    is_member = peers and random.random() < 0.5
    if isinstance(message, UpdateReport) and random.random() < 0.8:
        peers, is_member = list(world.wire.dealers), True
    world.wire.arrive(random.choice(peers) if is_member else b"stranger", data)


class _Thread:
    """In the place of threading.Thread, within the simulated process that starts it."""

    def __init__(self, engine: Engine, target: Callable[[], None]) -> None:
        self._engine, self._target, self._is_over = engine, target, False

    def start(self) -> None:
        self._engine.start(self._engine.process, self._run)

    def _run(self) -> None:
        self._target()
        self._is_over = True

    def join(self, timeout: float) -> None:
        until_s = self._engine.now_s + timeout
        while self.is_alive() and self._engine.now_s < until_s:
            self._engine.sleep(0.2)

    def is_alive(self) -> bool:
        return not self._is_over


@contextmanager
def virtual_control(engine: Engine, wire: Wire) -> Iterator[None]:
    """Let the shipped modules use simulated sockets and threads."""

    async def sleep(seconds: float) -> None:
        engine.sleep(seconds)

    def start(work: Callable[..., None], *arguments: Any) -> None:
        engine.start(engine.process, lambda: work(*arguments))

    nobody = mock.MagicMock()
    executor = SimpleNamespace(submit=start, shutdown=lambda wait: None)
    real: Any = hub_module
    sockets = SimpleNamespace(
        Again=zmq.Again, ZMQError=zmq.ZMQError, NOBLOCK=zmq.NOBLOCK, EHOSTUNREACH=zmq.EHOSTUNREACH,
        LAST_ENDPOINT=zmq.LAST_ENDPOINT,
    )  # fmt: skip
    replaced = {
        "listen": lambda endpoint, keys: (wire.listen(engine.process), lambda linger_ms: None),
        "threading": SimpleNamespace(Thread=lambda target, name, daemon: _Thread(engine, target)),
        "ThreadPoolExecutor": lambda workers, thread_name_prefix: executor,
        "socket": SimpleNamespace(socketpair=lambda: (nobody, nobody)),
        "zmq": sockets,
    }
    with ExitStack() as stack:
        for name, new in replaced.items():
            stack.enter_context(mock.patch.object(real, name, new))
        asyncio: Any = client_module
        namespace = SimpleNamespace(sleep=sleep, Event=asyncio.asyncio.Event)
        stack.enter_context(mock.patch.object(client_module, "asyncio", namespace))
        yield
