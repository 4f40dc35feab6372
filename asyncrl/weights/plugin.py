"""The vLLM plugin: loaded by vLLM in every one of its processes, before a model is there. Imports almost nothing."""

import multiprocessing
import os

from asyncrl.processes import die_with_parent

OWNER_ENV = "ASYNCRL_ENGINE_OWNER"
"""Process id of the generator that an engine process belongs to."""

BACKENDS = {"gloo": "asyncrl", "disk": "asyncrl", "nccl": "asyncrl-nccl", "ipc": "asyncrl-ipc"}
"""Transport to the name that its receiver is registered under; each of them takes gloo and disk too."""

_RECEIVERS = {"asyncrl": "Receiver", "asyncrl-nccl": "NcclReceiver", "asyncrl-ipc": "IpcReceiver"}


def register() -> None:
    """Make the receivers known, and have engine processes die with their generator, however it dies."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory  # noqa: PLC0415 - see the module

    for name, receiver in _RECEIVERS.items():
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, "asyncrl.weights.vllm_receiver", receiver)
    owner, parent = os.environ.get(OWNER_ENV), multiprocessing.parent_process()
    if owner is not None and int(owner) != os.getpid() and parent is not None:
        die_with_parent(parent.pid)
