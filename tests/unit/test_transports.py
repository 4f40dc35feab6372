import inspect

import msgpack
import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from asyncrl.config.sections import WeightsConfig
from asyncrl.engine.vllm.plugin import _RECEIVERS
from asyncrl.weights.base import choose_transport, receivable
from asyncrl.weights.ipc import _CLASSES, _lower, lift_update

NAMES = ["disk", "gloo", "ipc", "nccl"]


@pytest.mark.parametrize(("device", "expected"), [("cuda", "nccl"), ("cpu", "gloo")])
def test_auto_is_the_devices_own_and_any_other_word_stays(device, expected):
    assert choose_transport(WeightsConfig().transport, device=device) == expected
    assert [choose_transport(name, device=device) for name in NAMES] == NAMES


@pytest.mark.parametrize("transport", NAMES)
def test_an_engine_receives_what_it_was_started_for_and_what_every_receiver_takes(transport):
    assert receivable(transport)[0] == transport
    assert set(receivable(transport)) == {transport, "gloo", "disk"}
    assert len(set(receivable(transport))) == len(receivable(transport))
    assert sorted(_RECEIVERS) == NAMES


def exported(dtype):
    """As torch reduces a CUDA tensor: the arguments of `rebuild_cuda_tensor`."""
    return (
        *(torch.Tensor, torch.Size([3, 5]), (5, 1), 0),
        *(torch.storage.TypedStorage, dtype, 0, b"\x00handle\xff", 1 << 33, 512),
        *(False, b"counter", 7, b"event", True),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exported_tensors_are_the_same_after_the_wire(dtype):
    update = {
        "names": ["a", "b"],
        "dtype_names": [str(dtype).removeprefix("torch."), "float16"],
        "shapes": [[3, 5], [3, 5]],
        "ipc_handles": [{"GPU-1": _lower(exported(dtype))}, {"GPU-1": _lower(exported(torch.float16))}],
    }
    lifted = lift_update(msgpack.unpackb(msgpack.packb(update)))
    assert lifted["ipc_handles"] == [{"GPU-1": exported(dtype)}, {"GPU-1": exported(torch.float16)}]
    assert {name: lifted[name] for name in ("names", "shapes")} == {
        name: update[name] for name in ("names", "shapes")
    }
    for handle in lifted["ipc_handles"]:
        bound = inspect.signature(rebuild_cuda_tensor).bind(*handle["GPU-1"]).arguments
        assert bound["tensor_cls"] is torch.Tensor
        assert isinstance(bound["dtype"], torch.dtype)


def test_the_classes_stand_where_torch_wants_them():
    parameters = list(inspect.signature(rebuild_cuda_tensor).parameters)
    assert [parameters[position] for position in _CLASSES] == ["tensor_cls", "storage_cls", "dtype"]
