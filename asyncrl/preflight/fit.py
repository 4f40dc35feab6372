"""Whether the processes of a run fit the GPUs of this machine, before any of them is started."""

from collections.abc import Callable
from functools import partial

from asyncrl.config.model_files import require_loadable
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.hosting.gpus import count_gpus, has_instances
from asyncrl.hosting.machine import this_machine
from asyncrl.hosting.placement import Placement, misplaced_generators, placement_of
from asyncrl.hosting.smi import is_installed
from asyncrl.preflight.forecast import estimates, forecast
from asyncrl.preflight.model_shape import read_trained_shape


def require_fit(config: Config, *, generators: bool) -> list[str]:
    """Raise ConfigError if the GPUs of this machine are too small, DataError if that cannot be computed.
    Return doubts about the computation.

    Without `generators`, these are on other hosts. Without GPUs no model is read. Without nvidia-smi it
    cannot be computed, of which `gpu_doubts` warns.
    """
    return _require_fit(config, partial(placement_of, config, generators=None if generators else 0))


def require_room(config: Config, count: int) -> None:
    """Raise the errors of `require_fit` for `count` generators that join a run from this machine.

    Raise DataError if the model's directory on this machine cannot be loaded.
    """
    require_loadable(config.model.path, remote_code=config.model.trust_remote_code)
    placed = partial(placement_of, config, generators=count, has_learner=False)
    gpus = count_gpus() if config.learner.device != "cpu" else 0
    wrong = misplaced_generators(config, gpus, placed(gpus), instances=has_instances()) if gpus else ()
    for mistake in wrong:
        raise ConfigError(f"{mistake.keys[0]}: {mistake.text}")
    _require_fit(config, placed)


def _require_fit(config: Config, placed: Callable[[int], Placement]) -> list[str]:
    machine = this_machine(config.learner.device) if is_installed() else None
    if not machine or not machine.gpu_bytes:
        return []
    placement = placed(len(machine.gpu_bytes))
    shape = read_trained_shape(config.model, config.learner if placement.ranks else None)
    plan = forecast(config, shape, machine, rows=None, placement=placement)
    if plan.misfits:
        raise ConfigError(f"{'; '.join(plan.misfits)}. `asyncrl plan` shows how this is computed")
    return list(estimates(shape))
