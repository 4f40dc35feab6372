"""Both ends of the NCCL transport, over vLLM's own messages, packing and reload, without a GPU.

Only the communicator, the streams and the device are stand-ins. What the communicator looks like is compared
with vLLM's own, so a vLLM that changes it fails here and not in a run.
"""

import contextlib
import inspect
import os
import queue
import threading
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from vllm.distributed.device_communicators import pynccl_wrapper
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.weight_transfer import nccl_common, packed_tensor
from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from asyncrl.engine.vllm.receiver import NcclReceiver
from asyncrl.errors import TransferError
from asyncrl.weights.base import TensorSpec
from asyncrl.weights.layout import Layout, checksums
from asyncrl.weights.nccl import NcclSender

pytestmark = pytest.mark.integration

UNIQUE_ID_BYTES = 128
WAIT_S = 60.0
BUCKET_BYTES = 20_000
# Two buckets of two tensors, and both layers arrive in both.
SHAPES = {"a.q.weight": (48, 64), "b.weight": (32, 96), "a.k.weight": (48, 64), "b.bias": (32,)}
BUCKETS = [48 * 64 * 4 + 32 * 96 * 4, 48 * 64 * 4 + 32 * 4]
LAYOUT = Layout.plan(
    [TensorSpec(name=name, dtype="float32", shape=shape) for name, shape in SHAPES.items()], BUCKET_BYTES
)


class Wire:
    """What one group shares: a queue for each receiver, and the meeting of all ranks."""

    def __init__(self, ranks):
        self.queues = {rank: queue.Queue() for rank in range(1, ranks)}
        self.meeting = threading.Barrier(ranks)
        self.sizes = []
        self.spoil = None


WIRES, OPENING = {}, threading.Lock()
UID_INIT_PROCESS_GROUP, LIBRARY = nccl_common.uid_init_process_group, pynccl_wrapper.NCCLLibrary


class Communicator:
    """Broadcasts between threads. A `broadcast` without a sender ends when `destroy` is called, as in NCCL."""

    def __init__(self, unique_id, rank, world_size, device):
        assert len(unique_id) == UNIQUE_ID_BYTES
        with OPENING:
            self.wire = WIRES.setdefault(unique_id, Wire(world_size))
        self.rank, self.available, self.disabled = rank, True, False
        self.wire.meeting.wait(WAIT_S)

    def broadcast(self, tensor, src, stream=None):
        assert tensor.dtype == torch.uint8
        assert tensor.is_contiguous()
        if self.rank == src:
            self.wire.sizes.append(tensor.numel())
            for each in self.wire.queues.values():
                each.put(tensor.clone())
            return
        while not self.disabled:
            with contextlib.suppress(queue.Empty):
                tensor.copy_(self.wire.queues[self.rank].get(timeout=0.02))
                if self.wire.spoil is not None:
                    tensor[self.wire.spoil] += 1
                return

    def destroy(self):
        self.available, self.disabled = False, True


class Model(nn.Module):
    """A fused projection, whose parts arrive by themselves, and a layer with a bias."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 96, bias=False), nn.Linear(96, 32)
        self.a.weight.weight_loader = load_half
        self.requires_grad_(False)
        record_metadata_for_reloading(self)

    def load_weights(self, weights):
        parameters, loaded = dict(self.named_parameters()), set()
        for name, weight in weights:
            fused = name.replace(".q.", ".").replace(".k.", ".")
            parameter = parameters[fused]
            half = (int(".k." in name),) if name != fused else ()
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, weight, *half)
            loaded.add(fused)
        return loaded


def load_half(param, weight, half):  # vLLM calls it with a `param` of its own
    param.data[half * 48 : (half + 1) * 48].copy_(weight)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    stream = SimpleNamespace(synchronize=lambda: None)
    library = SimpleNamespace(ncclGetUniqueId=lambda: SimpleNamespace(internal=os.urandom(UNIQUE_ID_BYTES)))
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda device, count: (stream,) * count)
    monkeypatch.setattr(nccl_common, "uid_init_process_group", Communicator)
    monkeypatch.setattr(pynccl_wrapper, "NCCLLibrary", lambda: library)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for module, name in ((torch.cuda, "current_device"), (torch.accelerator, "current_device_index")):
        monkeypatch.setattr(module, name, lambda: 0)
    for module in (torch.cuda, torch.accelerator):
        monkeypatch.setattr(module, "synchronize", lambda *device: None)


class Pair:
    """A sender, and the receivers of one tensor-parallel generator."""

    def __init__(self, workers):
        self.workers = workers
        self.models = [Model() for _ in range(workers)]
        self.receivers = [receiver(model, rank, workers) for rank, model in enumerate(self.models)]
        self.restart()

    def restart(self):
        """Another sender process, which knows nothing of the group."""
        self.sender = NcclSender(LAYOUT, self.workers)

    def send(self, version, *, deadline_s=WAIT_S, absent=False):
        """(the order's details, the buffer, the error of each receiver)"""
        torch.manual_seed(version)
        buffer = torch.zeros(LAYOUT.total_bytes, dtype=torch.uint8)
        for index, spec in enumerate(LAYOUT.specs):
            LAYOUT.view(buffer, index).copy_(torch.randn(spec.shape))
        details = {**self.sender.prepare(), "checksums": list(checksums(buffer, LAYOUT))}
        update = {"transport": "nccl", "target": "weights", "deadline_s": deadline_s, "details": details}
        errors = {}
        calls = [lambda each=each: each.update_weights(update) for each in self.receivers]
        if not absent:
            calls.append(lambda: self.sender.transfer(buffer))
        threads = [
            threading.Thread(target=noting, args=(errors, rank, call)) for rank, call in enumerate(calls)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * WAIT_S)
            assert not thread.is_alive()
        return details, buffer, [errors.get(rank) for rank in range(self.workers)]


def receiver(model, rank, workers):
    vllm = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_index=0, world_size=workers, rank=rank),
        model_config=SimpleNamespace(dtype=torch.float32),
    )
    return NcclReceiver(None, vllm, torch.device("cpu"), model)


def noting(errors, rank, call):
    try:
        with torch.no_grad():
            call()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        errors[rank] = error


def assert_holds(model, buffer):
    q, weight, k, bias = (LAYOUT.view(buffer, index) for index in range(len(LAYOUT.specs)))
    assert torch.equal(model.a.weight, torch.cat([q, k]))
    assert torch.equal(model.b.weight, weight)
    assert torch.equal(model.b.bias, bias)


@pytest.mark.parametrize("workers", [1, 2])
def test_every_worker_has_every_version_where_its_kernels_expect_it(workers):
    pair = Pair(workers)
    addresses = [[p.data_ptr() for p in model.parameters()] for model in pair.models]
    for version in (1, 2, 3):
        details, buffer, errors = pair.send(version)
        assert errors == [None] * workers
        assert (details["init"] is None) == (version > 1)
        for model in pair.models:
            assert_holds(model, buffer)
        assert [[p.data_ptr() for p in model.parameters()] for model in pair.models] == addresses
    wire = pair.receivers[0].model_update_group.wire
    assert wire.sizes == BUCKETS * 3


def test_a_byte_that_changes_on_the_way_is_named_and_the_next_version_repairs_it():
    pair = Pair(1)
    pair.send(1)
    wire = pair.receivers[0].model_update_group.wire
    wire.spoil = 5  # of each bucket
    _, _, [error] = pair.send(2)
    assert isinstance(error, TransferError)
    assert "tensor 'a.q.weight' has checksum" in str(error)
    wire.spoil = None
    wire.queues[1].queue.clear()  # a real group would be made anew, see the next test
    _, buffer, errors = pair.send(3)
    assert errors == [None]
    assert_holds(pair.models[0], buffer)


def test_a_sender_that_never_comes_is_cut_off_and_another_one_is_received():
    pair = Pair(2)
    _, before, _ = pair.send(1)
    started_s = time.monotonic()
    _, _, errors = pair.send(2, deadline_s=0.5, absent=True)
    assert time.monotonic() - started_s >= 0.5
    for error, each in zip(errors, pair.receivers, strict=True):
        assert "cut off after 0.5 s; the next order must bring a new group" in str(error)
        assert each.model_update_group is None
    for model in pair.models:
        assert_holds(model, before)
    pair.restart()
    details, buffer, errors = pair.send(3)
    assert details["init"] is not None
    assert errors == [None, None]
    for model in pair.models:
        assert_holds(model, buffer)


def test_a_communicator_that_vllm_has_switched_off_is_an_error_on_both_sides(monkeypatch):
    """It would accept every call and move nothing."""

    def switched_off(*arguments):
        communicator = Communicator(*arguments)
        communicator.disabled = True
        return communicator

    monkeypatch.setattr(
        nccl_common,
        "uid_init_process_group",
        lambda unique_id, rank, world_size, device: switched_off(unique_id, rank, world_size, device),
    )
    pair = Pair(1)
    with mock.patch.object(NcclSender, "transfer", noted := Noted(NcclSender.transfer)):
        _, _, [error] = pair.send(1)
    assert "no working NCCL communicator" in str(error)
    assert "vLLM disabled its communicator" in str(noted.error)


class Noted:
    """Calls a method of one object, and keeps its error."""

    def __init__(self, method):
        self.method, self.error = method, None

    def __get__(self, instance, owner):
        def call(*arguments):
            try:
                self.method(instance, *arguments)
            except TransferError as error:
                self.error = error

        return call


def names_of(function):
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


def test_the_stand_in_has_the_signatures_of_vllms_communicator():
    for name in ("broadcast", "destroy"):
        assert names_of(getattr(Communicator, name)) == names_of(getattr(PyNcclCommunicator, name))
    assert names_of(UID_INIT_PROCESS_GROUP) == ["nccl_unique_id_bytes", "rank", "world_size", "device"]
    assert names_of(Communicator) == ["unique_id", *names_of(UID_INIT_PROCESS_GROUP)[1:]]
    assert pynccl_wrapper.NCCL_UNIQUE_ID_BYTES == UNIQUE_ID_BYTES
    assert "self.disabled = True" in inspect.getsource(PyNcclCommunicator.__init__)
    assert callable(LIBRARY.ncclGetUniqueId) and callable(LIBRARY.ncclGetVersion)
    assert len(bytes(pynccl_wrapper.ncclUniqueId().internal)) == UNIQUE_ID_BYTES


def test_both_ends_of_the_packing_agree_on_what_we_give_them():
    """The sender's arguments are ours; the receiver's come from the order, through vLLM's own class."""
    packing = inspect.signature(packed_tensor.pack_tensors).parameters
    producer = inspect.signature(packed_tensor.packed_nccl_broadcast_producer).parameters
    consumer = inspect.signature(packed_tensor.packed_nccl_broadcast_consumer).parameters
    assert list(packing)[:3] == ["iterator", "post_iter_func", "buffer_size_bytes"]
    theirs = ["iterator", "group", "src", "post_iter_func", "buffer_size_bytes", "num_buffers"]
    assert list(producer) == theirs
    assert [name for name in consumer if name != "device"] == [
        name.replace("post_iter_func", "post_unpack_func") for name in theirs
    ]


@pytest.mark.parametrize("part", ["init", "update"])
def test_an_order_fills_vllms_own_messages_and_a_field_more_or_less_is_refused(part):
    pair = Pair(2)
    fields = pair.sender.prepare()[part]
    parse = getattr(pair.receivers[0], f"parse_{part}_info")
    parsed = parse(fields)
    assert {name: getattr(parsed, name) for name in fields} == fields
    with pytest.raises(ValueError, match="unexpected keyword argument 'another'"):
        parse(fields | {"another": 1})
    required = {"init": ["rank_offset", "world_size"], "update": ["names", "dtype_names", "shapes"]}[part]
    for name in required:
        with pytest.raises(ValueError, match=f"missing 1 required .*'{name}'"):
            parse({key: value for key, value in fields.items() if key != name})
