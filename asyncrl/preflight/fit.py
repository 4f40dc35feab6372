"""What a run needs of this machine, and whether it fits, before any of its processes is started."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from asyncrl.config.model_files import require_loadable
from asyncrl.config.schema import Config
from asyncrl.config.sections import LearnerConfig, ModelConfig
from asyncrl.data.data_files import DataFiles
from asyncrl.errors import ConfigError, DataError
from asyncrl.hosting.gpus import count_gpus, has_instances
from asyncrl.hosting.machine import read_model, this_machine
from asyncrl.hosting.memory_use import ModelShape
from asyncrl.hosting.nvidia import peer_reads
from asyncrl.hosting.placement import misplaced_generators, place_slots, placement_of
from asyncrl.hosting.smi import is_installed
from asyncrl.preflight.checks.gpu import gpu_doubts, require_usable_gpus
from asyncrl.preflight.doubts import doubts, missing_device
from asyncrl.preflight.forecast import Forecast, estimates, forecast
from asyncrl.preflight.validate import validated_config

HOST_SLOTS = (
    "versions are published in memory of the host (weights.slots: host), because a generator's GPU cannot "
    "read the learner's"
)


def plan_of(config_path: Path, overrides: Sequence[str]) -> Forecast:
    """Forecast a run on this machine, with the doubts about its config. Raises ConfigError and DataError.

    With `cluster.kind`, it is the host of the learner's first ranks.
    """
    config = validated_config(config_path, overrides, asks_hub=True)
    try:
        rows = DataFiles(config).train_rows
    except DataError:
        rows = None
    has_generators = config.cluster.kind is None
    placed = with_slots(config, generators=has_generators)
    shape, machine = read_trained_shape(config.model, config.learner), this_machine(config.learner.device)
    seats = placement_of(config, len(machine.gpu_bytes), generators=None if has_generators else 0)
    plan = forecast(placed, shape, machine, rows=rows, teacher=_teacher(config), placement=seats)
    found = (*doubts(config, config_path, overrides), *[HOST_SLOTS] * (placed != config))
    return replace(plan, warnings=(*found, *plan.warnings))


def fitting(
    file: Path, overrides: Sequence[str], *, resumes: bool, generators: bool
) -> tuple[Config, list[str]]:
    """Return the config of a learner here, and doubts about it. Raises ConfigError and DataError."""
    config = validated_config(file, overrides, resumes=resumes, generators=generators, asks_hub=True)
    _require_usable(config)
    placed = with_slots(config, generators=generators)
    found = [*doubts(config, file, overrides, generators=generators), *gpu_doubts(config)]
    found += [HOST_SLOTS] * (placed != config)
    return placed, found + require_fit(placed, generators=None if generators else 0)


def with_slots(config: Config, *, generators: bool = True) -> Config:
    """Return the config with `weights.slots: host` if `auto` means that here, and `HOST_SLOTS` says why.

    Without `generators`, these are on other hosts.
    """
    gpus = count_gpus() if config.learner.device != "cpu" else 0
    placement = placement_of(config, gpus, generators=None if generators else 0)
    if config.weights.slots != "auto" or place_slots(config, placement, peer_reads) == "gpu":
        return config
    return config.model_copy(update={"weights": config.weights.model_copy(update={"slots": "host"})})


def require_fit(config: Config, *, generators: int | None = None, has_learner: bool = True) -> list[str]:
    """Raise ConfigError if the GPUs of this machine are too small, DataError if that cannot be computed.
    Return doubts about the computation.

    `generators` and the learner's ranks are those on this machine; None means as many as the config says.
    Without GPUs no model is read. Without nvidia-smi it cannot be computed, of which `gpu_doubts` warns.
    """
    machine = this_machine(config.learner.device) if is_installed() else None
    if not machine or not machine.gpu_bytes:
        return []
    placement = placement_of(config, len(machine.gpu_bytes), generators=generators, has_learner=has_learner)
    shape = read_trained_shape(config.model, config.learner if placement.ranks else None)
    teacher = _teacher(config) if placement.ranks else None
    plan = forecast(config, shape, machine, rows=None, teacher=teacher, placement=placement)
    if plan.misfits:
        raise ConfigError(f"{'; '.join(plan.misfits)}. `asyncrl plan` shows how this is computed")
    return list(estimates(shape))


def room_doubts(config: Config, count: int) -> list[str]:
    """Return doubts about `count` generators that join from here. Raises ConfigError and DataError."""
    _require_usable(config)
    require_room(config, count)
    return list(gpu_doubts(config))


def _require_usable(config: Config) -> None:
    """Raise ConfigError if this machine lacks the GPU that the config asks for, or has too old ones."""
    for text in missing_device(config):
        raise ConfigError(text)
    require_usable_gpus(config)


def require_room(config: Config, count: int) -> None:
    """Raise the errors of `require_fit` for `count` generators that join a run from this machine.

    Raise DataError if the model's directory on this machine cannot be loaded.
    """
    require_loadable(config.model.path, remote_code=config.model.trust_remote_code)
    if gpus := count_gpus() if config.learner.device != "cpu" else 0:
        placement = placement_of(config, gpus, generators=count, has_learner=False)
        for mistake in misplaced_generators(config, gpus, placement, instances=has_instances()):
            raise ConfigError(f"{mistake.keys[0]}: {mistake.text}")
    require_fit(config, generators=count, has_learner=False)


def read_trained_shape(model: ModelConfig, learner: LearnerConfig | None) -> ModelShape:
    """Return the shape of a model, with what its layers keep for the backward pass of a `learner`.

    Raises DataError if the config cannot be read or transformers does not know the architecture, ConfigError
    if the learner would refuse the model.
    """
    config, shape = read_model(model)
    if learner is None:
        return shape
    from asyncrl.trainer.kept import counted  # slow to import
    from asyncrl.trainer.miniature import require_agreement

    require_agreement(config)
    return counted(shape, config, model, learner.gradient_checkpointing)


def _teacher(config: Config) -> ModelShape | None:
    """Return the shape of a teacher that the learner holds."""
    return read_model(config.reference)[1] if config.algorithm.reference and not config.teacher else None
