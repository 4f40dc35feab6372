"""Asynchronous reinforcement learning of language models: sampling and training never wait for each other."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from asyncrl.builds import hide_foreign_builds
from asyncrl.version import __version__ as __version__

if TYPE_CHECKING:
    from asyncrl.algo.corrections import Correction as Correction
    from asyncrl.algo.filters import GroupOutcome as GroupOutcome
    from asyncrl.algo.group_rewards import GroupRewards as GroupRewards
    from asyncrl.algo.losses import TokenLoss as TokenLoss
    from asyncrl.algo.tokens import TokenBatch as TokenBatch
    from asyncrl.api import Result as Result
    from asyncrl.api import Run as Run
    from asyncrl.api import open as open
    from asyncrl.api import start as start
    from asyncrl.api import train as train
    from asyncrl.batch.plan import Plan as Plan
    from asyncrl.config.schema import Config as Config
    from asyncrl.errors import AsyncRLError as AsyncRLError
    from asyncrl.errors import CheckpointError as CheckpointError
    from asyncrl.errors import ConfigError as ConfigError
    from asyncrl.errors import ControlError as ControlError
    from asyncrl.errors import DataError as DataError
    from asyncrl.errors import EngineError as EngineError
    from asyncrl.errors import MissingLibrary as MissingLibrary
    from asyncrl.errors import RewardError as RewardError
    from asyncrl.errors import RunError as RunError
    from asyncrl.errors import RunNotUp as RunNotUp
    from asyncrl.errors import StoreError as StoreError
    from asyncrl.errors import TransferError as TransferError
    from asyncrl.learner import Step as Step
    from asyncrl.telemetry.base import SampleRecord as SampleRecord
    from asyncrl.telemetry.status import StatusSnapshot as StatusSnapshot
    from asyncrl.types import Group as Group
    from asyncrl.types import Rollout as Rollout
    from asyncrl.types import VersionSpan as VersionSpan

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
__all__ = list(_MODULES)

hide_foreign_builds()  # here, because every process imports this before it imports transformers


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that commands start without needless libraries."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
