import inspect
from typing import get_args

import msgpack
import pytest
import torch
from torch.multiprocessing import reductions

from asyncrl.config.sections import WeightsConfig
from asyncrl.control.messages import CODEC, MAX_ORDER_BYTES
from asyncrl.hosting.placement import choose_transport
from asyncrl.weights import slots
from asyncrl.weights.base import TRANSPORTS, TensorSpec, UpdateOrder
from asyncrl.weights.layout import Layout

_REBUILD = reductions.rebuild_cuda_tensor
NAMES = ["slot", "disk", "tcp", "nccl"]


@pytest.mark.parametrize(("one_host", "expected"), [(True, "slot"), (False, "tcp")])
def test_auto_is_the_memory_of_one_host_and_tcp_between_hosts(one_host, expected):
    chosen = choose_transport(WeightsConfig().transport, one_host=one_host)
    assert chosen == expected
    assert chosen in TRANSPORTS
    assert [choose_transport(name, one_host=one_host) for name in NAMES] == NAMES


def test_a_generator_receives_every_transport_of_the_config():
    allowed = get_args(WeightsConfig.model_fields["transport"].annotation)
    assert set(TRANSPORTS) == set(allowed) - {"auto"} and len(set(TRANSPORTS)) == len(TRANSPORTS)


def test_an_exported_slot_is_the_same_after_the_wire(monkeypatch):
    """torch's arguments for a CUDA tensor; the device is the receiver's own, whatever the learner's number is."""
    arguments = (
        *(torch.Tensor, torch.Size([15]), (1,), 0),
        *(torch.storage.TypedStorage, torch.uint8, 3, b"\x00handle\xff", 1 << 33, 512),
        *(False, b"counter", 7, b"event", True),
    )
    monkeypatch.setattr(reductions, "reduce_tensor", lambda buffer: (None, arguments))
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", lambda *rebuilt: rebuilt)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    exported = msgpack.unpackb(msgpack.packb(slots._export(torch.zeros(15))))
    rebuilt = slots._import(exported, 1)
    # Nor does it wait for an event of the learner's GPU, which has nothing left to do.
    assert rebuilt == (*arguments[:6], 1, *arguments[7:-1], False)
    inspect.signature(_REBUILD).bind(*rebuilt)


def test_the_classes_and_the_device_stand_where_torch_wants_them():
    parameters = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    assert [parameters[position] for position in slots._CLASSES] == ["tensor_cls", "storage_cls", "dtype"]
    places = [slots._DEVICE, slots._WAITS]
    assert [parameters[position] for position in places] == ["storage_device", "event_sync_required"]


def test_an_order_for_a_model_with_every_expert_by_itself_fits_the_wire():
    """61 layers of 256 experts with three matrices each: as many tensors as any published model has."""
    layout = Layout.plan(
        [
            TensorSpec(
                name=f"model.layers.{layer}.mlp.experts.{expert}.{matrix}_proj.weight",
                dtype="bfloat16",
                shape=(2048, 7168),
            )
            for layer in range(61)
            for expert in range(256)
            for matrix in ("gate", "up", "down")
        ],
        1 << 26,
    )
    order = UpdateOrder(
        version=1,
        transport="slot",
        deadline_s=60.0,
        details={"layout": layout.to_plain(), "checksums": [(1 << 64) - 1] * len(layout.specs)},
        probe_ids=((1, 2),),
        probe_logprobs=(-0.5,),
        initial_logprobs=(-0.5,),
    )
    frame = CODEC.encode(order, b"key")
    assert len(frame) <= MAX_ORDER_BYTES
    assert CODEC.decode(frame, b"key") == order
