"""Loading what a user wrote: `path.py:name` or `package.module:name`, in every place of a config that takes
one."""

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def load(target: str) -> Callable[..., Any]:
    """The function or class that `target` names.

    A file is run once per process, however many of its functions are named and whether others import it by
    its name. Its directory joins the import path, so that it finds its neighbours, as with `python path.py`.

    Raises:
        ImportError: it cannot be found or raised something itself. The text says what, and where.
    """
    place, _, name = target.rpartition(":")
    is_file = place.endswith(".py")
    if is_file and not Path(place).is_file():
        raise ImportError(f"{place} does not exist (looked from {Path.cwd()})")
    try:
        module = _from_file(Path(os.path.abspath(place))) if is_file else importlib.import_module(place)
        found = getattr(module, name, None)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{error}; it must be installed or lie under the working directory {Path.cwd()}"
        ) from error
    except Exception as error:
        raise ImportError(f"raised {described(error)}") from error
    if not callable(found):
        what = f", only a value of type {type(found).__name__}" if name in vars(module) else ""
        raise ImportError(f"{place} has no function `{name}`{what}; it has {_public(module)}")
    return found  # type: ignore[no-any-return]


def described(error: BaseException) -> str:
    """What user code raised, with the line; the text of a SyntaxError has it already."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    line = "" if isinstance(error, SyntaxError) else f" ({where.filename}:{where.lineno})"
    return f"{type(error).__name__}: {error}{line}"


def _from_file(path: Path) -> ModuleType:
    same_name = sys.modules.get(path.stem)
    # A file that is named like a module which is already loaded must not take its place.
    name = path.stem if same_name is None or getattr(same_name, "__file__", None) == str(path) else str(path)
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _public(module: ModuleType) -> list[str]:
    """Its own functions and classes."""
    own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return [
        name
        for name, value in own.items()
        if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == module.__name__
    ]
