"""Asynchronous reinforcement learning for language models: generators and learner never wait for each other."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from asyncrl.builds import hide_foreign_builds

__version__ = "0.1.0"

if TYPE_CHECKING:
    from asyncrl.api import Result, Run, open, start, train
    from asyncrl.config.schema import Config
    from asyncrl.errors import AsyncRLError, ConfigError, RunError

_PLACES = {
    **dict.fromkeys(("Result", "Run", "open", "start", "train"), "asyncrl.api"),
    "Config": "asyncrl.config.schema",
    **dict.fromkeys(("AsyncRLError", "ConfigError", "RunError"), "asyncrl.errors"),
}
__all__ = ["AsyncRLError", "Config", "ConfigError", "Result", "Run", "RunError", "open", "start", "train"]

hide_foreign_builds()  # here, because every process imports this before it imports transformers


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: a command that needs none of them starts without their libraries."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)
