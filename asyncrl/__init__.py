"""Asynchronous reinforcement learning of language models: sampling and training never wait for each other."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from asyncrl.builds import hide_foreign_builds
from asyncrl.version import __version__ as __version__

if TYPE_CHECKING:
    from asyncrl.algo.corrections import Correction
    from asyncrl.algo.filters import GroupOutcome
    from asyncrl.algo.group_rewards import GroupRewards
    from asyncrl.algo.losses import TokenLoss
    from asyncrl.algo.tokens import TokenBatch
    from asyncrl.api import Result, Run, open, start, train
    from asyncrl.batch.plan import Plan
    from asyncrl.config.schema import Config
    from asyncrl.errors import (
        AsyncRLError,
        CheckpointError,
        ConfigError,
        ControlError,
        DataError,
        EngineError,
        MissingLibrary,
        RewardError,
        RunError,
        RunNotUp,
        StoreError,
        TransferError,
    )
    from asyncrl.learner import Step
    from asyncrl.telemetry.base import SampleRecord
    from asyncrl.telemetry.status import StatusSnapshot
    from asyncrl.types import Group, Rollout, VersionSpan

# The public names by module: runs and their results, errors, and the types that a user's own functions see.
_PLACES = {
    "asyncrl.api": "Result Run open start train",
    "asyncrl.config.schema": "Config",
    "asyncrl.telemetry.base": "SampleRecord",
    "asyncrl.telemetry.status": "StatusSnapshot",
    "asyncrl.errors": "AsyncRLError CheckpointError ConfigError ControlError DataError EngineError "
    "MissingLibrary RewardError RunError RunNotUp StoreError TransferError",
    "asyncrl.types": "Group Rollout VersionSpan",
    "asyncrl.batch.plan": "Plan",
    "asyncrl.learner": "Step",
    "asyncrl.algo.tokens": "TokenBatch",
    "asyncrl.algo.losses": "TokenLoss",
    "asyncrl.algo.corrections": "Correction",
    "asyncrl.algo.filters": "GroupOutcome",
    "asyncrl.algo.group_rewards": "GroupRewards",
}
_MODULES = {name: module for module, names in _PLACES.items() for name in names.split()}
__all__ = [
    "AsyncRLError",
    "CheckpointError",
    "Config",
    "ConfigError",
    "ControlError",
    "Correction",
    "DataError",
    "EngineError",
    "Group",
    "GroupOutcome",
    "GroupRewards",
    "MissingLibrary",
    "Plan",
    "Result",
    "RewardError",
    "Rollout",
    "Run",
    "RunError",
    "RunNotUp",
    "SampleRecord",
    "StatusSnapshot",
    "Step",
    "StoreError",
    "TokenBatch",
    "TokenLoss",
    "TransferError",
    "VersionSpan",
    "open",
    "start",
    "train",
]

hide_foreign_builds()  # here, because every process imports this before it imports transformers


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that commands start without needless libraries."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
