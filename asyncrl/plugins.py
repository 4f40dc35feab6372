"""Loads functions and classes that a config names as `path.py:name` or `package.module:name`."""

import importlib
import importlib.util
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

# Module of a file -> when the file that was run was last modified. The kernel of a notebook outlives edits.
_run: dict[str, int] = {}


def load(target: str) -> Callable[..., Any]:
    """Return the function or class that `target` names. Raises ImportError, which says what failed and where.

    A file is run once per process, however many of its functions are named, and also if another module
    imports it; once more when it was edited. Its directory, and the working directory for a module, join the
    import path at its end: no file there replaces a library's module of the same name.
    """
    place, _, name = target.rpartition(":")
    is_file = place.endswith(".py")
    if is_file and not Path(place).is_file():
        raise ImportError(f"{place} does not exist (looked from {Path.cwd()})")
    path = Path(os.path.abspath(place))
    directory = str(path.parent if is_file else Path.cwd())
    if directory not in sys.path:
        sys.path.append(directory)
    try:
        module = _from_file(path) if is_file else importlib.import_module(place)
        found = getattr(module, name, None)
    except ModuleNotFoundError as error:
        cure = f"it must be installed or lie under the working directory {Path.cwd()}"
        raise ImportError(f"{error}; {cure}") from error
    except (Exception, SystemExit) as error:
        raise ImportError(f"raised {described(error)}") from error
    if not callable(found):
        what = f", only a value of type {type(found).__name__}" if name in vars(module) else ""
        own = {key: value for key, value in vars(module).items() if callable(value) and key[0] != "_"}
        known = [key for key, value in own.items() if getattr(value, "__module__", "") == module.__name__]
        raise ImportError(f"{place} has no function `{name}`{what}; it has {known}")
    return found  # type: ignore[no-any-return]


def package_spec(name: str) -> ModuleSpec | None:
    """Return the spec of a module or package at the top, at last in the working directory; import nothing.

    Every finder is asked: an editable install may bring its own.
    """
    with suppress(ValueError):  # the main module may have none
        if spec := importlib.util.find_spec(name):
            return spec
    return PathFinder.find_spec(name, [str(Path.cwd())])


def described(error: BaseException, *, placed: bool = True) -> str:
    """Return an error of user code, with its line if `placed`. Raises it if SIGTERM ends a role by it."""
    if is_stop(error):
        raise error
    name, where = type(error).__name__, traceback.extract_tb(error.__traceback__)[-1]
    # The text of a SyntaxError has the line already.
    line = f" ({where.filename}:{where.lineno})" if placed and not isinstance(error, SyntaxError) else ""
    try:
        return f"{name}: {error}{line}"
    except BaseException:  # noqa: BLE001 - its `__str__` is user code, too
        return f"{name}, which has no text{line}"


def is_stop(error: BaseException) -> bool:
    """Return whether SIGTERM ends a role by this error. Another SystemExit comes from user code."""
    return isinstance(error, SystemExit) and error.code == 128 + signal.SIGTERM


def _from_file(path: Path) -> ModuleType:
    name, changed_ns = path.stem if _is_module_at(path) else str(path), path.stat().st_mtime_ns
    if name in sys.modules and _run.get(name, changed_ns) == changed_ns:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    _run[name] = changed_ns
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _is_module_at(path: Path) -> bool:
    """Whether the name of a file, as a module, means this file and not a library's module."""
    if path.stem in sys.modules:
        return getattr(sys.modules[path.stem], "__file__", None) == str(path)
    spec = importlib.util.find_spec(path.stem) if path.stem.isidentifier() else None
    return spec is None or spec.origin == str(path)
