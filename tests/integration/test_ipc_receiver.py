"""vLLM's own class for CUDA IPC under our receiver, as far as it goes without a GPU."""

import msgpack
import pytest
import torch

pytestmark = pytest.mark.integration


def test_handles_are_tensor_classes_again_before_vllm_sees_them(monkeypatch):
    pytest.importorskip("vllm")
    from asyncrl.engine.vllm.receiver import IpcReceiver
    from asyncrl.weights.ipc import _lower

    exported = (
        torch.Tensor,
        torch.Size([2]),
        (1,),
        0,
        torch.storage.TypedStorage,
        torch.float16,
        0,
        b"h",
        4,
        0,
        False,
    )
    update = {
        "names": ["a"],
        "dtype_names": ["float16"],
        "shapes": [[2]],
        "ipc_handles": [{"GPU-1": _lower(exported)}],
    }
    details = msgpack.unpackb(msgpack.packb({"init": None, "update": update}))
    seen = []
    receiver = object.__new__(IpcReceiver)
    receiver._packed_importer = type("Importer", (), {"close": lambda self: None})()
    receiver.receive_weights = seen.append
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    receiver._over_vllm(details, 5.0)
    assert seen[0].ipc_handles == [{"GPU-1": exported}]
    assert details["update"]["ipc_handles"][0]["GPU-1"][0] is None  # the order itself stays as it came
