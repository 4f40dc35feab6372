"""Warnings about valid configs: settings that may be intended, but are usually mistakes."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from asyncrl.config.document import Node
from asyncrl.config.load import read_draft
from asyncrl.config.schema import Config
from asyncrl.config.sections import EvalConfig
from asyncrl.errors import ConfigError
from asyncrl.launch.gpus import count_gpus

LIMITS = ("max_prompt_tokens", "max_response_tokens")


def doubts(config: Config, path: Path, overrides: Sequence[str]) -> list[str]:
    """Warnings about a valid config, one line each."""
    root = read_draft(path, overrides).root
    return [*_evaluation(config), *_limits(config, root, path), *missing_device(config)]


def require_device(config: Config) -> None:
    """Raise ConfigError if the config asks for a GPU that this machine does not have."""
    for text in missing_device(config):
        raise ConfigError(text)


def missing_device(config: Config) -> Iterator[str]:
    """A warning if the config asks for a GPU that this machine does not have."""
    if config.learner.device == "cuda" and not count_gpus():
        yield (
            "learner.device is cuda, but this machine shows no GPU; set learner.device=auto or cpu, or "
            "look why with nvidia-smi and CUDA_VISIBLE_DEVICES"
        )


def _evaluation(config: Config) -> Iterator[str]:
    data = config.data
    if data.eval == data.train and (Path(data.train).is_file() or data.eval_split == data.split):
        yield (
            f"data.eval is data.train ({data.eval}): the evaluation is not held out; give it rows of its own"
        )
    if data.eval is None and config.eval != EvalConfig():
        yield (
            "eval is set, but data.eval is not: nothing will be evaluated; set data.eval, or drop the section"
        )


def _limits(config: Config, root: Node, path: Path) -> Iterator[str]:
    scale, limit = config.algorithm.aggregation.params.get("scale"), config.sampling.max_response_tokens
    if isinstance(scale, int | float) and scale != limit:
        yield (
            f"algorithm.aggregation.scale is {scale:g}, but sampling.max_response_tokens {limit}: losses "
            "are divided by the one, answers are as long as the other, as if the learning rate were "
            f"{limit / scale:.2g} times it; set it to {limit}"
        )
    if root.nearest(("data", "train")).place.rpartition(":")[0] != str(path):
        return
    # New data with the limits of the example that the config extends: its answers might be cut off after five
    # tokens.
    for key in LIMITS:
        place = root.nearest(("sampling", key)).place if root.has(("sampling", key)) else ""
        if place.rpartition(":")[0] not in ("", str(path)):
            yield (
                f"sampling.{key} is {getattr(config.sampling, key)}, which comes from {place}, not from "
                f"{path} with its own data; write into it what your texts need"
            )
