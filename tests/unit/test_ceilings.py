"""How large the house is. Each ceiling is the figure of the last change that made it fall."""

import ast
from collections import Counter
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "asyncrl"
CEILINGS = {
    "lines of the package": 53927,
    "modules": 354,
    "public functions and classes": 1425,
    "modules of ours that a module imports, at most": 20,
    "private functions that are used once": 433,
}


@cache
def trees() -> dict[str, ast.Module]:
    return {
        str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))
    }


def modules_imported(tree: ast.Module) -> set[str]:
    """Of the package, also those that a function imports when it needs them."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "asyncrl":
            for name in node.names:
                inside = PACKAGE.parent.joinpath(*node.module.split("."), f"{name.name}.py")
                found.add(f"{node.module}.{name.name}" if inside.is_file() else node.module)
    return found


def private_functions_used_once() -> int:
    """Functions and methods whose name begins with one underscore, and occurs once besides its definition."""
    defined: Counter[str] = Counter()
    used: Counter[str] = Counter()
    for tree in trees().values():
        own_defined: Counter[str] = Counter()
        own_used: Counter[str] = Counter()
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if (
                    name[0] == "_" != name[1]
                ):
                    own_defined[name] += 1
                case ast.Name(id=name) | ast.Attribute(attr=name):
                    own_used[name] += 1
        defined.update({name: count for name, count in own_defined.items() if own_used[name] <= count})
        used.update(own_used)
    return sum(defined.values())


def measured() -> dict[str, int]:
    lines = (len((PACKAGE / path).read_text().splitlines()) for path in trees())
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    at_the_top = (node for tree in trees().values() for node in tree.body if isinstance(node, kinds))
    figures = (
        sum(lines),
        len(trees()),
        sum(node.name[0] != "_" for node in at_the_top),
        max(len(modules_imported(tree)) for tree in trees().values()),
        private_functions_used_once(),
    )
    return dict(zip(CEILINGS, figures, strict=True))


def test_the_house_does_not_grow() -> None:
    """A change that needs more room takes it from what it replaces."""
    figures = measured()
    assert not [name for name, figure in figures.items() if figure > CEILINGS[name]], figures
