"""Rows and reward functions that a Python process gives to a run, as files in its directory.

A function becomes a Python file that holds its pickle, so it is user code like any other file: only the
processes of rewards load it, and `starts.code_of` watches it. asyncrl itself unpickles nothing.
"""

import hashlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from asyncrl.data.row_files import with_sparse_messages
from asyncrl.errors import ConfigError, RewardError
from asyncrl.files import make_private, replace_text
from asyncrl.rewards.forms import form_for
from asyncrl.run.directory import RunDirectory, needing

# A list of dictionaries, or a `datasets.Dataset`.
Rows = Iterable[Mapping[str, Any]]
_FIND = "import sys; from asyncrl.plugins import package_spec as find; print(find(sys.argv[1]).origin)"
_PROGRAM = """# A reward function that asyncrl got from a Python process, with what it uses.
import sys

import cloudpickle

sys.path += [place for place in {places!r} if place not in sys.path]
{name} = cloudpickle.loads({pickled!r})
"""


def importable(function: Callable[..., Any]) -> str | None:
    """Return the name by which other processes import a function; None if they cannot."""
    name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", None) or ""
    found = sys.modules.get(module)
    file = None if module == "__main__" else getattr(found, "__file__", None)
    # A decorated function may have the name of the one that it calls.
    if found is None or file is None or getattr(found, name, None) is not function:
        return None
    # A new process imports nothing from the place of our script, nor from what we have added to sys.path.
    top = sys.modules.get(module.partition(".")[0], found)
    command = [sys.executable, "-P", "-c", _FIND, top.__name__]
    origin = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    if origin == str(getattr(top.__spec__, "origin", None)):
        return f"{module}:{name}"
    return None if "." in module and module != file else f"{os.path.abspath(file)}:{name}"


def write_rows(rows: Rows, directory: RunDirectory) -> Path:
    """Write rows as JSON lines and return the file. Raises ConfigError for a row that JSON cannot hold."""
    read, lines = with_sparse_messages if hasattr(rows, "with_format") else dict, []
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            found = f"data: row {number} is {type(row).__name__} `{str(row)[:80]}`"
            raise ConfigError(f"{found}; a row is a dict; of a DataFrame give `frame.to_dict('records')`")
        lines.append(f"{{{', '.join(_entry(number, name, value) for name, value in read(row).items())}}}\n")
    return _write(directory, "rows", "jsonl", "".join(lines))


def _entry(number: int, name: str, value: Any) -> str:
    try:
        # Arrays, and numbers of NumPy, are lists and numbers in JSON.
        return f"{json.dumps(str(name))}: {json.dumps(value, default=lambda one: one.tolist())}"
    except (TypeError, ValueError, AttributeError, RecursionError):
        found = f"data: row {number} has {type(value).__name__} `{str(value)[:80]}` in column `{name}`"
        allowed = "JSON holds texts, numbers, lists and dicts; convert it, or write a Parquet file"
        raise ConfigError(f"{found}; {allowed}") from None


def write_reward(function: Any, directory: RunDirectory) -> str:
    """Write a function into a file and return its name for a config. Raises ConfigError."""
    name = getattr(function, "__name__", "")
    name = name if name.isidentifier() else "reward"
    if not callable(function) or isinstance(function, type):
        cure = "give a function, its name, or a list of them; of a class give an object with `__call__`"
        raise ConfigError(f"reward: found {type(function).__name__} `{function!r}`; {cure}")
    try:
        form_for(function)
    except RewardError as error:
        raise ConfigError(f"reward: `{name}` {error}") from error
    places = [os.path.abspath(place) for place in sys.path]
    text = _PROGRAM.format(places=places, name=name, pickled=_pickled(function, name))
    return f"{_write(directory, 'reward', 'py', text)}:{name}"


def _pickled(function: Callable[..., Any], name: str) -> bytes:
    import cloudpickle

    def problem(value: Any) -> str:
        try:
            cloudpickle.dumps(value)
        except Exception as error:  # noqa: BLE001 - whatever the value's own code raises
            return f"{type(error).__name__}: {error}"
        return ""

    if wrong := problem(function):
        used = inspect.getclosurevars(function) if inspect.isfunction(function) else None
        values = {**used.nonlocals, **used.globals} if used else {}
        users = [f"`{one}`" for one, value in values.items() if problem(value)]
        where = f" (it uses {', '.join(users)})" if users else ""
        cure = "make such an object within the function, or write the function into a file and give its name"
        raise ConfigError(f"reward: `{name}`{where} cannot be pickled for its own process: {wrong}; {cure}")
    return bytes(cloudpickle.dumps(function))


def _write(directory: RunDirectory, name: str, suffix: str, text: str) -> Path:
    """Write a file whose name has a digest of its content, so that none ever changes."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    path = directory.given / f"{name}-{digest}.{suffix}"
    with needing(directory.path):
        directory.make()
        make_private(directory.given)
        replace_text(path, text, durable=True)
    return path
