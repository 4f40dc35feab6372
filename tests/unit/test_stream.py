"""Weights over TCP: a server and readers of this process, over real sockets."""

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from asyncrl.errors import TransferError
from asyncrl.weights import stream
from asyncrl.weights.layout import checksums
from asyncrl.weights.slots import Slots
from asyncrl.weights.stream import SlotServer, fetch
from tests.support.publications import LARGE, LAYOUT, filled
from tests.support.waiting import HANG, LONG_S, let_pass, wait_until

STAMP = 7


@pytest.fixture
def serve():
    made = []

    def make(layout=LAYOUT, *, host="127.0.0.1", deadline_s=20.0):
        slot = filled(layout, STAMP)
        find = {STAMP: slot.file}
        server = SlotServer(
            host, lambda stamp: find.get(stamp, -1), layout.total_bytes, deadline_s=deadline_s
        )
        made.append((server, slot))
        return server, slot

    yield make
    for server, slot in made:
        server.close()
        assert not server._thread.is_alive()
        slot.close()


def fetched(source, layout, sums, wait_s=20.0):
    buffer = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    fetch(source, buffer, layout, sums, until_s=time.monotonic() + wait_s)
    return buffer


def connect(server):
    source = server.source(STAMP)
    return socket.create_connection((source["host"], source["port"]), 10.0)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_what_arrives_is_what_the_slot_holds_at_every_kind_of_address(serve, host):
    try:
        server, slot = serve(host=host)
    except OSError:
        pytest.skip(f"this host has no {host}")
    sums = checksums(slot.buffer, LAYOUT)
    for _ in range(3):
        assert torch.equal(fetched(server.source(STAMP), LAYOUT, sums), slot.buffer)


def test_many_readers_are_served_together_by_one_thread(serve):
    server, slot = serve(LARGE)
    sums, threads = checksums(slot.buffer, LARGE), threading.active_count()
    with ThreadPoolExecutor(12) as pool:
        calls = [pool.submit(fetched, server.source(STAMP), LARGE, sums) for _ in range(12)]
        assert all(torch.equal(call.result(60), slot.buffer) for call in calls)
    assert threading.active_count() == threads
    wait_until(lambda: not server._readers)


@pytest.mark.parametrize("index", [1, len(LAYOUT.specs) // 2, len(LAYOUT.specs) - 1])
def test_a_flipped_bit_in_any_bucket_is_named_and_refused(serve, index):
    server, slot = serve()
    sums = checksums(slot.buffer, LAYOUT)
    LAYOUT.view(slot.buffer, index).view(-1).view(torch.uint8)[5] ^= 4
    with pytest.raises(TransferError, match=f"'w{index}' has checksum"):
        fetched(server.source(STAMP), LAYOUT, sums)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": bytes(32)}, "another key"),
        ({"stamp": STAMP + 1}, "no longer has this version"),
        ({"key": b""}, "another key"),
    ],
)
def test_another_key_or_stamp_gets_not_one_byte(serve, change, message):
    server, slot = serve()
    source = server.source(STAMP) | change
    with pytest.raises(TransferError, match=rf"0 of [\d,]+ bytes arrived \(.*{message}") as caught:
        fetched(source, LAYOUT, checksums(slot.buffer, LAYOUT))
    assert f"127.0.0.1:{source['port']}" in str(caught.value)


@pytest.mark.parametrize("change", [{"port": "x"}, {"key": 5.0}, {"stamp": -1}, {"stamp": 1 << 64}])
def test_a_malformed_order_is_refused(serve, change):
    server, _ = serve()
    with pytest.raises(TransferError, match="malformed order"):
        fetched(server.source(STAMP) | change, LAYOUT, ())


def test_a_server_with_another_layout_is_refused(serve):
    server, slot = serve(LARGE)
    with pytest.raises(TransferError, match=f"the learner has {LARGE.total_bytes:,} bytes"):
        fetched(server.source(STAMP), LAYOUT, checksums(slot.buffer, LARGE)[: len(LAYOUT.specs)])


def test_a_reader_that_stops_reading_delays_no_other_and_is_dropped(serve):
    server, slot = serve(LARGE, deadline_s=4.0)
    sums = checksums(slot.buffer, LARGE)
    with connect(server) as stopped, connect(server) as half_a_request:
        source = server.source(STAMP)
        stopped.sendall(source["key"] + STAMP.to_bytes(8, "little"))
        stopped.recv(100)
        half_a_request.sendall(source["key"][:5])
        for _ in range(3):
            assert torch.equal(fetched(source, LARGE, sums), slot.buffer)
        wait_until(lambda: not server._readers)
        half_a_request.settimeout(10.0)
        assert half_a_request.recv(1) == b""
        with contextlib.suppress(ConnectionError):  # what had been sent before is still read
            while stopped.recv(1 << 20):
                pass


def test_strangers_without_the_key_keep_nobody_out(serve, monkeypatch):
    monkeypatch.setattr(stream, "_MOST_STRANGERS", 8)
    server, slot = serve(deadline_s=1000.0)
    sums = checksums(slot.buffer, LAYOUT)
    with contextlib.ExitStack() as strangers:
        for _ in range(40):
            strangers.enter_context(connect(server))
        assert torch.equal(fetched(server.source(STAMP), LAYOUT, sums), slot.buffer)
        wait_until(lambda: len(server._readers) <= 8)


class Pair:
    """Stands for the process of a connection."""

    is_running = True

    def __init__(self, channel):
        self.address, self.is_ended = channel.getpeername(), False

    def end(self):
        self.is_ended = True


def test_a_generator_gets_a_process_only_over_nccl_and_as_many_as_members():
    pairs = []
    server = SlotServer(
        "127.0.0.1",
        lambda stamp: -1,
        LAYOUT.total_bytes,
        deadline_s=20.0,
        start=lambda channel: pairs.append(Pair(channel)) or pairs[-1],
    )

    def ask():
        return stream.connect(server.source(STAMP), stream.GROUP, time.monotonic() + 10.0)

    try:
        with ask() as channel:
            assert channel.recv(1) == b"" and not pairs, "the run's transport is another"
        server.most_handed = 2
        with contextlib.ExitStack() as stack:
            for number in range(1, 5):
                stack.enter_context(ask())
                wait_until(lambda number=number: len(pairs) == number)
                wait_until(lambda: [pair.is_ended for pair in pairs[:-2]] == [True] * (len(pairs) - 2))
            assert [pair.is_ended for pair in pairs] == [True, True, False, False]
        wait_until(lambda: all(pair.is_ended for pair in pairs))
    finally:
        server.close()


def test_a_host_that_connects_again_takes_its_own_place(monkeypatch):
    # What the server sees in its next look is too late.
    monkeypatch.setattr(stream, "_LOOK_S", LONG_S)
    pairs, closed = [], select.poll()

    def start(channel):
        closed.register(channel, select.POLLRDHUP)
        pairs.append(Pair(channel))
        return pairs[-1]

    server = SlotServer("127.0.0.1", lambda stamp: -1, LAYOUT.total_bytes, deadline_s=LONG_S, start=start)
    server.most_handed = 2

    def ask(number):
        channel = stream.connect(server.source(STAMP), stream.GROUP, time.monotonic() + LONG_S)
        wait_until(lambda: len(pairs) == number)
        return channel

    try:
        with ask(1):
            ask(2).close()
            wait_until(lambda: closed.poll(0))
            with ask(3):
                wait_until(lambda: any(pair.is_ended for pair in pairs))
                assert [pair.is_ended for pair in pairs] == [False, True, False]
    finally:
        server.close()


def test_a_process_that_is_asked_for_nothing_ends():
    code = "from asyncrl.weights import nccl; nccl.START_S = 0.2; nccl.main()"
    ours, theirs = socket.socketpair()
    connection, other = socket.socketpair()
    with ours, theirs, connection, other:
        argv = [sys.executable, "-c", code, str(theirs.fileno()), str(os.getpid())]
        with subprocess.Popen(argv, pass_fds=[theirs.fileno()]) as process:
            socket.send_fds(ours, [b"s"], [connection.fileno()])
            assert process.wait(LONG_S) == 0


def test_a_host_without_open_files_serves_again_when_it_has_some(serve, monkeypatch):
    server, slot = serve()
    accept, fails = socket.socket.accept, [3]

    def accepts(listener):
        if fails[0]:
            fails[0] -= 1
            raise OSError(24, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accepts)
    assert torch.equal(fetched(server.source(STAMP), LAYOUT, checksums(slot.buffer, LAYOUT)), slot.buffer)
    assert fails == [0]


@pytest.mark.parametrize("says", ["nothing", "one byte at a time", "hangs up"])
def test_a_learner_that_is_stuck_costs_one_deadline(says):
    """A peer that stops at any point, and one that is so slow that every single wait would be short."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        source = {"host": "127.0.0.1", "port": listener.getsockname()[1], "key": bytes(32), "stamp": 1}

        def answer():
            channel = listener.accept()[0]
            with channel, contextlib.suppress(OSError):
                if says == "hangs up":
                    channel.recv(40)
                    channel.sendall(LAYOUT.total_bytes.to_bytes(8, "little") + b"123")
                    return
                channel.sendall(LAYOUT.total_bytes.to_bytes(8, "little"))
                while says == "one byte at a time":
                    channel.sendall(b"x")
                    let_pass(0.05)
                channel.recv(1000)
                channel.recv(1000)

        thread = threading.Thread(target=answer)
        thread.start()
        started_s = time.monotonic()
        with pytest.raises(TransferError, match=rf"of {LAYOUT.total_bytes:,} bytes arrived"):
            fetched(source, LAYOUT, (), wait_s=0.6)
        assert time.monotonic() - started_s < 10.0
        thread.join(LONG_S)
        assert not thread.is_alive()


def test_no_learner_at_all_is_said_with_its_address():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    source = {"host": "127.0.0.1", "port": port, "key": bytes(32), "stamp": 1}
    with pytest.raises(TransferError, match=rf"127\.0\.0\.1:{port}: 0 of .*refused.*weights\.deadline_s"):
        fetched(source, LAYOUT, ())


def test_a_learner_that_is_killed_in_mid_transfer_is_an_error_at_once():
    script = """
import time
from tests.support.publications import LARGE, filled
from asyncrl.weights.stream import SlotServer
slot = filled(LARGE, 7)
server = SlotServer("127.0.0.1", lambda stamp: slot.file, LARGE.total_bytes, deadline_s=30.0)
print(server._port, server._key.hex(), flush=True)
HANG
""".replace("HANG", HANG)
    learner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        port, key = learner.stdout.readline().split()
        source = {"host": "127.0.0.1", "port": int(port), "key": bytes.fromhex(key), "stamp": STAMP}
        buffer, progress = torch.zeros(LARGE.total_bytes, dtype=torch.uint8), []

        def kill():
            progress.append(1)
            if len(progress) == 3:
                learner.kill()
                learner.wait(120)

        with pytest.raises(TransferError, match=f"of {LARGE.total_bytes:,} bytes arrived"):
            until_s = time.monotonic() + 30.0
            sums = checksums(filled(LARGE, STAMP).buffer, LARGE)
            fetch(source, buffer, LARGE, sums, until_s=until_s, on_progress=kill)
    finally:
        learner.kill()
        learner.wait(120)
        learner.stdout.close()


def test_a_slot_is_found_by_its_publication_and_not_while_it_is_written():
    slots = Slots(LAYOUT.total_bytes)
    slot = slots.begin()
    assert slots.file_of(0) == slots.file_of(STAMP) == slots.file_of(slot.stamp + 99) == -1
    slot.complete(STAMP)
    assert os.pread(slots.file_of(STAMP), 8, LAYOUT.total_bytes) == STAMP.to_bytes(8, "little")
    slot.begin()
    assert slots.file_of(STAMP) == -1
    slots.close()
