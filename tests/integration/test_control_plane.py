"""The learner's end in this process, generators in theirs: stopped, killed and replaced."""

import asyncio
import errno
import json
import os
import queue
import signal
import threading
import time

import pytest
import torch
import zmq

from asyncrl.config.addresses import host_of
from asyncrl.config.sections import ControlConfig
from asyncrl.control.base import Heartbeat, Hello, Welcome
from asyncrl.control.client import ControlClient
from asyncrl.control.membership import Membership, RunIdentity
from asyncrl.control.messages import CODEC
from asyncrl.control.zmq import ControlHub
from asyncrl.errors import ControlError
from asyncrl.run.keys import RunKeys
from asyncrl.weights.base import TensorSpec, UpdateOrder, UpdateReport
from asyncrl.weights.layout import Layout
from asyncrl.weights.publisher import SlotPublisher
from tests.support import generator_stand_in
from tests.support import receiver_stand_in as receiving
from tests.support.forks import fork_server
from tests.support.publications import pinned
from tests.support.waiting import LONG_S, elapse, let_pass, stop, until, wait_until

pytestmark = pytest.mark.integration

SMALL = Layout.plan(
    [TensorSpec(name=f"w{i}", dtype="bfloat16", shape=(97, 1 + 5 * i)) for i in range(20)], 20_000
)
LARGE = Layout.plan(
    [TensorSpec(name=f"w{i}", dtype="float32", shape=(1024, 512)) for i in range(24)], 2 << 20
)
"""48 MiB: more than fits into the buffers between two processes."""


def weights(layout, version):
    return [
        (spec.name, torch.full(spec.shape, version % 100, dtype=getattr(torch, spec.dtype)))
        for spec in layout.specs
    ]


def byte_sum(layout, version):
    return sum(
        int(t.reshape(-1).view(torch.uint8).sum(dtype=torch.int64)) for _, t in weights(layout, version)
    )


KEYS = RunKeys(bytes(range(32)))
SKIPPED = {"2": b"\x80"}


class Learner:
    def __init__(
        self,
        directory,
        layout=SMALL,
        *,
        deadline_s=20.0,
        timeout_s=3.0,
        heartbeat_s=0.2,
        endpoint=None,
        transport="slot",
    ):
        self.layout = layout
        self.dead = []
        goes_out = transport == "tcp" or (transport == "nccl" and endpoint)
        self.publisher = SlotPublisher(
            layout,
            probe_ids=((1, 2),),
            initial_logprobs=(0.0,),
            directory=directory / "weights",
            deadline_s=deadline_s,
            interface=host_of(endpoint or "tcp://127.0.0.1:*") if goes_out else None,
        )
        self.hub = ControlHub(
            endpoint or f"ipc://{directory}/c.sock",
            self.publisher,
            ControlConfig(heartbeat_s=heartbeat_s, timeout_s=timeout_s),
            RunIdentity(release="1.0", config_hash="abc"),
            transport=transport,
            deadline_s=deadline_s,
            keys=KEYS.control,
            on_dead=self.dead.append,
        )

    def publish(self, version, *, probe=0.0, announces=True):
        """Seconds that the training loop spends in it."""
        tensors = weights(self.layout, version)
        started_s = time.perf_counter()
        self.publisher.publish(version, tensors, (probe,), SKIPPED).result(LONG_S)
        if announces:
            self.hub.announce(version)
        return time.perf_counter() - started_s

    def close(self):
        self.hub.stop("test is over", farewell=False)
        self.publisher.close()

    def wait_for(self, condition):
        wait_until(
            lambda: condition(self.hub.counters(), {m.generator_id: m for m in self.hub.members()}),
            seen=lambda: (self.hub.counters(), self.hub.members(), pinned(self.publisher)),
        )

    def wait_until_nothing_is_read(self):
        self.wait_for(lambda *_: pinned(self.publisher) == 0)


class Generator:
    def __init__(self, forks, learner, name, **options):
        self.layout = learner.layout
        options = {"secret": KEYS.secret.hex()} | options
        self.output, theirs = forks.Pipe(duplex=False)
        with theirs:
            self.process = forks.Process(
                target=generator_stand_in.work, args=(learner.hub.endpoint, name, options, theirs)
            )
            self.process.start()
        self.lines = queue.Queue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        with open(self.output.fileno(), closefd=False) as lines:
            for line in lines:
                self.lines.put(json.loads(line))

    def expect(self, key, value=None, timeout_s=LONG_S):
        """The next line with `key` (and value); transfers on the way must have been whole."""
        until_s = time.monotonic() + timeout_s
        while True:
            line = self.lines.get(timeout=max(until_s - time.monotonic(), 0.01))
            if "applied" in line:
                assert line["sum"] == byte_sum(self.layout, line["applied"])
            if key in line and (value is None or line[key] == value):
                return line

    def signal(self, number):
        os.kill(self.process.pid, number)

    def close(self):
        self.process.kill()
        self.process.join()
        self.reader.join(LONG_S)
        self.output.close()


@pytest.fixture(scope="module")
def forks():
    with fork_server("tests.support.generator_stand_in") as forks:
        yield forks


@pytest.fixture
def stage(tmp_path, forks):
    learners, generators = [], []

    def learner(*args, **kwargs):
        learners.append(Learner(tmp_path, *args, **kwargs))
        return learners[-1]

    def generator(*args, **kwargs):
        generators.append(Generator(forks, *args, **kwargs))
        return generators[-1]

    yield learner, generator
    for made in generators:
        made.close()
    for made in learners:
        made.close()


@pytest.mark.parametrize(
    "options",
    [{}, *({"endpoint": f"tcp://{host}:*", "transport": "tcp"} for host in ("127.0.0.1", "[::1]"))],
)
def test_generators_follow_the_newest_version_until_they_are_told_to_stop(stage, options):
    make_learner, make_generator = stage
    learner = make_learner(**options)
    learner.publish(0)
    first = make_generator(learner, "a")
    first.expect("joined", 0)
    for version in range(1, 6):
        learner.publish(version)
    first.expect("applied", 5)
    late = make_generator(learner, "b")
    late.expect("joined", 5)
    late.expect("applied", 5)
    learner.wait_for(lambda _, members: {m.version for m in members.values()} == {5} and len(members) == 2)
    counters = learner.hub.counters()
    assert 2 <= counters["updates"] <= 6
    assert (counters["joined"], counters["updates_failed"], counters["probe_max"]) == (2, 0, 0.5)
    learner.hub.stop("enough")
    for generator in (first, late):
        generator.expect("stopped", "enough")
        generator.process.join(LONG_S)
        assert generator.process.exitcode == 0
    assert learner.dead == []


@pytest.mark.parametrize("transport", ["slot", "tcp"])
def test_a_generator_killed_in_mid_transfer_disturbs_nobody_and_its_leases_are_revoked(stage, transport):
    make_learner, make_generator = stage
    learner = make_learner(LARGE, transport=transport)
    well, sick = make_generator(learner, "well"), make_generator(learner, "sick", hang_on=1, incarnation="x")
    for generator in (well, sick):
        generator.expect("joined")
    learner.publish(1)
    sick.expect("hanging", 1)
    well.expect("applied", 1)
    sick.signal(signal.SIGKILL)
    for version in range(2, 6):
        assert learner.publish(version) < 5.0
        well.expect("applied", version)
    learner.wait_for(lambda counters, members: counters["died"] == 1 and list(members) == ["well"])
    learner.wait_for(lambda *_: learner.dead == ["sick:x"])
    learner.wait_until_nothing_is_read()


@pytest.mark.parametrize("transport", ["slot", "tcp"])
def test_a_generator_stopped_in_mid_transfer_disturbs_nobody_and_comes_back(stage, transport):
    make_learner, make_generator = stage
    learner = make_learner(LARGE, deadline_s=8.0, timeout_s=5.0, transport=transport)
    well, sick = make_generator(learner, "well"), make_generator(learner, "sick")
    for generator in (well, sick):
        generator.expect("joined")
    learner.publish(1)
    well.expect("applied", 1)
    sick.expect("applied", 1)
    stop(sick.process.pid)
    for version in range(2, 8):
        assert learner.publish(version) < 5.0
        well.expect("applied", version)
    learner.wait_for(lambda counters, members: counters["died"] == 1 and list(members) == ["well"])
    learner.wait_until_nothing_is_read()
    sick.signal(signal.SIGCONT)
    sick.expect("applied", 7)
    learner.wait_for(lambda counters, members: counters["joined"] == 3 and members["sick"].version == 7)
    assert [holder.split(":")[0] for holder in learner.dead] == ["sick"]


@pytest.mark.parametrize("options", [{}, {"endpoint": "tcp://127.0.0.1:*", "transport": "tcp"}])
def test_a_generator_that_gets_no_core_for_a_second_still_hears_the_farewell(stage, options, caplog):
    make_learner, make_generator = stage
    learner = make_learner(**options)
    generator = make_generator(learner, "a")
    generator.expect("joined")
    learner.wait_for(lambda _, members: list(members) == ["a"])
    stop(generator.process.pid)
    farewell = threading.Thread(target=learner.hub.stop, args=("enough",))
    farewell.start()
    farewell.join(1.0)
    generator.signal(signal.SIGCONT)
    generator.expect("stopped", "enough")
    farewell.join(LONG_S)
    assert "did not answer" not in caplog.text


@pytest.mark.parametrize("transport", ["slot", "tcp"])
def test_a_transfer_that_hangs_is_given_up_and_only_its_generator_waits(stage, transport):
    make_learner, make_generator = stage
    learner = make_learner(LARGE, deadline_s=2.0, transport=transport)
    well, sick = make_generator(learner, "well"), make_generator(learner, "sick", hang_on=1)
    for generator in (well, sick):
        generator.expect("joined")
    learner.publish(1)
    sick.expect("hanging", 1)  # its heartbeats go on
    assert pinned(learner.publisher) >= 1
    learner.wait_for(lambda counters, _: counters["updates_failed"] >= 1)
    learner.wait_until_nothing_is_read()  # until the next attempt
    learner.publish(2)
    well.expect("applied", 2)
    assert {m.generator_id for m in learner.hub.members()} == {"well", "sick"}
    assert learner.dead == []
    learner.wait_for(lambda *_: pinned(learner.publisher) == 1)
    learner.hub.stop("enough")
    learner.wait_until_nothing_is_read()  # after two late transfers a copy for the disk may be under way


def test_after_two_failed_transfers_the_version_comes_by_disk_and_the_next_one_by_slot(stage):
    make_learner, make_generator = stage
    learner = make_learner(deadline_s=4.0)
    generator = make_generator(learner, "a", fail_times=2)
    generator.expect("joined")
    learner.publish(1)
    assert generator.expect("applied", 1)["transport"] == "disk"
    learner.wait_for(lambda counters, _: counters["updates"] == 1)
    assert learner.hub.counters()["updates_failed"] == 2
    learner.publish(2)
    assert generator.expect("applied", 2)["transport"] == "slot"


def test_after_two_failed_transfers_a_version_for_another_host_comes_by_tcp(stage):
    make_learner, make_generator = stage
    learner = make_learner(endpoint="tcp://127.0.0.1:*", transport="nccl")
    generator = make_generator(learner, "a", fail_times=2, transports=["nccl", "tcp", "disk"])
    generator.expect("joined")
    learner.publish(1)
    assert generator.expect("applied", 1)["transport"] == "tcp"
    learner.wait_for(lambda counters, _: counters["updates"] == 1)
    assert learner.hub.counters()["updates_failed"] == 2
    learner.wait_until_nothing_is_read()


def test_a_learner_that_restarts_gets_its_generators_back_and_replaces_their_weights(stage):
    make_learner, make_generator = stage
    learner = make_learner()
    generators = [make_generator(learner, name) for name in "ab"]
    learner.publish(12)
    for generator in generators:
        generator.expect("applied", 12)
    _kill_without_a_word(learner)
    learner = make_learner()
    learner.publish(11)
    for generator in generators:
        generator.expect("applied", 11)
    learner.wait_for(
        lambda counters, members: {m.version for m in members.values()} == {11} and len(members) == 2
    )
    assert learner.hub.counters()["died"] == 0


def test_what_an_earlier_learner_ordered_is_replaced_though_the_generator_has_applied_nothing_yet(stage):
    """It may load those weights after the restarted learner has heard that it has the initial ones."""
    make_learner, _ = stage
    learner = make_learner()
    learner.publish(1)

    async def scenario():
        client = ControlClient(learner.hub.endpoint, heartbeat_s=0.2, timeout_s=5.0)
        await client.join(hello_of("a"))
        client.beat(Heartbeat(generator_id="a", incarnation="i", version=0, state="sampling"))
        assert (await asyncio.wait_for(client.next_order(), LONG_S)).version == 1
        await asyncio.to_thread(_kill_without_a_word, learner)
        restarted = await asyncio.to_thread(make_learner)
        await asyncio.to_thread(restarted.publish, 0)
        assert (await asyncio.wait_for(client.next_order(), LONG_S)).version == 0
        await client.leave()

    asyncio.run(scenario())


def _kill_without_a_word(learner):
    """As seen from the generators, a crash: no Stop to anybody."""
    learner.hub.stop("not for generators", farewell=False)
    learner.publisher.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # its death is the test
def test_a_dead_control_thread_is_found_by_those_who_ask(stage):
    learner = stage[0]()
    learner.hub.check()
    learner.hub._round = lambda: 1 / 0
    learner.hub._thread.join(LONG_S)
    for ask in (learner.hub.check, lambda: learner.hub.announce(1)):
        with pytest.raises(ControlError, match="ZeroDivisionError"):
            ask()


def test_a_generator_without_a_common_transport_is_refused_and_told_both(stage):
    make_learner, make_generator = stage
    learner = make_learner(endpoint="tcp://127.0.0.1:*", transport="tcp")
    refused = make_generator(learner, "a", transports=["disk"]).expect("refused")["refused"]
    assert "disk" in refused
    assert "tcp" in refused


def test_a_fall_back_to_another_transport_works_and_is_logged(stage, caplog):
    make_learner, make_generator = stage
    learner = make_learner(transport="nccl")
    generator = make_generator(learner, "a", transports=["slot", "disk"])
    generator.expect("joined")
    learner.publish(1)
    assert generator.expect("applied", 1)["transport"] == "slot"
    assert any(
        "not nccl" in record.getMessage() and record.levelname == "WARNING" for record in caplog.records
    )


def test_an_order_that_cannot_be_made_is_counted_and_tried_again_and_the_thread_lives(
    stage, monkeypatch, caplog
):
    make_learner, make_generator = stage
    learner = make_learner()

    def refuse(reader, transport):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(learner.publisher, "order", refuse)
        generator = make_generator(learner, "a")
        learner.publish(1)
        learner.wait_for(lambda counters, _: counters["updates_failed"] >= 2)
    generator.expect("applied", 1)
    assert "weights for generator a" in caplog.text and os.strerror(errno.EMFILE) in caplog.text
    learner.hub.check()


def test_an_order_that_cannot_be_sent_reads_nothing_and_is_tried_again(stage, caplog):
    make_learner, make_generator = stage
    learner = make_learner(deadline_s=1000.0)
    generator = make_generator(learner, "a")
    generator.expect("joined")
    learner.publish(1, probe=float("nan"))
    learner.wait_for(lambda counters, _: counters["updates_failed"] >= 2)
    learner.wait_until_nothing_is_read()
    assert "was not sent" in caplog.text
    learner.publish(2)
    generator.expect("applied", 2)
    learner.hub.check()


def test_an_order_is_encoded_once_for_all_generators(stage, monkeypatch):
    """It has an entry for each tensor of the model."""
    make_learner, make_generator = stage
    learner = make_learner()
    encode, encoded = CODEC.encode, []

    def counted(message, key):
        if isinstance(message, UpdateOrder):
            encoded.append(message.version)
        return encode(message, key)

    monkeypatch.setattr(CODEC, "encode", counted)
    generators = [make_generator(learner, name) for name in "abc"]
    for generator in generators:
        generator.expect("joined")
    for version in (1, 2):
        learner.publish(version)
        for generator in generators:
            generator.expect("applied", version)
    assert encoded == [1, 2]


def test_a_version_that_is_not_there_yet_is_asked_for_until_it_is(stage):
    make_learner, make_generator = stage
    learner = make_learner()
    generator = make_generator(learner, "a")
    learner.hub.announce(1)
    generator.expect("joined")
    learner.wait_for(lambda *_: learner.publisher._readers)  # it has asked
    learner.publish(1, announces=False)
    generator.expect("applied", 1)
    assert learner.hub.counters()["updates_failed"] == 0


def test_a_generator_that_leaves_while_it_reads_reads_nothing_more(stage):
    make_learner, _ = stage
    learner = make_learner()
    learner.publish(1)

    async def scenario():
        client = ControlClient(learner.hub.endpoint, heartbeat_s=0.2, timeout_s=5.0, keys=KEYS.join.control)
        await client.join(hello_of("a"))
        await asyncio.wait_for(client.next_order(), LONG_S)
        assert pinned(learner.publisher) == 1
        await client.leave()

    asyncio.run(scenario())
    learner.wait_for(lambda counters, _: counters["left"] == 1)
    learner.wait_until_nothing_is_read()


def test_strangers_and_duplicates_are_refused_and_restarted_ones_take_their_own_place(stage):
    make_learner, make_generator = stage
    learner = make_learner(heartbeat_s=0.8, timeout_s=5.0)  # the old process has 2.4 s to be heard
    assert "release" in make_generator(learner, "a", release="0.9").expect("refused")["refused"]
    assert "config" in make_generator(learner, "a", config_hash="xyz").expect("refused")["refused"]
    alive = make_generator(learner, "a", incarnation="one", hang_on=1)
    alive.expect("joined")
    learner.publish(1)
    alive.expect("hanging", 1)
    assert "alive" in make_generator(learner, "a", incarnation="two").expect("refused")["refused"]
    alive.close()
    third = make_generator(learner, "a", incarnation="three")
    third.expect("joined")
    learner.wait_for(lambda *_: learner.dead == ["a:one"])
    third.expect("applied", 1)
    learner.wait_until_nothing_is_read()


def test_an_answer_in_the_tick_of_a_cancellation_leaves_it_cancelled(tmp_path):
    """`asyncio.wait_for` of Python 3.11 forgot it, and a generator that was to end went on."""

    async def scenario():
        found = asyncio.get_running_loop().create_future()

        async def find():
            return await found

        client = ControlClient(
            f"ipc://{tmp_path}/none", heartbeat_s=600.0, timeout_s=600.0, find_learner=find
        )
        joining = asyncio.create_task(client.join(hello_of("a")))
        await until(lambda: client._task)
        finding = asyncio.create_task(client._reconnect_if_moved())
        await asyncio.to_thread(int)  # by now both wait
        client._answer.set_result(None)
        found.set_result("")
        for task in (joining, finding):
            task.cancel()
        await asyncio.wait([joining, finding])
        client._timeout_s = 5.0
        await client.leave()
        assert (joining.cancelled(), finding.cancelled()) == (True, True)

    asyncio.run(scenario())


def hello_of(name):
    return Hello(generator_id=name, incarnation="i", release="1.0", config_hash="abc", version=0)


async def pass_by(endpoint, name, *, says_goodbye):
    """Join, receive one version, and go."""
    arrived = []
    client = ControlClient(endpoint, heartbeat_s=0.2, timeout_s=5.0, on_order=arrived.append)
    await client.join(hello_of(name))
    order = await asyncio.wait_for(client.next_order(), LONG_S)
    assert order in arrived and order.skipped == SKIPPED
    assert await asyncio.to_thread(receiving.receive, order) == byte_sum(SMALL, order.version)
    await client.report(UpdateReport(version=order.version, applied=True))
    client._is_member = says_goodbye  # one that has not been welcomed leaves in silence
    await client.leave()


async def two_pass_by(endpoint, turn):
    await asyncio.gather(
        pass_by(endpoint, f"left{turn}", says_goodbye=True),
        pass_by(endpoint, f"died{turn}", says_goodbye=False),
    )


def test_only_a_learner_that_does_not_answer_is_silent(stage, caplog):
    """Time in which the generator itself is stopped, or its loop is busy, is not silence of the learner."""
    make_learner, _ = stage
    learner, said = make_learner(timeout_s=10.0), "the learner is silent"

    async def scenario():
        client = ControlClient(learner.hub.endpoint, heartbeat_s=0.2, timeout_s=5.0)
        await client.join(hello_of("a"))
        for _ in range(2):
            let_pass(1.2)  # six heartbeats
            await elapse(0.3)
        assert said not in caplog.text and client._is_member
        learner.hub.stop("a restart", farewell=False)
        await until(lambda: said in caplog.text)
        await client.leave()

    asyncio.run(scenario())
    assert caplog.text.count(said) == 1


def test_an_order_that_was_lost_with_its_connection_comes_again_before_the_deadline(stage):
    make_learner, _ = stage
    learner = make_learner(timeout_s=LONG_S, deadline_s=10 * LONG_S)

    async def scenario():
        client = ControlClient(learner.hub.endpoint, heartbeat_s=0.2, timeout_s=5.0)
        await client.join(hello_of("a"))
        await asyncio.to_thread(learner.publish, 1)
        order = await asyncio.wait_for(client.next_order(), LONG_S)
        client._is_member = False  # as after silence of the learner
        assert await asyncio.wait_for(client.next_order(), LONG_S) == order
        await client.report(UpdateReport(version=1, applied=True))
        await client.leave()

    asyncio.run(scenario())
    learner.wait_for(lambda counters, _: (counters["updates"], counters["updates_failed"]) == (1, 0))
    learner.wait_until_nothing_is_read()


def test_twenty_joins_and_leaves_in_a_row(stage):
    make_learner, make_generator = stage
    learner = make_learner(timeout_s=4.0)
    steady = make_generator(learner, "steady")
    steady.expect("joined")
    for turn in range(1, 11):
        learner.publish(turn)
        asyncio.run(two_pass_by(learner.hub.endpoint, turn))
        steady.expect("applied", turn)
    learner.wait_for(lambda counters, members: counters["died"] == 10 and list(members) == ["steady"])
    learner.wait_for(lambda *_: len(learner.dead) == 10)  # told a moment after the count
    assert sorted(learner.dead) == sorted(f"died{turn}:i" for turn in range(1, 11))
    counters = learner.hub.counters()
    assert (counters["joined"], counters["left"], counters["updates"]) == (21, 10, 30)
    learner.wait_until_nothing_is_read()
    assert set(learner.publisher._readers) <= learner.hub._schedule.members.keys()


def test_garbage_is_counted_and_harms_nobody(stage):
    make_learner, make_generator = stage
    learner = make_learner()
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(learner.hub.endpoint)
        for frames in ([b"garbage"], [b""], [b"a", b"b", b"c"], [os.urandom(1000)]):
            stranger.send_multipart(frames)
        learner.wait_for(lambda counters, _: counters["messages_rejected"] == 4)
    make_generator(learner, "a").expect("joined")


@pytest.mark.parametrize(
    "endpoint", ["tcp://*:5555", "tcp://0.0.0.0:5555", "udp://127.0.0.1:5", "ipc:///" + "x" * 200]
)
def test_an_endpoint_that_is_open_to_all_or_impossible_is_refused(stage, endpoint):
    with pytest.raises(ControlError, match=r"use |is longer than 107 characters"):
        stage[0](endpoint=endpoint)


def test_nobody_answers(tmp_path):
    client = ControlClient(f"ipc://{tmp_path}/none", heartbeat_s=0.2, timeout_s=5.0, join_s=1.0)
    with pytest.raises(ControlError, match="no learner answered"):
        asyncio.run(client.join(hello_of("a")))


def test_the_learner_does_not_look_at_all_members_for_each_message_of_one(stage, monkeypatch):
    looks, statuses = [], Membership.statuses

    def look(membership, now_s):
        looks.append(now_s)
        return statuses(membership, now_s)

    monkeypatch.setattr(Membership, "statuses", look)
    make_learner, _ = stage
    learner, context = make_learner(), zmq.Context()
    hello = Hello(generator_id="a", incarnation="1", release="1.0", config_hash="abc", version=0)
    beat = Heartbeat(generator_id="a", incarnation="1", version=0, state="sampling")
    try:
        with context.socket(zmq.DEALER) as socket:
            socket.connect(learner.hub.endpoint)
            messages, begun_s, looked = 150, time.monotonic(), len(looks)
            for message in (hello, *[beat] * messages):
                socket.send(CODEC.encode(message))
                assert socket.poll(LONG_S * 1000) and isinstance(CODEC.decode(socket.recv()), Welcome)
        passed_s = time.monotonic() - begun_s
        assert len(looks) - looked <= passed_s / 0.05 + 2, "and not one for each message"
        assert passed_s / 0.05 + 2 < messages, "this machine was too slow to tell"
    finally:
        context.destroy(linger=0)
