"""One step can be read in an afternoon: the ten files of `docs/architecture.md`, and nothing that the page
does not name."""

import asyncio
import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType

from tests.support.example import load_example

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "asyncrl"
MOST_LINES = 1325


def reading_order() -> tuple[list[str], set[str]]:
    """The modules of the path in their order, and those behind them, as the page names them."""
    section = (
        (ROOT / "docs" / "architecture.md").read_text().partition("## Reading order")[2].partition("\n## ")[0]
    )
    path = re.findall(r"^\d+\. `([\w/]+\.py)`", section, re.MULTILINE)
    rows = re.findall(r"^\|.*\|(.*)\|$", section, re.MULTILINE)
    return path, {module for row in rows for module in re.findall(r"`([\w/]+\.py)`", row)}


def modules_called() -> set[str]:
    """Modules of the package in which a function runs during a few steps."""
    called: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        called.add(frame.f_code)

    example = load_example()
    example.STEPS = 4
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        asyncio.run(example.train())
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    inside = (
        code for code in called if code.co_filename.startswith(f"{PACKAGE}/") and code.co_name != "<module>"
    )
    return {str(Path(code.co_filename).relative_to(PACKAGE)) for code in inside}


def test_the_path_of_one_step_is_short():
    path, _ = reading_order()
    lines = {module: len((PACKAGE / module).read_text().splitlines()) for module in path}
    assert len(lines) == 10 and sum(lines.values()) <= MOST_LINES, lines


def test_a_step_calls_nothing_that_the_page_does_not_name():
    path, behind = reading_order()
    # In a process of its own: caches that other tests have filled would hide calls.
    code = (
        "import json; from tests.unit.test_reading_path import modules_called; "
        "print(json.dumps(sorted(modules_called())))"
    )
    traced = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=120, check=True
    )
    called = set(json.loads(traced.stdout.splitlines()[-1]))
    assert set(path) <= called, "a file of the path takes no part in a step"
    assert called - set(path) == behind
