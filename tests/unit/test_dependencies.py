"""What the package imports is what pyproject.toml declares, and what not every run needs is asked for only
where it is used."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from asyncrl.environments.named import ADAPTERS
from asyncrl.errors import MissingLibrary, from_extra
from asyncrl.results.page import render_page

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
MODULES = sorted((ROOT / "asyncrl").rglob("*.py"))
NAMES = {
    "yaml": "pyyaml",
    "zmq": "pyzmq",
    "prometheus_client": "prometheus-client",
    "tokenizers": "transformers",
    "wandb_workspaces": "wandb-workspaces",
    "h11": "uvicorn",
    "PIL": "pillow",
    "math_verify": "math-verify",
    "sympy": "math-verify",
}
"""Distributions whose module has another name, or which bring a module: `tokenizers` comes with transformers."""
BROUGHT = {"verifiers": "httpx"}
"""What the library of an adapter requires itself."""


def names(texts: list[str]) -> set[str]:
    return {Requirement(text).name for text in texts}


BASE = names(PROJECT["dependencies"])
OPTIONAL = {name for extra in set(EXTRAS) - {"dev", "docs", "all"} for name in names(EXTRAS[extra])}


def foreign(path: Path) -> Iterator[tuple[str, bool]]:
    """(distribution, whether it is imported with the module) of every import of somebody else's library."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    within = {
        id(node)
        for part in ast.walk(tree)
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
        or (isinstance(part, ast.If) and ast.unparse(part.test) == "TYPE_CHECKING")
        for node in ast.walk(part)
    }
    for node in ast.walk(tree):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            modules = [node.module or ""]
        for module in modules:
            top = module.partition(".")[0]
            if top not in sys.stdlib_module_names and top != "asyncrl":
                yield NAMES.get(top, top), id(node) not in within


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_import_is_declared_and_what_is_optional_is_imported_late(path):
    for name, early in foreign(path):
        if path.parent.name == "adapters" and name in (
            path.stem, ADAPTERS.get(path.stem), BROUGHT.get(path.stem)
        ):  # fmt: skip
            continue  # it runs in the environment's Python, which has the library
        assert name in BASE | OPTIONAL, f"{name} is in no list of pyproject.toml"
        # vLLM comes with the extra `cpu` or `gpu`; its adapters are modules that only the process of an
        # engine imports. So is that of Ray only with `cluster.kind: ray`.
        assert name in BASE or name in ("vllm", "ray") or not early, (
            f"{name} is imported by everybody who imports this module"
        )


def test_extras_that_the_messages_name_exist():
    texts = "".join(path.read_text(encoding="utf-8") for path in MODULES)
    named = {
        *re.findall(r"""(?:from_extra|install_command)\(["']([\w-]+)["']\)""", texts),
        *re.findall(r"asyncrl\[([a-z-]+)\]", texts),
    }
    assert {"report", "wandb", "tensorboard", "data", "cpu", "gpu"} <= named <= EXTRAS.keys() | {"extra"}


def test_the_page_of_the_installation_has_every_extra():
    page = (ROOT / "docs" / "installation.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE)) == EXTRAS.keys()


def test_all_is_every_extra_but_engines_and_tools():
    (everything,) = map(Requirement, EXTRAS["all"])
    assert everything.extras == EXTRAS.keys() - {"all", "cpu", "gpu", "dev", "docs"}


def test_a_report_without_plotly_names_the_extra(monkeypatch):
    for name in ("plotly", "plotly.offline"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        MissingLibrary, match=r"package plotly\S* is not installed; run: pip install 'asyncrl\[report\]'"
    ):
        render_page("a", "b", [])


def test_other_failures_of_a_library_are_left_alone():
    with pytest.raises(ImportError, match="broken") as raised, from_extra("report"):
        raise ImportError("broken")
    assert not isinstance(raised.value, MissingLibrary)
