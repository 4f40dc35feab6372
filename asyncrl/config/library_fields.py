"""Fields of another library's settings, read from its source: importing it would take seconds."""

import ast
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path


def source_in(package: str, *parts: str) -> Path | None:
    """Return a source file of an installed package; None if there is none."""
    found = find_spec(package)
    places = found.submodule_search_locations if found else None
    source = Path(next(iter(places)), *parts) if places else None
    return source if source and source.is_file() else None


def fields_in(source: Path) -> dict[str, tuple[list[str], Mapping[str, str]]]:
    """Return for each class of a file the names of its bases, and its public fields with their types as text.

    These are the annotated names of a dataclass, except class variables.
    """
    return {
        node.name: (
            [base.id for base in node.bases if isinstance(base, ast.Name)],
            {
                field.target.id: ast.unparse(field.annotation)
                for field in node.body
                if isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and not field.target.id.startswith("_")
                and "ClassVar" not in ast.unparse(field.annotation)
            },
        )
        for node in ast.parse(source.read_bytes()).body
        if isinstance(node, ast.ClassDef)
    }
