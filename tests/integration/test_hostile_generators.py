"""A hostile generator with the run's keys: whatever it sends, the control thread serves the others."""

import contextlib
import math
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import msgpack
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.sections import ControlConfig
from asyncrl.control import zmq as hub_module
from asyncrl.control.base import Heartbeat, Hello, Leave, Refused, Stop, Welcome
from asyncrl.control.membership import MAX_MEMBERS, Budget, RunIdentity
from asyncrl.control.messages import CODEC, MAX_ORDER_BYTES, UnknownMember
from asyncrl.control.sockets import present_keys, set_options
from asyncrl.control.zmq import MAX_GREETED, ControlHub
from asyncrl.errors import ControlError
from asyncrl.hosting import progress as progress_module
from asyncrl.run.keys import RunKeys
from asyncrl.weights.base import MEASUREMENTS, UpdateOrder, UpdateReport
from asyncrl.wire.codec import MESSAGE_LIMITS, encode_frame
from tests.support.waiting import wait_until

pytestmark = pytest.mark.integration

KEYS = RunKeys(bytes(range(32)))
WIRE = KEYS.join.wire
REPORT = {"version": 1, "applied": True, "reason": "", **dict.fromkeys(MEASUREMENTS, 0.0)}


class Publisher:
    """It has no version to send, and knows who asked for one."""

    one_host = True

    def __init__(self):
        self.asked = set()

    def order(self, reader, transport):
        self.asked.add(reader)

    def release(self, reader): ...


class Caller:
    """Speaks to the hub as it likes."""

    def __init__(self, hub, name="a", incarnation="1", identity=None):
        self.name, self.incarnation = name, incarnation
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        set_options(self.socket, max_bytes=MAX_ORDER_BYTES)
        if hub.endpoint.startswith("tcp://"):
            present_keys(self.socket, KEYS.join.control)
        if identity:
            self.socket.setsockopt(zmq.IDENTITY, identity)
        self.socket.connect(hub.endpoint)

    def hello(self, **changes):
        values = {"release": "1.0", "config_hash": "abc", "version": 0, "transports": ("tcp",)} | changes
        return Hello(**{"generator_id": self.name, "incarnation": self.incarnation} | values)

    def beat(self, state="sampling", **changes):
        return Heartbeat(
            **{"generator_id": self.name, "incarnation": self.incarnation, "version": 0, "state": state}
            | changes
        )

    def say(self, message):
        self.socket.send(CODEC.encode(message, WIRE))

    def say_raw(self, kind, fields):
        """Authentic, and not what an honest process could send."""
        self.socket.send(
            encode_frame(MESSAGE_LIMITS, {"message": {"type": kind, "fields": fields}}, {}, key=WIRE)
        )

    def hear(self, wait_ms=10_000):
        return CODEC.decode(self.socket.recv(), WIRE) if self.socket.poll(wait_ms) else None

    def join(self):
        self.say(self.hello())
        assert isinstance(self.hear(), Welcome)
        self.say(self.beat())
        assert isinstance(self.hear(), Welcome)

    def close(self):
        self.context.destroy(linger=0)


class Stage:
    def __init__(self, tmp_path):
        self.publisher, self.reports, self.dead, self.callers = Publisher(), [], [], []
        self.told = lambda name, report: self.reports.append((name, report))
        self.hub = ControlHub(
            f"ipc://{tmp_path}/c.sock",
            self.publisher,
            ControlConfig(heartbeat_s=0.2, timeout_s=60.0),
            RunIdentity(release="1.0", config_hash="abc"),
            transport="tcp",
            deadline_s=5.0,
            wire_key=WIRE,
            keys=KEYS.control,
            on_dead=self.dead.append,
            on_report=lambda name, report: self.told(name, report),
        )

    def caller(self, *args, **options):
        self.callers.append(Caller(self.hub, *args, **options))
        return self.callers[-1]

    def close(self):
        for caller in self.callers:
            caller.close()
        self.hub.stop("test is over", farewell=False)

    def members(self):
        return {member.generator_id: member for member in self.hub.members()}

    def wait_for(self, condition):
        wait_until(condition, seen=lambda: (self.hub.counters(), self.hub.members()))

    def rejected(self):
        return self.hub.counters()["messages_rejected"]

    def check_alive(self):
        """Somebody else is heard, and answered."""
        self.hub.check()
        other = self.caller(f"honest{len(self.callers)}")
        other.join()
        other.say(Leave(generator_id=other.name, incarnation=other.incarnation))


@pytest.fixture
def stage(tmp_path):
    made = Stage(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize(
    "wrong",
    [
        *({name: value} for name in MEASUREMENTS for value in (math.nan, math.inf, -math.inf, -1.0, 1e300)),
        {"version": 2**63},
        {"version": -(2**60)},
        {"version": math.nan},
    ],
    ids=str,
)
def test_a_report_with_an_impossible_number_reaches_nobody(stage, wrong):
    member = stage.caller()
    member.join()
    member.say_raw("UpdateReport", REPORT | wrong)
    stage.wait_for(lambda: stage.rejected() == 1)
    assert stage.reports == []
    member.say_raw("UpdateReport", REPORT)
    stage.wait_for(lambda: len(stage.reports) == 1)
    stage.check_alive()


def test_who_is_no_member_reports_nothing_and_says_no_goodbye(stage):
    stranger = stage.caller("stranger")
    stranger.say_raw("UpdateReport", REPORT)
    stage.wait_for(lambda: stage.rejected() == 1)
    for message in (stranger.beat(), Leave(generator_id="stranger", incarnation="1")):
        stranger.say(message)
        assert isinstance(stranger.hear(), UnknownMember)
    assert stage.reports == [] and stage.members() == {} and stage.hub.counters()["left"] == 0


@pytest.mark.parametrize("identity", [None, b"a:1", b"a"])
def test_nobody_speaks_for_another_whose_name_it_has_read(stage, identity):
    victim = stage.caller("a", "1", identity=os.urandom(16).hex().encode())
    victim.join()
    impostor = stage.caller("a", "1", identity=identity)
    lies = [
        Leave(generator_id="a", incarnation="1"),
        impostor.beat(state="dirty", version=7),
        impostor.hello(),
        UpdateReport(version=1, applied=False, reason="a lie"),
    ]
    for sent, lie in enumerate(lies, 1):
        impostor.say(lie)
        stage.wait_for(lambda sent=sent: stage.rejected() == sent)
    assert stage.reports == [] and stage.dead == []
    assert stage.members()["a"].state == "sampling" and stage.members()["a"].version == 0
    # Nor does it get what is meant for the other: a member's welcome goes to the member.
    victim.say(victim.beat())
    assert isinstance(victim.hear(), Welcome)
    assert impostor.hear(wait_ms=300) is None
    # And a member does not change its name.
    impostor.name = "b"
    impostor.join()
    impostor.name = "a"
    impostor.say(impostor.beat())
    stage.wait_for(lambda: stage.rejected() == len(lies) + 1)


def test_hellos_alone_get_no_weights(stage):
    stage.hub.announce(1)
    callers = [stage.caller(f"g{i}") for i in range(MAX_GREETED + 20)]
    for caller in callers:
        caller.say(caller.hello())
    stage.wait_for(lambda: stage.rejected() == 20)
    assert not stage.publisher.asked
    assert len(stage.members()) == MAX_GREETED
    # Who speaks again makes room for one more.
    welcomed = [caller for caller in callers if caller.hear(wait_ms=200)]
    assert len(welcomed) == MAX_GREETED
    welcomed[0].say(welcomed[0].beat())
    assert isinstance(welcomed[0].hear(), Welcome)
    stage.wait_for(lambda: len(stage.publisher.asked) == 1)
    late = next(caller for caller in callers if caller not in welcomed)
    late.join()
    stage.wait_for(lambda: len(stage.publisher.asked) == 2)


def test_more_generators_than_one_learner_serves_are_refused(stage, monkeypatch):
    monkeypatch.setattr("asyncrl.control.membership.MAX_MEMBERS", 2)
    for name in "ab":
        stage.caller(name).join()
    third = stage.caller("c")
    third.say(third.hello())
    answer = third.hear()
    assert isinstance(answer, Refused) and "2 generators" in answer.reason
    assert MAX_MEMBERS >= 1000


def test_a_flood_costs_its_sender_only(stage):
    member, flooder = stage.caller("m"), stage.caller("f")
    for caller in (member, flooder):
        caller.join()
    # A slow machine takes fewer messages than the real budgets allow.
    peers, few = (stage.hub._peers, Budget(1.0, 10.0, 10.0))
    peers._budgets[peers.peer("f:1")] = few
    beat = CODEC.encode(flooder.beat(), WIRE)
    for _ in range(5_000):
        with contextlib.suppress(zmq.Again):
            flooder.socket.send(beat, zmq.NOBLOCK)
    stage.wait_for(lambda: stage.rejected() > 0)
    member.say(member.beat(state="updating"))
    stage.wait_for(lambda: stage.members()["m"].state == "updating")
    stage.check_alive()
    stranger = stage.caller("s")
    hello = CODEC.encode(stranger.hello(release="0.1"), WIRE)
    before = stage.rejected()
    peers._strangers = Budget(1.0, 10.0, 10.0)
    for _ in range(500):
        stranger.socket.send(hello)
    member.say(member.beat(state="sampling"))
    stage.wait_for(lambda: stage.members()["m"].state == "sampling")
    stage.wait_for(lambda: stage.rejected() > before)
    stage.hub.check()


def test_a_listener_that_breaks_on_a_report_breaks_nothing_else(stage, caplog):
    def broken(name, report):
        raise ZeroDivisionError("telemetry")

    stage.told = broken
    member = stage.caller()
    member.join()
    for _ in range(5):
        member.say_raw("UpdateReport", REPORT)
    stage.wait_for(lambda: stage.rejected() == 5)
    stage.check_alive()
    complaints = [record for record in caplog.records if "rejected" in record.getMessage()]
    assert 1 <= len(complaints) < 5, "what repeats is counted, not told each time"


def test_an_order_that_cannot_be_sent_fails_that_update_only(stage):
    member = stage.caller()
    member.join()
    order = UpdateOrder(
        version=1,
        transport="tcp",
        deadline_s=1.0,
        details={},
        probe_ids=((1, 2),),
        probe_logprobs=(math.nan,),
        initial_logprobs=(0.0,),
    )
    assert stage.hub._send("a:1", order) is False
    stage.check_alive()


fields = st.dictionaries(
    st.sampled_from([*Hello.__slots__, *Heartbeat.__slots__, *REPORT, "reason", "x"]),
    st.one_of(
        st.sampled_from(
            [
                "a",
                "1",
                "abc",
                "1.0",
                "sampling",
                "tcp",
                ["tcp"],
                {},
                {"m": 1.0},
                True,
                0,
                1,
                -1,
                2**53,
                2**64 - 1,
            ]
        ),
        st.floats(),
        st.integers(-(2**63), 2**64 - 1),
        st.text(max_size=8),
        st.binary(max_size=8),
        st.none(),
        st.lists(st.floats(), max_size=3),
        st.dictionaries(st.text(max_size=3), st.floats(), max_size=3),
    ),
    max_size=9,
)


def test_a_pause_of_the_learner_is_nobodys_silence(stage, monkeypatch):
    """Right after it the queue may be empty: what was sent meanwhile has not been read from the sockets."""
    member, ahead_s, patience_s = stage.caller(), [0.0], 3.0
    member.join()
    stage.hub._membership._timeout_s = patience_s
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s[0])
    monkeypatch.setattr(hub_module, "time", clock)
    monkeypatch.setattr(progress_module, "time", clock)

    def pause(seconds):
        before, ahead_s[0] = stage.hub.rounds, ahead_s[0] + seconds
        stage.wait_for(lambda: stage.hub.rounds > before + 2)

    pause(3600.0)
    assert "a" in stage.members() and stage.dead == []
    member.say(member.beat("updating"))
    stage.wait_for(lambda: stage.members()["a"].state == "updating")
    for _ in range(5):  # who is silent while the learner listens is dead
        pause(0.9)
    assert stage.members() == {}
    stage.wait_for(lambda: stage.dead == ["a:1"])


kinds = st.sampled_from(
    [kind.__name__ for kind in (Hello, Heartbeat, Leave, UpdateReport, Welcome, Refused, Stop, UpdateOrder)]
)


def test_no_message_ends_the_control_thread(stage):
    """Authentic frames with whatever in them; half of them whole but for a field."""
    member = stage.caller()
    member.join()
    whole = {
        "Hello": member.hello(),
        "Heartbeat": member.beat(),
        "Leave": Leave(generator_id="a", incarnation="1"),
    }
    sent = 0

    @given(kinds, fields, st.booleans())
    def attack(kind, wrong, on_top):
        nonlocal sent
        base = {"UpdateReport": REPORT}.get(kind) or (
            {name: getattr(whole[kind], name) for name in type(whole[kind]).__slots__}
            if kind in whole
            else {}
        )
        with contextlib.suppress(msgpack.PackException, OverflowError, ValueError):
            member.say_raw(kind, {**base, **wrong} if on_top else wrong)
            sent += 1

    attack()
    assert sent > settings().max_examples / 2  # the others cannot be packed
    stage.check_alive()


IDLE = """
import resource, socket, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (160, 4096))
sys.path[:0] = {paths!r}
import test_hostile_generators as hostile
from asyncrl.control.zmq import ControlHub
hub = ControlHub("tcp://127.0.0.1:*", hostile.Publisher(), hostile.ControlConfig(),
                 hostile.RunIdentity(release="1.0", config_hash="abc"), transport="tcp", deadline_s=5.0, wire_key=hostile.WIRE, keys=hostile.KEYS.control)
print(hub.endpoint, flush=True)
sys.stdin.readline()
open("/dev/null").close()  # the learner's own files, in the middle of it
hub.check()
print("fine", flush=True)
sys.stdin.readline()
hub.stop("over")
"""


def test_idle_connections_of_strangers_take_nothing_that_the_learner_needs():
    """More of them than the process was allowed descriptors; without a word they are dropped by and by."""
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    process = subprocess.Popen(
        [sys.executable, "-c", IDLE.format(paths=paths)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process, contextlib.ExitStack() as idle:
        try:
            host, _, port = process.stdout.readline().strip().removeprefix("tcp://").rpartition(":")
            connections = [
                idle.enter_context(socket.create_connection((host, int(port)), timeout=10))
                for _ in range(400)
            ]
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline().strip() == "fine"
            hub = type("Hub", (), {"endpoint": f"tcp://{host}:{port}"})
            caller = Caller(hub)
            caller.join()
            caller.close()
            for connection in connections:
                connection.settimeout(30)
                while connection.recv(4096):  # the learner's greeting, then the end
                    pass
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.wait(120) == 0
        finally:
            process.kill()


def test_a_hub_says_what_it_cannot_listen_on(stage):
    with pytest.raises(ControlError, match="not an address of one interface"):
        ControlHub(
            "tcp://[::]:0",
            stage.publisher,
            ControlConfig(),
            RunIdentity(release="1.0", config_hash="abc"),
            transport="tcp",
            deadline_s=1.0,
            keys=KEYS.control,
        )
