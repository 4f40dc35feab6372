"""The vLLM plugin: loaded by vLLM in every one of its processes, before a model is there. Imports almost nothing."""

import os

from asyncrl.engine.base import OWNER_ENV
from asyncrl.processes import die_with_spawner

# By transport, registered as `asyncrl-TRANSPORT`; each of them takes gloo and disk too.
_RECEIVERS = {"gloo": "Receiver", "disk": "Receiver", "nccl": "NcclReceiver", "ipc": "IpcReceiver"}


def register() -> None:
    """Make the receivers known, and have engine processes die with their generator, however it dies."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for transport, receiver in _RECEIVERS.items():
        if (name := f"asyncrl-{transport}") not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, "asyncrl.engine.vllm.receiver", receiver)
    owner = os.environ.get(OWNER_ENV)
    if owner is not None and int(owner) != os.getpid():
        die_with_spawner()
