"""Fields of another library's settings, read from its source: importing it would take seconds."""

import ast
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from asyncrl.config.base import Mistake
from asyncrl.config.wording import did_you_mean


def misnamed(
    section: str,
    names: Iterable[str],
    refused: Callable[[str], str | None],
    known: Collection[str] | None,
    kind: str,
    otherwise: str,
) -> Iterator[Mistake]:
    """Find settings that are `refused`, with the reason, or that are not `known` where the library is."""
    for name in names:
        key = f"{section}.{name}"
        if why := refused(name):
            yield Mistake((key,), f"{key} is refused: {why}")
        elif known is not None and name not in known:
            hint = did_you_mean(name, sorted(one for one in known if not refused(one)), otherwise)
            yield Mistake((key,), f"{key} is no {kind}{hint}")


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
