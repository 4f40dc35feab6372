"""Tokens per second of the generator's engine, and of vLLM alone for the same prompts and arguments."""

import asyncio
import time
from dataclasses import dataclass
from typing import Literal

from asyncrl.config.sections import GeneratorConfig, ModelConfig, SamplingConfig, WeightsConfig
from asyncrl.engine.base import Device, Engine, SamplingSpec

PROMPT_TOKENS = 32
DISTINCT = 400  # token ids in the prompts; a model has more
Parts = tuple[ModelConfig, GeneratorConfig, SamplingConfig, WeightsConfig]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What an engine is started with and asked for."""

    model: str
    device: Device
    dtype: Literal["float32", "bfloat16"]
    running: int  # `generator.max_running`
    samples: int = 8  # of each prompt
    tokens: int = 128  # of each response, at most
    threads: int | None = 1  # on a CPU
    memory_share: float | None = None  # of a GPU

    def parts(self) -> Parts:
        """Return the sections of a config with which an engine starts."""
        generator = GeneratorConfig(
            max_running=self.running,
            kv_cache_gib=1.0 if self.device == "cpu" else None,
            threads=self.threads,
            gpu_memory_utilization=self.memory_share,
        )
        return (
            ModelConfig(path=self.model, dtype=self.dtype),
            generator,
            SamplingConfig(max_prompt_tokens=PROMPT_TOKENS, max_response_tokens=self.tokens),
            WeightsConfig(),
        )


def prompts(count: int) -> list[list[int]]:
    """Return `count` prompts of `PROMPT_TOKENS` tokens, all of them different."""
    return [
        [1, *(3 + (7 * prompt + 13 * token) % DISTINCT for token in range(PROMPT_TOKENS - 1))]
        for prompt in range(count)
    ]


async def sampled_per_s(engine: Engine, load: Load, count: int) -> float:
    """Return the tokens per second of `VLLMEngine.sample`, called for `count` prompts in parallel."""
    spec = SamplingSpec(temperature=1.0, max_response_tokens=load.tokens)
    started_s = time.perf_counter()
    calls = (engine.sample(ids, load.samples, spec) for ids in prompts(count))
    groups = await asyncio.gather(*calls)
    tokens = sum(len(rollout.response_ids) for group in groups for rollout in group)
    return tokens / (time.perf_counter() - started_s)
