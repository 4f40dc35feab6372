"""The vLLM plugin: vLLM loads it in each of its processes before the model, so it imports almost nothing."""

import os

from asyncrl.engine.base import OWNER_ENV
from asyncrl.processes import die_with_spawner

# Receiver by transport, registered as `asyncrl-TRANSPORT`; each of them supports gloo and disk too.
_RECEIVERS = {"gloo": "Receiver", "disk": "Receiver", "nccl": "NcclReceiver", "ipc": "IpcReceiver"}


def register() -> None:
    """Register the receivers, and let engine processes end when their generator ends, even by SIGKILL."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for transport, receiver in _RECEIVERS.items():
        if (name := f"asyncrl-{transport}") not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, "asyncrl.engine.vllm.receiver", receiver)
    owner = os.environ.get(OWNER_ENV)
    if owner is not None and int(owner) != os.getpid():
        die_with_spawner()
