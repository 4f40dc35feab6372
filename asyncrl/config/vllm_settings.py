"""Which arguments of vLLM's engine `generator.vllm` may have: all of vLLM's but the refused ones.

It also says with which engines a run can train an adapter, and keep its base in 4 bits.
"""

import functools
from collections.abc import Iterator

from asyncrl.config.base import Mistake, broken
from asyncrl.config.library_fields import fields_in, misnamed, source_in
from asyncrl.config.run_fields import RunFields
from asyncrl.config.sections import GeneratorConfig

_WORKERS = "weights are sent to the generator.tensor_parallel workers of one engine on this host"
_CACHE = "blocks of several generators, or of one before and after a restart, would be of different weights"
_SAMPLED = "the learner needs the log-probabilities of the distribution that tokens are sampled from"
_OWN_LOGS = "asyncrl has its own counters and logs"

_PROCESSES = """pipeline_parallel_size data_parallel_size data_parallel_rank data_parallel_start_rank
    data_parallel_size_local data_parallel_address data_parallel_rpc_port data_parallel_backend
    data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb
    nnodes node_rank master_addr master_port"""

REFUSED: dict[str, str] = {
    "model": "set model.path",
    "revision": "set model.revision",
    "dtype": "set model.dtype",
    "trust_remote_code": "set model.trust_remote_code",
    "tensor_parallel_size": "set generator.tensor_parallel",
    "max_num_seqs": "set generator.max_running",
    "max_model_len": "set sampling.max_prompt_tokens and sampling.max_response_tokens",
    "gpu_memory_utilization": "set generator.gpu_memory_utilization",
    "kv_cache_memory_bytes": "set generator.kv_cache_gib",
    "enforce_eager": "set generator.enforce_eager",
    "weight_transfer_config": "set weights.transport",
    "tokenizer": "learner and generators must have the same tokens; change the files of model.path",
    "tokenizer_revision": "learner and generators must have the same tokens; set model.revision",
    "logprobs_mode": _SAMPLED,
    "max_logprobs": "set sampling.top_k",
    "logits_processors": f"{_SAMPLED}, and does not know these",
    "watermark_config": f"{_SAMPLED}, and does not know the watermark",
    "generation_config": "set sampling",
    "override_generation_config": "set sampling",
    "enable_prefix_caching": "groups share their prompt, and a salt separates the versions",
    "disable_log_stats": _OWN_LOGS,
    "enable_log_requests": _OWN_LOGS,
    "kv_transfer_config": _CACHE,
    "kv_offloading_backend": _CACHE,
    "load_format": "version 0 must be the model of model.path, which the learner has loaded",
    **dict.fromkeys(("enable_lora", "max_loras", "max_lora_rank", "lora_target_modules"), "set model.lora"),
    "worker_cls": "weights are received in vLLM's own worker",
    "worker_extension_cls": "weights are received in asyncrl's own extension",
    "runner": "generators generate",
    "convert": "generators generate",
    "distributed_executor_backend": "the engine's processes must end with their generator",
    "device_ids": "asyncrl deals the GPUs to learner and generators",
    **dict.fromkeys(_PROCESSES.split(), _WORKERS),
    "data_parallel_size": f"{_WORKERS}; raise generator.count",
}
"""What asyncrl sets, or what would break a promise, and the reason."""

# The values of kv_cache_dtype that round no more than a model in bfloat16 does.
_HALVES = ("float16", "bfloat16")


def quantisation(generator: GeneratorConfig, dtype: str) -> str:
    """Return as text the settings that give the engine fewer bits than a learner in `dtype`, if any."""
    settings = generator.vllm
    found = {name: settings.get(name) for name in ("quantization", "kv_cache_dtype")}
    if found["kv_cache_dtype"] in (None, "auto", dtype, *(_HALVES if dtype in _HALVES else ())):
        del found["kv_cache_dtype"]
    return ", ".join(f"{name}: {value}" for name, value in found.items() if value is not None)


def engine_takes_the_settings(run: RunFields) -> Iterator[Mistake]:
    """A rule: find unknown names where vLLM is installed, and what another engine than vLLM cannot do."""
    generator = run.generator
    known = known_settings() if generator.vllm else None
    lists, kind = "docs.vllm.ai lists them (engine arguments)", "argument of the installed vLLM"
    yield from misnamed("generator.vllm", generator.vllm, REFUSED.get, known, kind, lists)
    if run.sampling.min_p and generator.vllm.get("speculative_config"):
        found = "is set, which vLLM does not do with generator.vllm.speculative_config"
        yield broken("sampling.min_p generator.vllm", f"{found}; drop one of them")
    only = {"tensor_parallel": 1, "recompute_kv": False, "vllm": {}} if generator.engine != "vllm" else {}
    for name, default in only.items():
        if (found := getattr(generator, name)) != default:
            text = f"generator.{name} is {found}, which only generator.engine: vllm can do; drop one of them"
            yield broken(f"generator.{name} generator.engine", text)


def adapter_fits_its_base(run: RunFields) -> Iterator[Mistake]:
    """A rule: generators can begin as the learner does, and nothing needs the whole numbers of 4 bits."""
    lora, key = run.model.lora, "model.lora.load_in_4bit"
    if lora is None:
        return
    if lora.start is not None and lora.sync == "merged":
        text = "model.lora.start is set, but model.lora.sync is merged: generators begin with model.path "
        text += "alone; set sync: adapter, or merge the adapter into the model, and give that as model.path"
        yield broken("model.lora.sync model.lora.start", text)
    on_vllm, given = run.generator.engine == "vllm", run.generator.vllm.get("quantization")
    is_other = on_vllm and given not in (None, "bitsandbytes")
    for is_wrong, other, text in (
        (lora.sync == "merged", "model.lora.sync", "is merged, which sends whole weights; set sync: adapter"),
        (run.learner.zero_stage == 3, "learner.zero_stage", "is 3, which cannot cut them; set at most 2"),
        (is_other, "generator.vllm", f"has quantization: {given}, another base; drop one of them"),
        (
            on_vllm and run.model.dtype != "bfloat16",
            "model.dtype",
            f"is {run.model.dtype}, and vLLM computes with such weights in bfloat16; set it to that, or "
            "generator.engine: transformers",
        ),
    ):
        if lora.load_in_4bit and is_wrong:
            yield broken(f"{key} {other}", f"{key} is true, but {other} {text}")


@functools.cache
def known_settings() -> frozenset[str] | None:
    """The arguments of vLLM's engine, None where vLLM is not installed.

    They are read from its source: importing vLLM takes seconds, and the learner needs nothing of it.
    """
    source = source_in("vllm", "engine", "arg_utils.py")
    if source is None:
        return None
    fields = fields_in(source)
    return frozenset(name for kind in ("EngineArgs", "AsyncEngineArgs") for name in fields[kind][1])
