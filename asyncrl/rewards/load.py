"""From the name of a reward function to something that can be called, and from what it returned to a number."""

import asyncio
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncrl.errors import RewardError
from asyncrl.rewards.builtin import BUILTINS


def load_function(name: str) -> Callable[..., Any]:
    """The function behind `package.module:function`, `path.py:function` or a built-in's name."""
    module_name, colon, attribute = name.rpartition(":")
    if not colon:
        if name in BUILTINS:
            return BUILTINS[name]
        raise RewardError(
            f"reward function `{name}` is no built-in ({', '.join(sorted(BUILTINS))}); "
            "name your own as `package.module:function` or `path.py:function`"
        )
    module = _load_file(Path(module_name)) if module_name.endswith(".py") else _load_module(module_name)
    function = getattr(module, attribute, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise RewardError(f"reward function `{name}`: {module_name} has no function `{attribute}`; it has {known}")
    return function  # type: ignore[no-any-return]


def bind(function: Callable[..., Any]) -> Callable[[str, str, Mapping[str, Any]], float]:
    """A caller that hands `function` the columns it names, awaits it if it is async, and checks what it returns.

    Raises RewardError for a missing column and for anything that is no finite number; what the function itself
    raises passes through.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())[2:]  # after prompt and response
    except ValueError:  # some built-in types have no signature
        parameters = []
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = {p.name for p in named if p.default is p.empty}
    accepted = {p.name for p in named}

    def call(prompt: str, response: str, columns: Mapping[str, Any]) -> float:
        if missing := required - columns.keys():
            raise RewardError(f"wants column(s) {sorted(missing)}, which the row lacks; it has {sorted(columns)}")
        value = function(prompt, response, **{k: v for k, v in columns.items() if takes_all or k in accepted})
        return checked_reward(asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value)

    return call


def checked_reward(value: object) -> float:
    """`value` as a float, or RewardError: a bool, None, text, NaN or infinity is a mistake, not a reward."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise RewardError(f"returned {type(value).__name__} `{str(value)[:80]}`; a reward is one finite number (float or int)")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(f"returned {number}; a reward must be finite")
    return number


async def _awaited(value: Any) -> Any:
    return await value


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise RewardError(f"reward file {path} does not exist (looked from {Path.cwd()})")
    sys.path.insert(0, str(path.parent.resolve()))  # it may import its neighbours
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise RewardError(
            f"reward module `{name}`: {error}; it must be installed or lie under the working directory {Path.cwd()}"
        ) from error
