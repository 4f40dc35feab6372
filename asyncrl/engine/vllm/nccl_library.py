"""The NCCL of this machine, as vLLM loads it."""

import importlib

from asyncrl.errors import EngineError

LEAST = "2.29.7"
CURE = (
    f"pip install 'nvidia-nccl-cu13>={LEAST}' (or -cu12, as torch's CUDA), or set VLLM_NCCL_SO_PATH to a "
    "newer libnccl.so.2"
)


def nccl_version() -> str:
    """Return the version that vLLM loads. Raises EngineError.

    With a library that lacks a function, vLLM's broadcasts would do nothing.
    """
    importlib.import_module("torch")  # brings its own NCCL
    wrapper = importlib.import_module("vllm.distributed.device_communicators.pynccl_wrapper")
    try:
        return str(wrapper.NCCLLibrary().ncclGetVersion())
    except (AttributeError, OSError, RuntimeError, ValueError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise EngineError(f"vLLM cannot use this NCCL ({lines[-1]}); it needs {LEAST} or newer") from error
