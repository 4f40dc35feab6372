"""Tools of a server: their schemas stay those of the server, and their names are no attributes of the class.

A class with `__tools__` has the tools in it instead of its methods, see `environments.user_code`.
"""

from collections.abc import Callable, Mapping
from inspect import cleandoc
from typing import Any

# Calls a tool: the object of the episode, the tool's name, and the arguments of the model.
Call = Callable[[Any, str, Mapping[str, Any]], Any]


class ToolError(Exception):
    """A tool of a server failed."""


def tools_of(call: Call, *tools: tuple[str, str | None, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the attributes of a class whose tools, of name, text and JSON schema each, `call` calls."""
    least = {"type": "object", "properties": {}}
    schemas = [
        {"name": name, "description": cleandoc(text or name), "parameters": {**least, **schema}}
        for name, text, schema in tools
    ]
    return {"__tools__": [{"type": "function", "function": one} for one in schemas], "__call__": call}
