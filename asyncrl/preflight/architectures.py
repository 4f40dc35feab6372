"""Mistakes in the models of a config: architectures, a teacher, an adapter or layers that cannot be used.

Architectures are refused by the names in a model's config.json, without torch. `trainer/miniature.py` finds
the same from the code of any architecture; a test compares the two.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from asyncrl.config.base import Mistake
from asyncrl.config.model_files import image_problem
from asyncrl.config.rules import lacking_room
from asyncrl.config.schema import Config
from asyncrl.config.sections import ModelConfig
from asyncrl.errors import ConfigError, DataError
from asyncrl.lora import require_usable

STATE = "layers that carry a state from token to token, which would leak between packed sequences"
OWN = "an attention of its own, which does not take packed sequences"
BIAS = "an output layer with a bias, which the learner's lacks"
RANDOM = "experts that are chosen at random in training"
SINKS = "attention with sinks, which packed attention lacks, and published weights in MXFP4"
KINDS = {
    STATE: "bamba falcon_h1 falcon_mamba jamba kimi_linear lfm2 lfm2_moe mamba mamba2 minimax nemotron_h "
    "olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next recurrent_gemma rwkv xlstm "
    "zamba zaya",
    OWN: "bloom deepseek_v32 falcon glm_moe_dsa gpt_neo gpt_neox_japanese gptj llama4 llama4_text moshi mpt "
    "nemotron openai-gpt stablelm xglm",
    BIAS: "codegen phi",
    SINKS: "gpt_oss",
    RANDOM: "phimoe",
}
REFUSED = {kind: reason for reason, kinds in KINDS.items() for kind in kinds.split()}
ATTENTION = "attention"
LINEAR = "linear"


def architecture_problems(
    model: ModelConfig, key: str = "model.path", *, images_key: str | None = None
) -> Iterator[Mistake]:
    """Say why the learner cannot train the model in a local directory, if a reason is known.

    With an `images_key`, also why it could not see the images of rows.
    """
    try:
        config = json.loads((Path(model.path) / "config.json").read_bytes())
        kind = config["model_type"]
        layers = [*map(str, config.get("text_config", config).get("layer_types") or ())]
    except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError):
        return  # loading says what is wrong with it
    if images_key is not None and (problem := image_problem(str(kind))):
        yield Mistake(("data.images_key", "model.path"), f"{model.path}: {problem}")
    stateful = sorted({each for each in layers if ATTENTION not in each or LINEAR in each})
    reason = REFUSED.get(str(kind)) or (f"{STATE} ({', '.join(stateful)})" if stateful else None)
    if reason is not None:
        found = f"{model.path} is of the architecture {kind}, which the learner cannot train: it has {reason}"
        cure = "choose one that docs/models.md calls right, such as llama, qwen3 or mistral"
        yield Mistake((key,), f"{found}; {cure}")


def teacher_problems(config: Config) -> Iterator[Mistake]:
    """Find a teacher that the learner cannot run, or that has other tokens than the policy."""
    if config.algorithm.reference is None or config.algorithm.reference.path is None:
        return
    key = "algorithm.reference.path"
    if not (config.teacher and config.generator.engine == "vllm"):  # which then runs it, not the learner
        yield from architecture_problems(config.reference, key)
    if all((Path(one.path) / "tokenizer.json").is_file() for one in (config.model, config.reference)):
        from asyncrl.data.prompts import other_tokens  # it imports transformers

        try:
            text = other_tokens(config)
        except (DataError, OSError, ValueError, LookupError):  # `file_problems` or loading reports it
            return
        if text:
            yield Mistake((key,), text)


def model_problems(config: Config) -> Iterator[Mistake]:
    """Find an adapter or layers that cannot be used, and a store without room for the experts of tokens."""
    model = config.model
    if model.lora is None and not model.router_replay:
        return
    try:
        if model.lora is not None:
            require_usable(model.lora, model.path)
        if (Path(model.path) / "config.json").is_file():
            from asyncrl.hosting.machine import read_model  # it imports torch and transformers

            read_model(model)
            if model.router_replay:
                from asyncrl.preflight.forecast import frame_bytes

                for one in config.training:
                    yield from lacking_room(one, frame_bytes(one))
    except ConfigError as error:
        key, _, text = str(error).partition(": ")
        yield Mistake((key,), text)
    except DataError:  # `file_problems` reports it
        return
