"""vLLM's arguments and environment from the configuration, with the differences between CPU and GPU."""

import os
import secrets
import threading
from collections.abc import Mapping
from typing import Any

from asyncrl.builds import CPU, build_of
from asyncrl.config.sections import GeneratorConfig, ModelConfig, SamplingConfig, WeightsConfig
from asyncrl.engine.base import OWNER_ENV, Device
from asyncrl.files import plain_path
from asyncrl.hosting.memory_use import CPU_KV_CACHE_GIB
from asyncrl.hosting.processes import SAFE_PATH

# Of a GPU that `learner.device: cpu` leaves to models which fit on a CPU.
SMALL_SHARE = 0.2
# Tokens per engine step. vLLM's library default is 2,048 also on a GPU; its server on an H100 has this.
STEP_TOKENS: dict[Device, int] = {"cpu": 2048, "cuda": 8192}
# On CPUs vLLM gives the model a process of its own, whose threads it binds. With `generator.threads` it binds
# none, and the model runs in the engine's core, as on a GPU: one start of Python less, and no process that
# spins while it waits for the other. The path stands here because vLLM would replace the name "uni".
WITHIN_CORE = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


def engine_args(
    model: ModelConfig,
    generator: GeneratorConfig,
    sampling: SamplingConfig,
    weights: WeightsConfig,
    *,
    device: Device,
) -> dict[str, Any]:
    """Keyword arguments of vLLM's `AsyncEngineArgs`."""
    arguments: dict[str, Any] = {
        "model": plain_path(model.path),
        "revision": model.revision,
        "dtype": model.dtype,
        "trust_remote_code": model.trust_remote_code,
        "tensor_parallel_size": generator.tensor_parallel,
        # By default all engines, and one after each restart, draw the same numbers.
        "seed": secrets.randbelow(2**31),
        "max_num_seqs": generator.max_running,
        "max_num_batched_tokens": max(STEP_TOKENS[device], generator.max_running),
        # Scoring the probe samples one token behind it.
        "max_model_len": max(sampling.max_tokens, weights.probe_tokens + 1),
        # Log-probabilities after temperature: those of the distribution that tokens are sampled from.
        "logprobs_mode": "processed_logprobs",
        # Also those of all tokens that a token could have been: the finite ones.
        "max_logprobs": max(sampling.top_k, 0),
        # The rollouts of a group share their prompt; a cache salt separates versions, see `VLLMEngine`.
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "enable_log_requests": False,
        "worker_extension_cls": "asyncrl.engine.vllm.receiver.VersionLoader",
    }
    arguments |= generator.vllm
    if model.dtype != "float32":
        # A bfloat16 logit between 8 and 16 is rounded to a step of 0.06.
        arguments["hf_overrides"] = {"head_dtype": "float32"} | arguments.get("hf_overrides", {})
    if model.has_4bit_base:
        arguments["quantization"] = "bitsandbytes"  # that of the package vllm-bnb-plugin
    if device == "cpu":
        # A group shares whole blocks of its prompt. On CPUs vLLM's have 128 tokens: few prompts fill one.
        arguments.setdefault("block_size", 32)
        if generator.threads is not None and generator.tensor_parallel == 1:
            arguments.setdefault("distributed_executor_backend", WITHIN_CORE)
    arguments["enforce_eager"] = generator.enforce_eager or device == "cpu"
    return arguments | memory_args(generator, device=device)


def memory_args(generator: GeneratorConfig, *, device: Device) -> dict[str, Any]:
    """Keyword arguments for the memory of an engine, or of a classifier."""
    share, kv_gib = generator.gpu_memory_utilization, generator.kv_cache_gib
    if device == "cpu":
        # A vLLM for GPUs runs on one all the same, and would ask for nearly all of it.
        share = None if build_of("torch") == CPU else share or SMALL_SHARE
        kv_gib = kv_gib or CPU_KV_CACHE_GIB
    # With a size of the cache vLLM does not measure free memory, which other processes change meanwhile.
    sizes = {"gpu_memory_utilization": share, "kv_cache_memory_bytes": kv_gib and int(kv_gib * 2**30)}
    return {name: size for name, size in sizes.items() if size is not None}


def adapter_args(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Further arguments of `AsyncEngineArgs`: one adapter, and it costs nothing at other layers."""
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": settings["r"],
        "lora_target_modules": settings["target_modules"],
    }


def fork_core(backend: object) -> None:
    """Let vLLM fork its core, which then imports nothing again, where that is sound, and spawn it elsewhere.

    `backend` is the executor in vLLM's arguments. Any but `WITHIN_CORE`, which is for CPUs, starts workers.
    As forks these would end, because this process is not their parent, refuse the pickles that they send to
    each other, and could not use CUDA after a library here had asked for it. A fork must not inherit a lock
    that another thread holds; those of asyncio that wait for a child hold none.
    """
    waiting = sum(one.name.startswith("asyncio-waitpid") for one in threading.enumerate())
    is_alone = len(os.listdir("/proc/self/task")) <= 1 + waiting
    is_sound = backend == WITHIN_CORE and is_alone
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork" if is_sound else "spawn"


def set_environment(generator: GeneratorConfig, *, device: Device) -> None:
    """Set the options that vLLM reads from the environment only; the engine's processes inherit them."""
    os.environ[OWNER_ENV] = str(os.getpid())
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ.update(SAFE_PATH)  # vLLM looks at the model's class with `python -m`
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "1")  # workers never exit by themselves
    if device == "cpu":
        # For one comparison of all logits vLLM would start a compiler, for which the first requests wait.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if device == "cpu" and generator.threads is not None:
        # vLLM would bind every engine of this host to the same first cores.
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        os.environ["OMP_NUM_THREADS"] = str(generator.threads)
