"""Warnings about valid configs: settings that may be intended, but are usually mistakes."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from asyncrl.builds import CPU, build_of
from asyncrl.config.document import Node
from asyncrl.config.load import read_draft
from asyncrl.config.schema import Config
from asyncrl.config.sections import EvalConfig
from asyncrl.errors import ConfigError
from asyncrl.hosting.gpus import count_gpus, has_instances
from asyncrl.hosting.placement import idle_gpus, placement_of

LIMITS = ("max_prompt_tokens", "max_response_tokens")


def doubts(config: Config, path: Path, overrides: Sequence[str], *, generators: bool = True) -> list[str]:
    """Return warnings about a valid config, one line each; without `generators`, these are on other hosts."""
    root = read_draft(Config, path, overrides).root
    found = (*_evaluation(config), *_limits(config, root, path), *missing_device(config))
    return [*found, *_idle(config, generators=generators)]


def require_device(config: Config) -> None:
    """Raise ConfigError if the config asks for a GPU that this machine does not have."""
    for text in missing_device(config):
        raise ConfigError(text)


def missing_device(config: Config) -> Iterator[str]:
    """Warn if the config asks for a GPU that this machine or its torch does not have."""
    if config.learner.device == "cuda" and not count_gpus():
        cure = "set learner.device=auto or cpu, or check nvidia-smi and CUDA_VISIBLE_DEVICES"
        yield f"learner.device is cuda, but this machine shows no GPU; {cure}"
    if config.learner.device != "cpu" and count_gpus() and build_of("torch") == CPU:
        cure = "install asyncrl[gpu], or set learner.device=cpu"
        yield f"this machine shows {count_gpus()} GPUs, but torch is built for CPUs only; {cure}"


def _idle(config: Config, *, generators: bool) -> Iterator[str]:
    """Warn of GPUs that no process of the run would use."""
    gpus = count_gpus() if config.learner.device != "cpu" else 0
    placement = placement_of(config, gpus, generators=None if generators else 0)
    idle, width = idle_gpus(placement, gpus), config.generator.tensor_parallel
    if not idle:
        return
    ranks, free = config.learner.ranks, gpus - config.learner.ranks
    cures = []
    if generators and len(placement.generators) < free // width:
        cures.append(f"leave generator.count null, which means {free // width}")
    else:
        if (ranks + len(idle)) % config.learner.sequence_parallel == 0 and not has_instances():
            cures.append(f"set learner.ranks={ranks + len(idle)} (a resumed run keeps its number)")
        if generators:
            cures.append(f"choose a generator.tensor_parallel that divides {free}")
    named = f"GPU{'s' * (len(idle) > 1)} {', '.join(map(str, idle))} of {gpus}"
    cures.append("hide what another program is to use with CUDA_VISIBLE_DEVICES")
    yield f"no process would use {named}: {', or '.join(cures)}"


def _evaluation(config: Config) -> Iterator[str]:
    data = config.data
    if data.eval == data.train and (Path(data.train).is_file() or data.eval_split == data.split):
        yield f"data.eval is data.train ({data.eval}): the evaluation is not held out; give it its own rows"
    if data.eval is None and config.eval != EvalConfig():
        yield "eval is set, but data.eval is not: nothing is evaluated; set data.eval, or drop the section"


def _limits(config: Config, root: Node, path: Path) -> Iterator[str]:
    scale, limit = config.algorithm.aggregation.params.get("scale"), config.sampling.max_response_tokens
    if isinstance(scale, int | float) and scale != limit:
        yield (
            f"algorithm.aggregation.scale, which divides losses, is {scale:g}, but "
            f"sampling.max_response_tokens is {limit}: the learning rate acts as if it were "
            f"{limit / scale:.2g} times as high; set scale to {limit}"
        )
    if root.nearest(("data", "train")).place.rpartition(":")[0] != str(path):
        return
    # New data with the limits of an extended example: answers might be cut off after a few tokens.
    for key in LIMITS:
        place = root.nearest(("sampling", key)).place if root.has(("sampling", key)) else ""
        if place.rpartition(":")[0] not in ("", str(path)):
            found = f"sampling.{key} is {getattr(config.sampling, key)} from {place}"
            yield f"{found}, but {path} names other data; set there what your texts need"
