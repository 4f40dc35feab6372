"""Loads what `environment.uses` names: the user's code, the built-in tool `python`, or another library's.

Also prints the tasks of a library as rows, in a Python that needs the library and nothing of asyncrl.
"""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError, MissingLibrary
from asyncrl.plugins import load
from asyncrl.sandbox.box import python_result

# Libraries with an adapter (module of this name in `adapters` with `environment(name)`), and their packages.
ADAPTERS = {
    "gem": "gem-llm", "gymnasium": "gymnasium", "mcp": "mcp", "openenv": "websockets",
    "reasoning_gym": "reasoning-gym", "textarena": "textarena", "verifiers": "verifiers",
}  # fmt: skip
# Libraries whose adapter has `rows(name, size, seed)`, each with an example.
DATASETS = {"reasoning_gym": "reasoning_gym:chain_sum", "verifiers": "verifiers:gsm8k"}
# Program text that prints rows, with our directory and `dataset_rows`' arguments behind it. The library comes
# first: the working directory and our packages may have modules of the same name.
_PRINT_ROWS = (
    "import os, sys; sys.path = [*filter(None, sys.path), os.getcwd(), sys.argv[1]]; "
    f"from {__name__} import print_rows; print_rows()"
)
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


def dataset_rows(target: str, *, size: int, seed: int, python: Path | None = None) -> Iterator[str]:
    """Return rows of a library's tasks as JSON, made by another Python if one is named.

    Raises ConfigError, and ImportError if the library is missing.
    """
    library, _, name = target.partition(":")
    if library not in DATASETS:
        allowed = ", ".join(f"{one}:NAME" for one in DATASETS)
        raise ConfigError(
            f"dataset: found {target}; allowed is {allowed}, for example {DATASETS['reasoning_gym']}"
        )
    if python is None:
        try:
            yield from map(json.dumps, adapter(library).rows(name, size=size, seed=seed))
        except (ValueError, TypeError) as error:  # an unknown name or option
            raise ConfigError(f"dataset {target}: {error}") from error
        return
    command = [str(python), "-c", _PRINT_ROWS, str(Path(__file__).parents[2]), target, str(size), str(seed)]
    try:
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                yield line.rstrip("\n")
    except OSError as error:
        raise ConfigError(f"dataset: {python} cannot be started: {error}") from error
    if process.returncode:
        raise ConfigError(
            f"dataset {target}: {python} ended with status {process.returncode}; it says why above"
        )


def print_rows() -> None:
    """Print the rows that the arguments name; exit with a text if there are none."""
    _, target, size, seed = sys.argv[1:]
    rows, sys.stdout = sys.stdout, sys.stderr  # libraries print, too
    try:
        for row in dataset_rows(target, size=int(size), seed=int(seed)):
            rows.write(f"{row}\n")
    except (ConfigError, ImportError) as error:
        sys.exit(f"asyncrl: {error}")
