"""vLLM alone, without anything of ours in its processes: the baseline of our engine on it."""

from collections.abc import Callable, Sequence
from typing import Any

from asyncrl.config.sections import GeneratorConfig, ModelConfig, SamplingConfig, WeightsConfig
from asyncrl.engine.base import Device
from asyncrl.engine.vllm.args import engine_args, set_environment

# What `LLM` sets itself, and what makes its workers ours.
_OURS = ("worker_extension_cls", "enable_log_requests")


def open_bare(
    model: ModelConfig,
    generator: GeneratorConfig,
    sampling: SamplingConfig,
    weights: WeightsConfig,
    *,
    device: Device,
) -> Callable[[Sequence[Sequence[int]], int], int]:
    """Start `vllm.LLM` with the engine's arguments. It ends with this process.

    The result samples `count` responses to each prompt, all in one call, and returns the number of tokens.
    """
    set_environment(generator, device=device)
    from vllm import LLM, SamplingParams

    arguments = engine_args(model, generator, sampling, weights, device=device)
    llm: Any = LLM(**{name: value for name, value in arguments.items() if name not in _OURS})

    def sample(prompts: Sequence[Sequence[int]], count: int) -> int:
        params = SamplingParams(
            n=count,
            temperature=1.0,
            max_tokens=sampling.max_response_tokens,
            detokenize=False,
            logprobs=0,
        )
        inputs = [{"prompt_token_ids": list(ids)} for ids in prompts]
        outputs = llm.generate(inputs, params, use_tqdm=False)
        return sum(len(completion.token_ids) for output in outputs for completion in output.outputs)

    return sample
