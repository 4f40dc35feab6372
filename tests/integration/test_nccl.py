"""Weights over a pair of processes for each host, all real. Gloo carries them here, NCCL between GPUs."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from asyncrl.errors import TransferError
from asyncrl.weights import nccl, stream
from asyncrl.weights import staging as arrival
from asyncrl.weights.base import TensorSpec
from asyncrl.weights.layout import Layout, device_sum
from asyncrl.weights.publisher import SlotPublisher
from asyncrl.weights.slots import open_slot
from asyncrl.weights.staging import HostStaging
from tests.support.publications import pinned
from tests.support.waiting import HANG, LONG_S, stop, wait_until

pytestmark = pytest.mark.integration

MIB = 1 << 20
# `large` goes in three pieces, and the last one is odd.
SHAPES = {"large": (10 * MIB + 3,), "empty": (0, 4), "small": (5, 7), "one": ()}
LAYOUT = Layout.plan(
    [TensorSpec(name=name, dtype="float32", shape=shape) for name, shape in SHAPES.items()], 16 * MIB
)


def weights(version):
    generator = torch.Generator().manual_seed(version)
    return [(spec.name, torch.randn(spec.shape, generator=generator)) for spec in LAYOUT.specs]


class Host:
    """A host of generators, as far as their memory goes."""

    def __init__(self, directory, monkeypatch):
        self._directory, self._monkeypatch = directory, monkeypatch
        self.generators = []

    def generator(self):
        with self._monkeypatch.context() as patch:
            patch.setattr(arrival, "_MEMORY", self._directory)
            self.generators.append(HostStaging(Path("/")))
        return self.generators[-1]


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Call it to make another host."""
    hosts = []

    def make():
        directory = tmp_path / f"host{len(hosts)}"
        directory.mkdir()
        hosts.append(Host(directory, monkeypatch))
        return hosts[-1]

    yield make
    for each in hosts:
        for staging in each.generators:
            staging.close()


@pytest.fixture
def publisher(tmp_path):
    made = SlotPublisher(
        LAYOUT, probe_ids=((1,),), initial_logprobs=(), directory=tmp_path / "weights", deadline_s=60.0
    )
    yield made
    made.close()


def publish(publisher, version):
    publisher.publish(version, weights(version), ()).result(LONG_S)


def has(order, version):
    """Whether the slot of a staged order holds exactly this version."""
    slot = open_slot(order.details["slot"], LAYOUT.total_bytes)
    held = [LAYOUT.view(slot.buffer, index) for index in range(len(LAYOUT.specs))]
    return all(torch.equal(*both) for both in zip(held, dict(weights(version)).values(), strict=True))


def update(publisher, staging, version):
    publish(publisher, version)
    # A name of its own, because a member has one pair.
    assert has(staging.stage(publisher.order(f"g{id(staging)}", "nccl")), version)


def processes(publisher):
    """The processes of all pairs by role; both are children of this one."""
    found = {"sends": [], "receives": []}
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "asyncrl.weights.nccl" in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                ports = [each.laddr.port for each in process.net_connections("tcp")]
                found["sends" if publisher._server._port in ports else "receives"].append(process)
    return found


def test_every_version_arrives_and_one_pair_serves_a_host(publisher, host):
    first, second = (made := host()).generator(), made.generator()
    pairs = []
    for version in range(1, 5):
        publish(publisher, version)
        orders = [publisher.order(name, "nccl") for name in ("a", "b")]
        staged = [each.stage(order) for each, order in zip((first, second), orders, strict=True)]
        assert all(has(order, version) for order in staged)
        pairs.append([process.pid for found in processes(publisher).values() for process in found])
    assert len(pairs[0]) == 2 and pairs == [pairs[0]] * 4
    for name in ("a", "b"):
        publisher.release(name)
    assert pinned(publisher) == 0


def test_a_generator_that_finds_the_version_of_another_ends_its_pair(publisher, host):
    first, second = (made := host()).generator(), made.generator()
    update(publisher, first, 1)
    update(publisher, second, 2)
    before = processes(publisher)
    assert has(first.stage(publisher.order("first", "nccl")), 2)
    wait_until(lambda: [len(found) for found in processes(publisher).values()] == [1, 1])
    update(publisher, second, 3)
    assert all(process in before[role] for role, (process,) in processes(publisher).items())


def test_both_processes_end_with_either_side(publisher, host):
    leaving, staying = host().generator(), host().generator()
    for staging in (leaving, staying):
        update(publisher, staging, 1)
    assert len(processes(publisher)["sends"]) == len(processes(publisher)["receives"]) == 2
    leaving.close()
    wait_until(lambda: [len(found) for found in processes(publisher).values()] == [1, 1])
    update(publisher, staying, 2)
    (receives,) = processes(publisher)["receives"]
    publisher.close()
    wait_until(lambda: not processes(publisher)["sends"])
    with pytest.raises(TransferError, match="over nccl"):
        staying.stage(_order_of_another(publisher))
    assert not receives.is_running()


def _order_of_another(publisher):
    """An order whose learner has gone."""
    order = next(iter(publisher._readers.values())).order("nccl")
    source = {"host": "127.0.0.1", "port": 9, "key": b"k" * 32, "stamp": 1, "slot": {"path": "/proc/1/fd/3"}}
    return replace(order, details=order.details | {"source": source})


@pytest.mark.parametrize("role", ["sends", "receives"])
@pytest.mark.parametrize("meanwhile", ["idle", "sending"])
def test_a_killed_process_is_a_failed_update_and_another_pair_brings_the_next(
    publisher, host, role, meanwhile
):
    staging = host().generator()
    update(publisher, staging, 1)
    pair = processes(publisher)
    (victim,) = pair[role]
    if meanwhile == "sending":
        victim.suspend()  # so that the transfer cannot be over before the kill
        threading.Timer(0.5, victim.kill).start()
    else:
        victim.kill()
        wait_until(lambda: not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE)
    publish(publisher, 2)
    with pytest.raises(TransferError, match="weights over nccl"):
        staging.stage(publisher.order("g", "nccl"))
    update(publisher, staging, 3)
    assert {p.pid for p in pair[role]}.isdisjoint(p.pid for p in processes(publisher)[role])
    wait_until(lambda: all(len(found) == 1 for found in processes(publisher).values()))


def unread(ports):
    """Bytes that have arrived at these ports, and that no process has read."""
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(int(row[4].partition(":")[2], 16) for row in rows if int(row[1][-4:], 16) in ports)


@pytest.mark.parametrize("dies", ["sends", "receives"])
def test_who_loses_the_other_end_of_a_broadcast_says_so_in_one_line(publisher, host, dies, capfd):
    staging = host().generator()
    update(publisher, staging, 1)
    (sends,), (receives,) = (processes(publisher)[role] for role in ("sends", "receives"))
    publish(publisher, 2)
    sends.suspend()

    def cut_off():
        wait_until(lambda: unread({publisher._server._port}) > 0)
        receives.suspend()  # it has asked
        group = receives.net_connections("tcp")
        ports = {
            each.laddr.port for each in group if each.raddr and each.raddr.port != publisher._server._port
        }
        sends.resume()
        wait_until(lambda: unread(ports) > 0)  # it sends, and nothing receives
        if dies == "receives":
            receives.kill()
        else:
            sends.kill()
            receives.resume()

    threading.Thread(target=cut_off).start()
    with pytest.raises(TransferError, match="weights over nccl") as refused:
        staging.stage(publisher.order("g", "nccl"))
    wait_until(lambda: not processes(publisher)["sends"])
    assert "Traceback" not in (said := capfd.readouterr().err)
    if dies == "receives":
        assert "the next order starts another process" in said
    else:
        assert "onnection" in str(refused.value) and "\n" not in str(refused.value)  # Gloo's words


@pytest.mark.parametrize("role", ["sends", "receives"])
def test_a_stopped_process_costs_its_host_one_deadline_and_others_nothing(publisher, host, role):
    slow, well = host().generator(), host().generator()
    update(publisher, slow, 1)
    (stopped,) = processes(publisher)[role]
    update(publisher, well, 2)
    stopped.suspend()
    publish(publisher, 3)
    late = replace(publisher.order("slow", "nccl"), deadline_s=3.0)
    answers = []

    def stage():
        with contextlib.suppress(TransferError):
            answers.append(slow.stage(late))

    thread = threading.Thread(target=stage)
    started_s = time.monotonic()
    thread.start()
    for version in (4, 5):
        update(publisher, well, version)
    thread.join(30)
    assert answers == [] and 3.0 <= time.monotonic() - started_s < 30
    update(publisher, slow, 6)
    wait_until(lambda: [len(found) for found in processes(publisher).values()] == [2, 2])


def test_a_wrong_byte_is_named_and_the_next_version_repairs_it(publisher, host):
    staging = host().generator()
    update(publisher, staging, 1)
    publish(publisher, 2)
    order = publisher.order("g", "nccl")
    LAYOUT.view(publisher._slots.newest.slot.buffer, 2)[3, 3] = 1.0
    with pytest.raises(TransferError, match="'small' has checksum"):
        staging.stage(order)
    update(publisher, staging, 3)


def test_a_version_that_was_written_over_is_refused(publisher, host):
    staging = host().generator()
    publish(publisher, 1)
    late = publisher.order("g", "nccl")
    publisher.release("g")
    for version in (2, 3):
        publish(publisher, version)
    with pytest.raises(TransferError, match="wrote the next version over these"):
        staging.stage(late)
    update(publisher, staging, 4)


def test_a_stranger_gets_no_process_and_a_generator_nothing_but_slots(publisher, host):
    staging = host().generator()
    publish(publisher, 1)
    order = publisher.order("g", "nccl")
    source = order.details["source"]

    def with_source(**changes):
        return replace(order, details=order.details | {"source": source | changes})

    with pytest.raises(TransferError, match="nccl"):
        staging.stage(with_source(key=b"?" * 32))
    assert not processes(publisher)["sends"]
    for path in ("/etc/passwd", f"/proc/{os.getpid()}/fd/../../../etc/passwd"):
        with pytest.raises(TransferError, match="is no slot of this learner"):
            staging.stage(with_source(slot={"path": path, "stamp": 1, "exported": None}))
    with pytest.raises(TransferError, match="the deadline has passed"):
        staging.stage(replace(order, deadline_s=-1.0))
    with pytest.raises(TransferError, match="malformed"):
        staging.stage(with_source(key="text"))
    assert has(staging.stage(order), 1)


def test_others_of_the_host_wait_while_a_pair_starts(publisher, host, monkeypatch):
    """The start takes longer than a process may be silent that fetches."""
    monkeypatch.setattr(arrival, "SILENT_S", 3.0)
    started, start = [], nccl.start

    def slowly(role, connection):
        worker = start(role, connection)
        if role == nccl.RECEIVES:
            started.append(worker.pid)
            stop(worker.pid)
            threading.Timer(7.0, os.kill, (worker.pid, signal.SIGCONT)).start()
        return worker

    monkeypatch.setattr(nccl, "start", slowly)
    made = host()
    generators = [made.generator() for _ in range(3)]
    publish(publisher, 1)
    orders, staged = [publisher.order(str(i), "nccl") for i in range(3)], []
    threads = [
        threading.Thread(target=lambda each=each, order=order: staged.append(each.stage(order)))
        for each, order in zip(generators, orders, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(staged) == 3 and all(has(order, 1) for order in staged)
    assert len(started) == 1


def test_a_process_ends_soon_after_the_other_end_whatever_it_waits_for():
    """As for a broadcast of NCCL, which does not notice."""
    script = "import socket, sys, threading, time; from asyncrl.weights import nccl; "
    script += (
        "threading.Thread(target=nccl._end_with, args=[socket.socket(fileno=int(sys.argv[1]))]).start(); "
    )
    script += f"print(flush=True); {HANG}"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdout=subprocess.PIPE,
        )
        with process:
            process.stdout.readline()
            theirs.close()
            ours.close()
            assert process.wait(120) == 1


def test_a_learner_that_is_killed_leaves_no_process(tmp_path):
    script = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from tests.integration.test_nccl import *
publisher = SlotPublisher(LAYOUT, probe_ids=((1,),), initial_logprobs=(), directory=Path({str(tmp_path / "w")!r}), deadline_s=60.0)
staging = HostStaging(Path("/"))
update(publisher, staging, 1)
print(*(process.pid for found in processes(publisher).values() for process in found), flush=True)
{HANG}
"""
    learner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        pair = [psutil.Process(int(pid)) for pid in learner.stdout.readline().split()]
        assert len(pair) == 2
    finally:
        learner.kill()
        learner.wait(120)
        learner.stdout.close()
    wait_until(lambda: not any(process.is_running() for process in pair))


def test_pieces_of_a_tensor_have_the_sum_of_the_whole():
    buffer = torch.randint(0, 256, (LAYOUT.total_bytes,), dtype=torch.uint8)
    sums, seen = {}, 0
    for index, begin, end in LAYOUT.pieces():
        assert 0 < end - begin <= LAYOUT.bucket_bytes
        sums[index] = device_sum(buffer[begin:end], sums.get(index))
        seen += end - begin
    assert seen == sum(4 * torch.Size(shape).numel() for shape in SHAPES.values())
    for index, found in sums.items():
        assert int(found) == int(device_sum(LAYOUT.view(buffer, index)))


def test_what_arrives_on_a_gpu_is_summed_there(monkeypatch, tmp_path):
    """Memory of the host stands for a GPU's, and a function for the group."""
    source = torch.randint(0, 256, (LAYOUT.total_bytes,), dtype=torch.uint8)
    pieces, empty = iter(list(LAYOUT.pieces())), torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, device, **rest: empty(*size, **rest))

    class Sent:
        def __init__(self, bucket, src, async_op):
            self.bucket, (_, self.begin, self.end) = bucket, next(pieces)

        def wait(self):
            self.bucket.copy_(source[self.begin : self.end])

    monkeypatch.setattr(nccl.dist, "broadcast", Sent)
    memory, touched = torch.zeros_like(source), tmp_path / "touched"
    touched.touch()
    os.utime(touched, (0, 0))
    sums = nccl._arrive(LAYOUT, memory, "cuda", str(touched))
    assert touched.stat().st_mtime > 0
    views = [LAYOUT.view(source, index) for index in range(len(LAYOUT.specs))]
    assert sums == [int(device_sum(view)) for view in views]
    assert all(
        torch.equal(LAYOUT.view(memory, i).view(torch.int32), view.view(torch.int32))
        for i, view in enumerate(views)
    )


def test_the_groups_stamp_is_no_publications():
    assert stream.GROUP == 2**64 - 1
