"""Loads what `environment.uses` names: the user's code, the built-in tool `python`, or another library's."""

import importlib
from collections.abc import Iterator
from typing import Any

from asyncrl.environments.python_tool import python
from asyncrl.errors import ConfigError, MissingLibrary
from asyncrl.plugins import load

# Libraries with an adapter, a module of this name in `adapters` with `environment(name)`, and the package
# that has the library.
ADAPTERS = {
    "gem": "gem-llm", "gymnasium": "gymnasium", "mcp": "mcp", "openenv": "websockets",
    "reasoning_gym": "reasoning-gym", "textarena": "textarena",
}  # fmt: skip
# Those whose adapter also has `rows(name, size, seed)`.
DATASETS = ("reasoning_gym",)
TOOLS = {"python": python}


def is_named(target: str) -> bool:
    """Return whether a target is a built-in tool or another library's environment."""
    return target in TOOLS or target.partition(":")[0] in ADAPTERS


def load_target(target: str) -> Any:
    """Return a class or a function. Raises ImportError, which says what failed and where."""
    if target in TOOLS:
        return TOOLS[target]
    library, _, name = target.partition(":")
    return _adapter(library).environment(name) if library in ADAPTERS else load(target)


def dataset_rows(target: str, *, size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Return rows of a library's tasks. Raises ConfigError, and ImportError if the library is missing."""
    library, _, name = target.partition(":")
    if library not in DATASETS:
        allowed = ", ".join(f"{one}:NAME" for one in DATASETS)
        raise ConfigError(
            f"dataset: found {target}; allowed is {allowed}, for example reasoning_gym:chain_sum"
        )
    try:
        yield from _adapter(library).rows(name, size=size, seed=seed)
    except (ValueError, TypeError) as error:  # an unknown name or option
        raise ConfigError(f"dataset {target}: {error}") from error


def _adapter(library: str) -> Any:
    try:
        return importlib.import_module(f"asyncrl.environments.adapters.{library}")
    except ModuleNotFoundError as error:
        cure = f"run `pip install {ADAPTERS[library]}` for the Python of the environment"
        raise MissingLibrary(f"the package {error.name} is not installed; {cure}") from error
