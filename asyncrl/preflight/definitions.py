"""Finds the definition of a function or a class that a config names, in its source: nothing is run."""

import ast
from pathlib import Path

from asyncrl.config.named_files import unusable
from asyncrl.config.wording import did_you_mean
from asyncrl.plugins import package_spec

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Missing(Exception):
    """A function was not found; the text is the message for the user."""


def definition(name: str) -> Definition | None:
    """Return the definition of `path.py:name`; None for modules and for names without a `def` or `class`."""
    place, _, attribute = name.rpartition(":")
    if not place.endswith(".py"):
        if "/" in place:
            raise Missing(f"found no file {place}; a file needs its suffix; write `{place}.py:{attribute}`")
        package = place.partition(".")[0]
        if package_spec(package) is None:
            cure = f"install it, run from its directory, or give `path.py:{attribute}`"
            raise Missing(f"found no module `{package}`; {cure}")
        place = f"{place.replace('.', '/')}.py"
        if not Path(place).is_file():
            return None
    file = Path(place)
    if not file.is_file():
        raise Missing(f"{unusable(place)}; give `path.py:{attribute}`")
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        raise Missing(f"{file}{line} is not valid Python: {error}; correct the file") from error
    found = {node.name: node for node in tree.body if isinstance(node, Definition)}
    if attribute not in found and not _is_bound(tree, attribute):
        hint = did_you_mean(attribute, found, "correct the name")
        raise Missing(f"found no `{attribute}` in {file}; it has {', '.join(found) or 'no functions'}{hint}")
    return found.get(attribute)


def _is_bound(tree: ast.Module, name: str) -> bool:
    """Return whether a module imports or assigns a name, or defines it below its top level."""
    return any(
        (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name)
        or (isinstance(node, ast.alias) and (node.asname or node.name) in (name, "*"))
        or (isinstance(node, Definition) and node.name == name and node not in tree.body)
        or (isinstance(node, ast.FunctionDef) and node.name == "__getattr__")
        for node in ast.walk(tree)
    )
