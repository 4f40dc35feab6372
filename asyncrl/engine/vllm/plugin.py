"""The vLLM plugin: vLLM loads it in each of its processes before the model, so it imports almost nothing."""

import os

from asyncrl.engine.base import OWNER_ENV
from asyncrl.processes import die_with_spawner

# Registered as `asyncrl-NAME`.
_RECEIVERS = {"weights": "Receiver", "nccl": "NcclReceiver"}


def register() -> None:
    """Register the receivers, and let engine processes end when their generator ends, even by SIGKILL."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for name, receiver in _RECEIVERS.items():
        if (backend := f"asyncrl-{name}") not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(backend, "asyncrl.engine.vllm.receiver", receiver)
    owner = os.environ.get(OWNER_ENV)
    if owner is not None and int(owner) != os.getpid():
        die_with_spawner()
