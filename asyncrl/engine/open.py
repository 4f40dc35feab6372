"""Opens the engine that `generator.engine` names, and what else of an engine's library the project uses.

Nothing else imports `engine.vllm`: its library takes seconds to load, and a machine may lack it.
"""

from asyncrl.config.sections import GeneratorConfig, ModelConfig, SamplingConfig, WeightsConfig
from asyncrl.engine.base import Device, Engine
from asyncrl.engine.vllm.classifier import open_classifier as open_classifier


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
