"""Slots: what a reader has loaded is one whole version, or it knows that it is not."""

import os
import subprocess
import sys
import threading
import weakref
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from unittest.mock import Mock

import pytest
import torch
import xxhash

from asyncrl.errors import ConfigError, TransferError
from asyncrl.weights import publisher as publisher_module
from asyncrl.weights import slots
from asyncrl.weights.base import TensorSpec, UpdateOrder
from asyncrl.weights.layout import Layout, checksums, device_sum
from asyncrl.weights.publisher import SlotPublisher
from asyncrl.weights.slots import Slot, Slots, open_slot
from asyncrl.weights.staging import HostStaging
from tests.support.publications import pinned
from tests.support.waiting import LONG_S, wait_until

LAYOUT = Layout.plan([TensorSpec(name=f"w{i}", dtype="float32", shape=(3, 5 + i)) for i in range(4)], 1 << 20)
# As long as the CPU path, with the buffer in another place than the stamp, as on a GPU.
_shared: dict[int, torch.Tensor] = {}


@pytest.fixture(params=["cpu", "cuda"])
def device(request, monkeypatch):
    """Both kinds of slots; a GPU's memory is replaced by memory of this process, the place in its one
    allocation by a number."""
    if request.param == "cuda":
        zeros = torch.zeros
        monkeypatch.setattr(torch.cuda, "Stream", object)
        monkeypatch.setattr(torch.cuda, "stream", in_stream)
        monkeypatch.setattr(slots.torch, "zeros", lambda *a, device, **k: zeros(*a, **k))

        def export(buffer):
            _shared[len(_shared)] = buffer
            return [*[None] * 7, b"one for all", buffer.nbytes, len(_shared) - 1]

        monkeypatch.setattr(slots, "_export", export)
        monkeypatch.setattr(slots, "_import", lambda exported, device: _shared[exported[9]])
        _shared.clear()
    return request.param


_used = threading.local()


@contextmanager
def in_stream(stream):
    """In place of `torch.cuda.stream`; `_used.stream` is the thread's."""
    _used.stream = stream
    yield
    _used.stream = None


def tensors(version):
    return [(spec.name, torch.full(spec.shape, float(version))) for spec in LAYOUT.specs]


@pytest.fixture
def publisher(tmp_path, device):
    made = SlotPublisher(
        LAYOUT,
        device=device,
        probe_ids=((1, 2),),
        initial_logprobs=(0.25,),
        directory=tmp_path / "w",
        deadline_s=5.0,
    )
    yield made
    made.close()


SKIPPED = {"3": b"\x80"}


def publish(publisher, version):
    assert publisher.publish(version, tensors(version), (0.5,), SKIPPED).result(LONG_S) == version


def order_of(publisher, reader="a"):
    order = publisher.order(reader, "slot")
    assert isinstance(order, UpdateOrder)
    return order


def read(order):
    """Versions that the values of the slot are of."""
    slot = open_slot(order.details["slot"], LAYOUT.total_bytes)
    found = {float(value) for index in range(4) for value in LAYOUT.view(slot.buffer, index).unique()}
    slot.require_unchanged()
    return found


def test_readers_find_the_newest_version_whole_and_two_slots_are_enough(publisher):
    for version in range(1, 8):
        publish(publisher, version)
        for reader in "abcde":
            order = order_of(publisher, reader)
            assert (order.version, order.transport) == (version, "slot")
            assert (order.probe_logprobs, order.initial_logprobs) == ((0.5,), (0.25,))
            assert order.skipped == SKIPPED
            assert read(order) == {version}
    assert len(publisher._slots._slots) == 2


def test_a_slow_reader_keeps_its_slot_on_a_host_and_learns_of_its_loss_on_a_gpu(publisher, device):
    publish(publisher, 1)
    held = order_of(publisher, "slow")
    reading = open_slot(held.details["slot"], LAYOUT.total_bytes)
    for version in range(2, 6):
        publish(publisher, version)
        assert read(order_of(publisher, "fast")) == {version}
    if device == "cpu":
        reading.require_unchanged()
        assert read(held) == {1}
        assert len(publisher._slots._slots) == 3
    else:
        with pytest.raises(TransferError, match="wrote the next version over these"):
            reading.require_unchanged()
        assert len(publisher._slots._slots) == 2
    assert read(order_of(publisher, "slow")) == {5}


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_the_training_loops_stream_has_only_the_copy_into_the_slot(publisher, monkeypatch):
    streams, copy = {}, torch.Tensor.copy_

    def noted(name, function):
        def call(*arguments):
            streams[name] = getattr(_used, "stream", None)
            return function(*arguments)

        return call

    monkeypatch.setattr(publisher_module, "checksums", noted("sums", checksums))
    publish(publisher, 1)
    summed = streams["sums"]
    monkeypatch.setattr(torch.Tensor, "copy_", noted("copy to the host", copy))
    assert read(file_order(publisher)) == {1}
    monkeypatch.setattr(torch.Tensor, "copy_", noted("copy into the slot", copy))
    publish(publisher, 2)
    assert streams["copy into the slot"] is None
    assert len({None, summed, streams["copy to the host"]}) == 3, streams


def test_a_reader_that_was_given_up_does_not_count_twice(publisher):
    publish(publisher, 1)
    order_of(publisher)
    assert pinned(publisher) == 1
    publisher.release("a")
    publisher.release("a")
    assert pinned(publisher) == 0


def test_a_late_reader_is_told_when_it_opens(publisher):
    publish(publisher, 1)
    late = order_of(publisher)
    publisher.release("a")  # its deadline has passed
    publish(publisher, 2)
    publish(publisher, 3)
    with pytest.raises(TransferError, match="wrote the next version over these"):
        read(late)


def test_before_the_first_version_there_is_nothing_to_send(publisher):
    assert publisher.order("a", "slot") is None


def file_order(publisher, reader="a", transport="disk"):
    """An order for a copy, which takes a moment."""
    orders = []

    def is_there():
        orders.append(publisher.order(reader, transport))
        return orders[-1]

    wait_until(is_there)
    return orders[-1]


def test_files_have_the_newest_version_and_are_kept_for_their_readers(publisher, tmp_path):
    publish(publisher, 1)
    held = file_order(publisher, "slow")
    assert held.transport == "disk"
    for version in range(2, 6):
        publish(publisher, version)
        order = file_order(publisher, "fast")
        assert (order.version, read(order)) == (version, {version})
    assert read(held) == {1}
    staging = HostStaging(tmp_path / "w")
    assert staging.stage(order) is order and staging.stage(held) is held
    assert len(list((tmp_path / "w" / "versions").iterdir())) == 2


def test_a_copy_that_takes_longer_than_a_step_is_delivered(publisher, monkeypatch):
    """Otherwise the newest version would have been copied never."""
    may_copy, prepare = Event(), Slot.prepare

    def prepare_late(slot):
        if not slot._path.startswith("/proc"):
            may_copy.wait(30)
        prepare(slot)

    monkeypatch.setattr(Slot, "prepare", prepare_late)
    publish(publisher, 1)
    assert publisher.order("a", "disk") is None
    publish(publisher, 2)
    assert publisher.order("a", "disk") is publisher.order("late", "disk") is None
    may_copy.set()
    assert file_order(publisher).version == 1
    assert [file_order(publisher, each).version for each in ("late", "a")] == [2, 2]


def test_a_copy_that_hangs_is_a_failure_until_it_is_there(publisher, monkeypatch):
    """Otherwise a generator would wait for the disk, and the schedule not try another transport."""
    may_copy, prepare, now_s = Event(), Slot.prepare, [0.0]

    def prepare_late(slot):
        if not slot._path.startswith("/proc"):
            may_copy.wait(LONG_S)
        prepare(slot)

    monkeypatch.setattr(Slot, "prepare", prepare_late)
    monkeypatch.setattr(publisher_module, "time", Mock(monotonic=lambda: now_s[0]))
    publish(publisher, 1)
    for now_s[0] in (0.0, 2.5, 5.0):
        assert publisher.order("a", "disk") is None
    now_s[0] = 5.1
    with pytest.raises(
        OSError, match=r"takes more than 5 s \(weights\.deadline_s\).*another weights\.transport"
    ):
        publisher.order("a", "disk")
    assert read(order_of(publisher)) == {1}, "another transport brings it"
    may_copy.set()
    wait_until(lambda: not publisher._copying.is_alive())
    assert read(file_order(publisher)) == {1}


def test_other_hosts_fetch_a_copy_in_host_memory_wherever_the_parameters_are(device, tmp_path):
    options = {"probe_ids": ((1, 2),), "initial_logprobs": (0.25,), "deadline_s": 5.0, "device": device}
    publisher = SlotPublisher(LAYOUT, directory=tmp_path / "w", interface="127.0.0.1", **options)
    staging = HostStaging(tmp_path)
    for version in (1, 2, 3):
        publish(publisher, version)
        order = file_order(publisher, transport="tcp")
        assert (order.version, order.transport) == (version, "tcp") and "slot" not in order.details
        staged = staging.stage(order)
        assert staged.transport == "slot" and read(staged) == {version}
    staging.close()
    publisher.close()


def test_a_full_disk_is_a_failure_and_the_next_attempt_succeeds(publisher, monkeypatch):
    publish(publisher, 1)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match="No space left"):
            file_order(publisher)
    assert read(file_order(publisher)) == {1}
    assert read(order_of(publisher)) == {1}


def test_a_port_that_cannot_be_had_is_a_failure_and_pins_nothing(publisher, monkeypatch):
    publish(publisher, 1)

    def fails(*arguments, **options):
        raise OSError(24, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(publisher_module, "SlotServer", fails)
        with pytest.raises(OSError, match="too many open files"):
            publisher.order("a", "nccl")
    publisher.release("a")
    assert pinned(publisher) == 0
    assert read(order_of(publisher)) == {1}


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_damaged_memory_is_refused_while_requests_run(publisher, tmp_path):
    publish(publisher, 1)
    order = order_of(publisher)
    staging = HostStaging(tmp_path)
    assert staging.stage(order) is order
    slot = publisher._slots._slots[0]
    LAYOUT.view(slot.buffer, 2).view(-1)[7] = 1.0000001
    with pytest.raises(TransferError, match="'w2' has checksum"):
        staging.stage(order)


@pytest.mark.parametrize("path", ["/etc/passwd", "/proc/1/fd/../environ", "/proc/self/fd/3", "relative"])
def test_only_open_files_of_processes_are_slots(path, tmp_path):
    details = {"slot": {"path": path, "stamp": 1, "exported": None}}
    order = UpdateOrder(
        version=1,
        transport="slot",
        deadline_s=1.0,
        details=details,
        probe_ids=(),
        probe_logprobs=(),
        initial_logprobs=(),
    )
    with pytest.raises(TransferError, match="a slot is an open file"):
        HostStaging(tmp_path).stage(order)


def test_a_learner_that_is_gone_is_named():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with pytest.raises(TransferError, match=r"the learner has ended"):
        open_slot({"path": f"/proc/{process.pid}/fd/3", "stamp": 1, "exported": None}, 8)


def test_what_a_reader_has_open_survives_the_learner():
    slot = Slot.create(16)
    slot.buffer[:] = 7
    slot.complete(3)
    reading = open_slot(slot.describe(), 16)
    slot.close()
    assert reading.buffer.tolist() == [7] * 16
    reading.require_unchanged()


def test_slots_that_are_kept_mapped_show_their_newest_content_and_are_few(monkeypatch, tmp_path):
    mapped, host_buffer = [], slots._host_buffer
    monkeypatch.setattr(slots, "_kept", {})
    monkeypatch.setattr(slots, "_host_buffer", lambda *file: mapped.append(file) or host_buffer(*file))
    made = [Slot.create(8192, directory=directory) for directory in (None, tmp_path, None)]

    def read_again(slot, version):
        slot.begin()
        slot.buffer[:] = version
        slot.complete(version)
        reading = open_slot(slot.describe(), 8192, keep=True)
        assert reading.buffer.unique().tolist() == [version]
        reading.require_unchanged()

    for version in range(1, 9):
        read_again(made[version % 2], version)
    assert len(mapped) == 2
    read_again(made[2], 9)
    assert len(mapped) == 3 and len(slots._kept) == 2
    assert open_slot(made[2].describe(), 8192).buffer is not next(reversed(slots._kept.values()))


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize(
    ("variables", "calls"),
    [
        ({}, []),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, []),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments:True"},
            ["expandable_segments:False", "slot", "max_split_size_mb:64, expandable_segments:True"],
        ),
        (
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": ""},
            ["expandable_segments:False", "slot", "expandable_segments:True"],
        ),
    ],
)
def test_the_memory_of_a_gpu_slot_is_in_no_expandable_segment(variables, calls, device, monkeypatch):
    made, zeros = [], torch.zeros
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, variables.get(name, ""))
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", made.append)
    monkeypatch.setattr(torch, "zeros", lambda *a, **k: made.append("slot") or zeros(*a, **k))
    Slot.create(64, "cuda").close()
    assert made == (calls or ["slot"])


class Runtime:
    """In place of CUDA's: what is registered. It refuses the flags in `refused`."""

    def __init__(self):
        self.registered, self.refused = {}, ()

    def cudaHostRegister(self, address, size_bytes, flags):
        if flags in self.refused:
            return 801
        self.registered[address] = (size_bytes, flags)
        return 0

    def cudaHostUnregister(self, address):
        del self.registered[address]


@pytest.fixture
def runtime(monkeypatch):
    made = Runtime()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    return made


def rights(address):
    """As the kernel writes them: `rw-s`."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(place, 16) for place in line.partition(" ")[0].split("-"))
        if begin <= address < end:
            return line.split()[1]
    raise AssertionError(f"{address} is not mapped")


@pytest.mark.parametrize(("refused", "flags"), [((), 0), ((0,), 8)])
def test_memory_that_a_gpu_copies_is_registered_for_as_long_as_it_is_mapped(
    runtime, monkeypatch, refused, flags
):
    """And nothing can write to it. Not every system registers it in each way."""
    monkeypatch.setattr(slots, "_kept", {})
    made = [Slot.create(8192) for _ in range(3)]
    for _ in range(2):
        for slot in made:
            slot.prepare()
    assert [size for size, _ in runtime.registered.values()] == [8192] * 3
    before, runtime.refused = set(runtime.registered), refused
    for version, slot in enumerate(made, 1):
        slot.buffer.fill_(version)
        slot.complete(version)
        opened = open_slot(slot.describe(), 8192, device=0, keep=True)
        assert set(opened.buffer.unique().tolist()) == {version}
        del opened
        mine = {address: what for address, what in runtime.registered.items() if address not in before}
        assert list(mine.values()) == [(8192, flags)] * min(version, 2)
        assert {rights(address) for address in mine} == {"r--s"}


def test_memory_that_cannot_be_registered_is_used_all_the_same(runtime, monkeypatch, caplog):
    runtime.refused, zeros, launched = (0, 8), torch.zeros, []

    def launch(*sizes, device="cpu", **others):
        if device == "cuda":
            launched.append(sizes)
            raise RuntimeError("CUDA error: operation not supported")  # which is reported once
        return zeros(*sizes, **others)

    monkeypatch.setattr(torch, "zeros", launch)
    slot = Slot.create(8192)
    slot.prepare()
    slot.complete(1)
    assert open_slot(slot.describe(), 8192, device=0, keep=True).buffer.sum() == 0
    assert launched == [(1,)] * 3 and "several times as slowly" in caplog.text


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_a_reader_keeps_no_memory_of_the_learners_gpu(device, monkeypatch):
    """The learner may end, and the next one needs that memory before its first version."""
    imported = []

    def map_again(exported, device):
        imported.append(weakref.ref(found := torch.empty(64, dtype=torch.uint8)))
        return found

    monkeypatch.setattr(slots, "_import", map_again)
    slot = Slot.create(64, "cuda")
    slot.complete(1)
    for _ in range(2):
        open_slot(slot.describe(), 64, device=0, keep=True).require_unchanged()
    assert [each() for each in imported] == [None, None]


def test_a_gpu_whose_memory_no_other_process_can_map_is_a_mistake_of_the_config(monkeypatch):
    def refuse(tensor):
        raise RuntimeError("cudaMallocAsync does not yet support shareIpcHandle")

    monkeypatch.setattr(torch.multiprocessing.reductions, "reduce_tensor", refuse)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with pytest.raises(ConfigError, match=r"shareIpcHandle\); set weights\.slots=host"):
        slots._export(torch.zeros(1))


@pytest.mark.parametrize("size", [1, 7, 8, 63, 4096, (1 << 24) + 9])
def test_one_changed_bit_changes_both_checksums(size):
    generator = torch.Generator().manual_seed(size)
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    layout = Layout.plan([TensorSpec(name="a", dtype="uint8", shape=(size,))], 64)
    one, two = checksums(data, layout), int(device_sum(data))
    assert (checksums(data.clone(), layout), int(device_sum(data.clone()))) == (one, two)
    for place in {0, size // 2, size - 1}:
        other = data.clone()
        other[place] ^= 1 << (place % 8)
        assert checksums(other, layout) != one and int(device_sum(other)) != two


def test_the_device_sum_is_the_sum_of_its_definition():
    data = torch.randint(-(2**62), 2**62, (1000,))
    expected = sum((2 * place + 1) * word for place, word in enumerate(data.tolist())) % 2**64
    assert int(device_sum(data)) % 2**64 == expected


@pytest.mark.parametrize(("words", "largest"), [(0, 0), (3, 3), ((1 << 21) + 5, 1 << 21)])
def test_the_factors_of_a_device_sum_are_no_longer_than_the_tensor(words, largest, monkeypatch):
    made, arange = [], torch.arange
    monkeypatch.setattr(torch, "arange", lambda end, **options: made.append(end) or arange(end, **options))
    device_sum(torch.zeros(words, dtype=torch.int64))
    assert made == [largest]


def test_elements_that_change_places_change_the_device_sum():
    data = torch.arange(1, 65, dtype=torch.float32)
    other = data.clone()
    other[[3, 40]] = other[[40, 3]]
    assert int(device_sum(data)) != int(device_sum(other))


def test_slices_and_odd_offsets_are_summed_like_copies():
    data = torch.arange(0, 1001, dtype=torch.int16)
    assert int(device_sum(data[1:])) == int(device_sum(data[1:].clone()))
    matrix = torch.randn(8, 9)
    assert int(device_sum(matrix.T)) == int(device_sum(matrix.T.contiguous()))


def test_slots_close_their_files():
    before = set(os.listdir("/proc/self/fd"))
    made = Slots(100)
    made.begin()
    made.close()
    # The collector may have closed files of other tests meanwhile.
    assert set(os.listdir("/proc/self/fd")) <= before


def test_layout_sums_are_those_of_its_tensors():
    buffer = torch.randint(0, 256, (LAYOUT.total_bytes,), dtype=torch.uint8)
    views = (LAYOUT.view(buffer, index).reshape(-1).view(torch.uint8) for index in range(4))
    assert checksums(buffer, LAYOUT) == tuple(xxhash.xxh3_64_intdigest(view.numpy().data) for view in views)
