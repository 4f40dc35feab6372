"""Reads the shape of a model as the learner trains it."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import asyncrl
from asyncrl.config.sections import LearnerConfig, ModelConfig
from asyncrl.files import replace_text
from asyncrl.hosting.machine import read_model
from asyncrl.hosting.memory_use import ModelShape

# Shapes that were read, by what they follow from: torch and the model's class take seconds to import.
REMEMBERED = Path(".cache/asyncrl/shapes")


def read_trained_shape(model: ModelConfig, learner: LearnerConfig | None) -> ModelShape:
    """Return the shape of a model, with what its layers keep for the backward pass of a `learner`.

    Raises:
        DataError: the config cannot be read, or transformers does not know the architecture.
        ConfigError: the learner would refuse the model.
    """
    place = _place(model, learner)
    if place is not None:
        with suppress(OSError, ValueError, TypeError):  # not there, or not what was written
            return ModelShape(**json.loads(place.read_text()))
    shape = _read(model, learner)
    if place is not None:
        with suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            replace_text(place, json.dumps(asdict(shape)))
    return shape


def _read(model: ModelConfig, learner: LearnerConfig | None) -> ModelShape:
    config, shape = read_model(model)
    if learner is None:
        return shape
    from asyncrl.trainer.kept import counted  # slow to import
    from asyncrl.trainer.miniature import require_agreement

    require_agreement(config)
    return counted(shape, config, model, learner.gradient_checkpointing)


def _place(model: ModelConfig, learner: LearnerConfig | None) -> Path | None:
    """Return the file of what was read; None if it follows from more than files of this host and our code."""
    if model.trust_remote_code:
        return None
    package = Path(asyncrl.__file__).parent
    sources = [*sorted((package / "trainer").rglob("*.py")), *sorted((package / "hosting").glob("m*.py"))]
    try:
        parts = [
            (Path(model.path) / "config.json").read_bytes(),
            model.model_dump_json(exclude={"path"}).encode(),
            str(learner and learner.gradient_checkpointing).encode(),
            *(version(name).encode() for name in ("torch", "transformers", "peft")),
            *(path.read_bytes() for path in (*sources, package / "lora.py", package / "routing.py")),
        ]
        home = Path.home()
    except (OSError, RuntimeError):  # a name of the hub, no home directory
        return None
    digest = hashlib.blake2b(b"".join(hashlib.blake2b(part).digest() for part in parts), digest_size=16)
    return home / REMEMBERED / f"{digest.hexdigest()}.json"


def estimates(shape: ModelShape) -> Iterator[str]:
    """Warn of a number that is less certain than the others, because of the model's architecture."""
    if shape.uncounted:
        yield (
            "the activations of this architecture are estimated, as those of Llama's layers, because torch "
            f"cannot count them without data ({shape.uncounted}): the learner may need much more; compare "
            "memory/allocated_bytes with memory/planned_bytes in the first steps, and lower "
            "learner.tokens_per_microbatch if it runs out of memory"
        )
