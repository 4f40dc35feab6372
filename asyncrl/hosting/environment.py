"""What a run's processes inherit from the environment: what they need, and no secret of another program."""

import os
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from asyncrl.config.reward_section import HttpReward
from asyncrl.config.schema import Config
from asyncrl.hosting.gpus import BY_BUS, visible_devices

PARENT_VARIABLE = "ASYNCRL_PARENT_PID"
# Marks every process of a run, so that `asyncrl down` can prove that none is left.
RUN_VARIABLE = "ASYNCRL_RUN_DIRECTORY"

# Lets torch count GPUs by NVML. CUDA itself would take memory on the GPU in every process that counts, and
# would not work in processes that are forked afterwards.
WITHOUT_CUDA = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}

# On a CPU the learner's threads share cores with the generators. A thread that waits at the end of a parallel
# region by spinning takes the core from the one that it waits for: libgomp (torch) and libiomp (vLLM) block.
SHARED_CORES = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}

# On a CPU activations come from glibc's heap, which gives a large one back to the system as soon as it is
# free: the system clears each page of the next one anew. With these settings a process keeps what it had.
ON_CPU = SHARED_CORES | {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}

# Patterns for every process, by line: system, network, Python, devices, libraries. HF_* has the token for
# gated models, which learner and generators load.
EVERY_PROCESS = """
    PATH HOME USER LOGNAME SHELL LANG LANGUAGE LC_* TZ TMPDIR TMP TEMP XDG_* HOSTNAME LD_* DYLD_* MALLOC_*
    HTTP_PROXY HTTPS_PROXY NO_PROXY ALL_PROXY http_proxy https_proxy no_proxy all_proxy
    SSL_CERT_* REQUESTS_CA_BUNDLE
    PYTHON* VIRTUAL_ENV CONDA_* CC CXX CPATH LIBRARY_PATH
    CUDA* NVIDIA_* NCCL_* GLOO_* UCX_* ROCM_* ROCR_* HIP_* OMP_* MKL_* KMP_* GOMP_* OPENBLAS_*
    TORCH* PYTORCH_* TRITON_* VLLM_* DS_* DEEPSPEED_*
    HF_* HUGGINGFACE_* TRANSFORMERS_* TOKENIZERS_* SAFETENSORS_*
"""
# Further patterns for the learner, where trackers run.
LEARNER = ("WANDB_*", "NETRC")


def child_environment(
    config: Config, run_directory: Path, *, threads: int, gpus: Sequence[int], also: Iterable[str] = ()
) -> dict[str, str]:
    """Return the environment of a role of a run; see `role_environment`. `also` are further patterns."""
    password = [config.store.password_env] if config.store.url else []
    keys = [
        remote.key_env
        for one in config.reward_functions.values()
        if isinstance(remote := one.remote, HttpReward) and remote.key_env
    ]
    patterns = [*config.run.environment, *password, *keys, *also]
    on_cpu = config.learner.device == "cpu"
    return role_environment(patterns, run_directory, threads=threads, gpus=gpus, on_cpu=on_cpu)


def role_environment(
    also: Iterable[str], run_directory: Path, *, threads: int, gpus: Sequence[int], on_cpu: bool
) -> dict[str, str]:
    """Return a role's variables: `EVERY_PROCESS`, and patterns `also`. Without `gpus` it sees all of ours."""
    # DeepSpeed takes a GPU where there is one.
    accelerator = {"DS_ACCELERATOR": "cpu"} if on_cpu else {}
    defaults = BY_BUS | (ON_CPU if on_cpu else {})
    visible = {"CUDA_VISIBLE_DEVICES": visible_devices(gpus)} if gpus else {}
    ours = WITHOUT_CUDA | {
        PARENT_VARIABLE: str(os.getpid()),
        RUN_VARIABLE: str(run_directory.resolve()),
        "OMP_NUM_THREADS": str(threads),
        # numpy's library would start threads at its import, and beside threads no generator forks its engine.
        "OPENBLAS_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        # By default vLLM writes process titles over the environment, and so over the run's mark.
        "SPT_NOENV": "1",
    }
    patterns = [*EVERY_PROCESS.split(), *also]
    inherited = {
        name: value
        for name, value in os.environ.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    }
    return defaults | inherited | visible | accelerator | ours
