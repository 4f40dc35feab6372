"""Where tests find what they share, in tests/support by one way to import it, and how they wait."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = [path for name in ("tests", "reliability", "bench") for path in sorted((ROOT / name).rglob("*.py"))]
SUPPORT = {path.stem for path in (ROOT / "tests" / "support").glob("*.py")}


def imported(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {
        node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level
    }


def test_what_tests_share_is_imported_from_tests_support() -> None:
    for path in FILES:
        for name in imported(path):
            assert not name.rpartition(".")[2].startswith("test_"), (
                f"{path}: move what is shared to tests/support"
            )
            assert not name.startswith("tests.") or name.startswith("tests.support"), f"{path}: {name}"
            assert name not in SUPPORT, f"{path}: import it as tests.support.{name}"


def test_no_test_sleeps() -> None:
    """It waits for its condition, passes virtual time, or hangs by name: `tests/support/waiting.py`."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path.name == "waiting.py":
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            # Also in the text of programs; a clock that a test makes may have this method.
            assert not re.search(r"(?<![\w.])(?:(?:time|asyncio)\.)?(?<!def )sleep\(", line), (
                f"{path}:{number}: take what waits from waiting.py"
            )
