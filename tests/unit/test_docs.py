"""The generated parts of the documentation are up to date, and a missing function is noticed."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GENERATE = runpy.run_path(str(ROOT / "docs" / "generate.py"))
PAGE = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", GENERATE["PAGES"], ids=lambda path: path.stem)
def test_docs_are_generated(path):
    page = path.read_text(encoding="utf-8")
    assert GENERATE["rewritten"](page) == page, "run `python docs/generate.py`"


def test_the_schema_for_editors_is_generated():
    assert GENERATE["SCHEMA"].read_text(encoding="utf-8") == GENERATE["schema_text"](), (
        "run `python docs/generate.py`"
    )


@pytest.mark.parametrize(("path", "run"), GENERATE["USERS"].items(), ids=lambda value: Path(value).name)
def test_users_of_a_store_are_generated(path, run):
    text = path.read_text(encoding="utf-8")
    assert [user for _, user in GENERATE["USER"].findall(text)] == ["learner", "generator"]
    assert GENERATE["with_users"](text, run) == text, "run `python docs/generate.py`"


def test_every_kind_of_function_has_a_generated_table():
    from asyncrl.config import registry

    assert {*registry.KINDS, "presets"} == set(re.findall(r"<!-- generated: (\w+) -->", PAGE))


def test_other_defaults_and_other_names_are_noticed():
    assert GENERATE["rewritten"](PAGE.replace("`cap` > 0 (2)", "`cap` > 0 (3)")) == PAGE
    for old, new in (("| `rloo` |", "| `rlooo` |"), ("| `k2` | d²/2", "| k2 | d²/2")):
        assert old in PAGE
        with pytest.raises(SystemExit, match=r"the table of (advantage|kl) lists"):
            GENERATE["rewritten"](PAGE.replace(old, new))


def test_links_lead_somewhere():
    for page in (*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_pictures_are_small():
    sizes = {path.name: path.stat().st_size for path in (ROOT / "docs" / "img").iterdir()}
    assert sizes and max(sizes.values()) < 300_000, sizes
