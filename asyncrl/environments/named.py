"""Loads what `environment.uses` names: the user's code, the built-in tool `python`, or another library's."""

import importlib
from typing import Any

from asyncrl.environments.python_tool import python
from asyncrl.errors import MissingLibrary
from asyncrl.plugins import load

# Libraries with an adapter, a module of this name in `adapters` with `environment(name)`, and the package
# that has the library.
ADAPTERS = {
    "gem": "gem-llm", "gymnasium": "gymnasium", "mcp": "mcp", "openenv": "websockets",
    "reasoning_gym": "reasoning-gym", "textarena": "textarena", "verifiers": "verifiers",
}  # fmt: skip
TOOLS = {"python": python}


def is_named(target: str) -> bool:
    """Return whether a target is a built-in tool or another library's environment."""
    return target in TOOLS or target.partition(":")[0] in ADAPTERS


def load_target(target: str) -> Any:
    """Return a class or a function. Raises ImportError, which says what failed and where."""
    if target in TOOLS:
        return TOOLS[target]
    library, _, name = target.partition(":")
    return adapter(library).environment(name) if library in ADAPTERS else load(target)


def adapter(library: str) -> Any:
    """Return the module of a library's adapter. Raises MissingLibrary."""
    try:
        return importlib.import_module(f"asyncrl.addons.adapters.{library}")
    except ModuleNotFoundError as error:
        cure = f"run `pip install {ADAPTERS[library]}` for the Python of the environment"
        raise MissingLibrary(f"the package {error.name} is not installed; {cure}") from error
