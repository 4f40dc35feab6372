"""Says what the functions or the class of a user are, and what they take; annotations stay text."""

import inspect
import platform
from collections.abc import Sequence
from functools import cached_property
from typing import Any

# The attribute of an adapter's class that has the schemas of its tools, instead of methods: their names and
# those of their arguments are JSON. The object itself is called with name and arguments.
TOOLS = "__tools__"
# Public methods of a class that are not tools.
REWARDS, ENDS, CLOSE = ("get_reward", "reward"), ("is_done", "done"), "close"
NOT_TOOLS = frozenset({"reset", "step", *REWARDS, *ENDS, CLOSE})


def describe(targets: Sequence[Any]) -> dict[str, Any]:
    """Return kind, columns and tools of the user's functions or class. Raises TypeError if it is of no kind.

    The kinds are `tools` (functions), `tool_class`, `text` (a class with `step`) and `rollout`.
    """
    kind, first = _kind(targets), targets[0]
    entry = {"text": "reset", "tool_class": "reset"}.get(kind)
    taken = list(inspect.signature(getattr(first, entry) if entry else first).parameters.values())
    # The first parameter is `self` or `session`.
    named = [one for one in taken[1:] if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    tools = list(targets) if kind == "tools" else []
    given = getattr(first, TOOLS, None)
    if kind == "tool_class" and given is None:
        names = [name for name in dir(first) if name[0] != "_" and name not in NOT_TOOLS]
        tools = [getattr(first, name) for name in names if inspect.isroutine(getattr(first, name))]
    if len(known := {tool.__name__ for tool in tools}) < len(tools):
        raise TypeError(f"found {len(tools)} tools with the names {sorted(known)}; give each its own name")
    is_entered, paid = kind != "tools", [getattr(first, name, None) for name in REWARDS]
    return {
        "kind": kind,
        "python": platform.python_version(),
        "columns": [one.name for one in named if is_entered],
        "required": [one.name for one in named if is_entered and one.default is one.empty],
        "takes_all": is_entered and any(one.kind is one.VAR_KEYWORD for one in taken),
        # A column of the first parameter's name would be a second value of it.
        "placed": [one.name for one in taken[:1] if one.kind is one.POSITIONAL_OR_KEYWORD],
        "tools": given
        or [describe_tool(tool, owner=first if kind == "tool_class" else None) for tool in tools],
        # Classes for TRL often set an attribute; one of a text environment is paid already, by `step`.
        "rewards": kind == "tool_class"
        or any(callable(one) or isinstance(one, property | cached_property) for one in paid),
        "closes": inspect.isclass(first) and hasattr(first, CLOSE),
    }


def describe_tool(tool: Any, *, owner: type | None = None) -> dict[str, Any]:
    """Return a tool's name, docstring, place and parameters; without `self` if `owner` has it as a method."""
    parameters = list(inspect.signature(tool).parameters.values())
    if owner and not isinstance(inspect.getattr_static(owner, tool.__name__), staticmethod | classmethod):
        parameters = parameters[1:]
    try:
        file, line = inspect.getsourcefile(tool) or "?", inspect.getsourcelines(tool)[1]
    except (OSError, TypeError):  # it is built in, or made by a program
        file, line = "?", 0
    return {
        "name": tool.__name__,
        "doc": inspect.getdoc(tool) or "",
        "where": f"{file}:{line}",
        "parameters": [
            {
                "name": str(one) if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) else one.name,
                "annotation": None if one.annotation is one.empty else _annotation(one.annotation),
                "required": one.default is one.empty,
            }
            for one in parameters
        ],
    }


def _kind(targets: Sequence[Any]) -> str:
    first = targets[0]
    if not any(inspect.isclass(target) for target in targets):
        takes_session = [*inspect.signature(first).parameters][:1] == ["session"]
        is_rollout = takes_session and inspect.iscoroutinefunction(first)
        if takes_session and not is_rollout and "session" not in getattr(first, "__annotations__", {}):
            raise TypeError(f"found `def {first.__name__}(session)`; a rollout is an `async def`")
        if is_rollout and len(targets) > 1:
            raise TypeError(f"`{first.__name__}` is a rollout; name a rollout alone")
        return "rollout" if is_rollout else "tools"
    if len(targets) > 1:
        raise TypeError("found a class among several names; name one class alone, or functions only")
    if not hasattr(first, "reset"):
        raise TypeError(f"class `{first.__name__}` has no method `reset`; add one, with columns as arguments")
    return "text" if hasattr(first, "step") else "tool_class"


def _annotation(annotation: Any) -> str:
    if isinstance(annotation, str):
        return annotation
    is_plain = isinstance(annotation, type) and not hasattr(annotation, "__args__")
    return annotation.__name__ if is_plain else repr(annotation).replace("typing.", "")
