"""A reward model on vLLM: a sequence classifier with one label, in this process."""

import itertools
from collections.abc import Awaitable, Callable
from typing import Any

from asyncrl.config.sections import GeneratorConfig
from asyncrl.engine.base import Device
from asyncrl.engine.vllm.args import STEP_TOKENS, WITHIN_CORE, memory_args, set_environment
from asyncrl.errors import EngineError
from asyncrl.files import plain_path

Score = Callable[[list[int]], Awaitable[float]]
# Sequences of one step of the engine: as many as a generator asks about at the same time.
CALLS_AT_ONCE = 256


def classifier_args(
    model: str, dtype: str, generator: GeneratorConfig, *, max_tokens: int, device: Device
) -> dict[str, Any]:
    """Keyword arguments of vLLM's engine."""
    return {
        "model": plain_path(model),
        "dtype": dtype,
        "runner": "pooling",
        "convert": "classify",
        "max_model_len": max_tokens,
        # vLLM's defaults for a library are fewer sequences, and on a GPU fewer tokens.
        "max_num_seqs": CALLS_AT_ONCE,
        "max_num_batched_tokens": max(STEP_TOKENS[device], max_tokens),
        "disable_log_stats": True,
        "enforce_eager": device == "cpu",
    } | memory_args(generator, device=device)


def open_classifier(
    model: str, dtype: str, generator: GeneratorConfig, *, max_tokens: int, device: Device
) -> Score:
    """Load a reward model with vLLM; the result computes its number for token ids, many at the same time.

    It raises EngineError for ids that the model cannot take. As `engine.open.open_engine`, it must not run in
    a thread of its own.
    """
    set_environment(generator, device=device)
    from vllm import AsyncEngineArgs, PoolingParams
    from vllm.exceptions import VLLMClientError
    from vllm.inputs import tokens_input
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = classifier_args(model, dtype, generator, max_tokens=max_tokens, device=device)
    if device == "cpu" and generator.threads is not None:
        arguments["distributed_executor_backend"] = WITHIN_CORE
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    numbers, pad = itertools.count(), getattr(llm.model_config.hf_text_config, "pad_token_id", None)

    async def score(token_ids: list[int]) -> float:
        # Training reads the last token that does not pad, also where the token that ends an answer pads.
        while len(token_ids) > 1 and token_ids[-1] == pad:
            token_ids = token_ids[:-1]
        # The model's number itself: after the sigmoid, all good answers would be near 1.
        params = PoolingParams(task="classify", use_activation=False)
        output = None
        try:
            async for newest in llm.encode(tokens_input(token_ids), params, request_id=str(next(numbers))):
                output = newest
        except (VLLMClientError, ValueError) as error:
            raise EngineError(f"vLLM refused a request of {len(token_ids)} tokens: {error}") from error
        assert output is not None
        (value,) = output.outputs.data.tolist()
        return float(value)

    return score
