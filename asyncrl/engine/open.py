"""Opens the engine that `generator.engine` names, and what else of an engine's library the project uses.

Nothing else imports `engine.vllm`: its library takes seconds to load, and a machine may lack it.
"""

from collections.abc import Awaitable, Callable

from asyncrl.config.sections import GeneratorConfig, ModelConfig, SamplingConfig, WeightsConfig
from asyncrl.engine.base import Device, Engine


async def open_engine(
    model: ModelConfig,
    generator: GeneratorConfig,
    sampling: SamplingConfig,
    weights: WeightsConfig,
    *,
    device: Device,
) -> Engine:
    """Load the model as version 0; blocks the loop until the engine is warm.

    Must not run in a thread of its own: the kernel kills vLLM's processes when that thread ends.

    Raises ConfigError if the engine does not know the type or value of a setting, such as one of
    `generator.vllm`; EngineError if it did not start.
    """
    if generator.engine == "transformers":
        from asyncrl.engine.transformers import TransformersEngine

        return TransformersEngine.start(model, generator, weights, device=device)
    from asyncrl.engine.vllm.engine import VLLMEngine

    return await VLLMEngine.start(model, generator, sampling, weights, device=device)


def open_classifier(
    model: str, dtype: str, generator: GeneratorConfig, *, max_tokens: int, device: Device
) -> Callable[[list[int]], Awaitable[float]]:
    """Load a reward model with vLLM; the result computes its number for token ids, many at the same time.

    It raises EngineError for ids that the model cannot take. As `open_engine`, not for a thread of its own.
    """
    from asyncrl.engine.vllm.classifier import open_classifier

    return open_classifier(model, dtype, generator, max_tokens=max_tokens, device=device)
