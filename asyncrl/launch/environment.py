"""What the processes of a run inherit from the environment: what they need, and no secret of another
program."""

import os
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from asyncrl.config.schema import Config
from asyncrl.launch.gpus import visible_devices

PARENT_VARIABLE = "ASYNCRL_PARENT_PID"
RUN_VARIABLE = "ASYNCRL_RUN_DIRECTORY"
"""Marks every process of a run, so that `asyncrl down` can prove that none is left."""

_SYSTEM = (
    "PATH HOME USER LOGNAME SHELL LANG LANGUAGE LC_* TZ TMPDIR TMP TEMP XDG_* HOSTNAME LD_* DYLD_* MALLOC_*"
)
_NETWORK = (
    "HTTP_PROXY HTTPS_PROXY NO_PROXY ALL_PROXY http_proxy https_proxy no_proxy all_proxy SSL_CERT_* "
    "REQUESTS_CA_BUNDLE"
)
_PYTHON = "PYTHON* VIRTUAL_ENV CONDA_* CC CXX CPATH LIBRARY_PATH"
_DEVICES = "CUDA* NVIDIA_* NCCL_* GLOO_* UCX_* ROCM_* ROCR_* HIP_* OMP_* MKL_* KMP_* GOMP_* OPENBLAS_*"
_LIBRARIES = (
    "TORCH* PYTORCH_* TRITON_* VLLM_* DS_* DEEPSPEED_* HF_* HUGGINGFACE_* TRANSFORMERS_* TOKENIZERS_* "
    "SAFETENSORS_*"
)
EVERYBODY = " ".join((_SYSTEM, _NETWORK, _PYTHON, _DEVICES, _LIBRARIES)).split()
"""Patterns. HF_* has the token for gated models, which learner and generators load."""
LEARNER = "WANDB_* NETRC TRACKIO_*".split()  # noqa: SIM905 - the same form as above
"""Where trackers run."""


def inherited(patterns: Iterable[str]) -> dict[str, str]:
    """Our variables whose name matches one of `patterns`."""
    chosen = list(patterns)
    return {
        name: value
        for name, value in os.environ.items()
        if any(fnmatchcase(name, pattern) for pattern in chosen)
    }


def child_environment(
    config: Config, run_directory: Path, *, threads: int, gpus: Sequence[int], also: Iterable[str] = ()
) -> dict[str, str]:
    """Environment of a role process; without `gpus` it sees what we see. `also` are further patterns."""
    password = [config.store.password_env] if config.store.url else []
    visible = {"CUDA_VISIBLE_DEVICES": visible_devices(gpus)} if gpus else {}
    return (
        inherited([*EVERYBODY, *config.run.environment, *password, *also])
        | visible
        | {
            PARENT_VARIABLE: str(os.getpid()),
            RUN_VARIABLE: str(run_directory.resolve()),
            "OMP_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
            # vLLM writes its processes' titles, by default over their environment: they would lose the run's
            # mark
            "SPT_NOENV": "1",
        }
    )
