"""Loads what `environment.uses` names: the user's code, the built-in tool `python`, or another library's."""

import importlib
from typing import Any

from asyncrl.errors import MissingLibrary
from asyncrl.plugins import load
from asyncrl.sandbox.box import python_result

# Libraries with an adapter (module of this name in `adapters` with `environment(name)`), and their packages.
ADAPTERS = {
    "gem": "gem-llm", "gymnasium": "gymnasium", "mcp": "mcp", "openenv": "websockets",
    "reasoning_gym": "reasoning-gym", "textarena": "textarena", "verifiers": "verifiers",
}  # fmt: skip
# Limit for a program, below that of a call, `environment.step_s`.
PROGRAM_S = 5.0
_NOTES = {
    "time": f"stopped after {PROGRAM_S:g} s",
    "memory": "stopped: it used more than 1 GiB of memory",
    "processes": "stopped: it had too many processes",
    "files": "stopped: it made too many files",
}


def python(code: str) -> str:
    """Run a Python program and return what it prints.

    Args:
        code: The program. It has no network, sees no files, and remembers nothing of earlier programs.
    """
    result = python_result(code, seconds=PROGRAM_S)
    parts = [result.stdout.rstrip("\n"), result.stderr.strip("\n"), _NOTES.get(result.status, "")]
    if result.cut:
        parts.append("a part of the output is missing, because it was too long")
    return "\n".join(part for part in parts if part) or "the program printed nothing"


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
