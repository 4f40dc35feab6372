"""Plain English, as far as a program can check it: docs/style.md has the rules.

Pages have no finding. Docstrings have a ceiling for each package, because they are rewritten package by
package: CEILINGS may only go down. `python -m tests.unit.test_plain_english` prints the table of today; with
the name of a package it prints each finding of that package.
"""

import ast
import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pages import PAGES, ROOT, text_of

LINE, SENTENCE = 110, 40
AVOID = re.compile(
    r"\b(at once|mend(?:s|ed|ing)?|anew|whoever|whomever|nobody|beside|told|lest|thereof|whence|himself|he|him|his)\b",
    re.IGNORECASE,
)
PREPOSITION = re.compile(
    r"(about|above|across|after|against|among|around|as|at|before|behind|below|beside|between|beyond|by|during|for|from|in|"
    r"into|of|off|on|onto|out|over|through|to|towards?|under|until|up|upon|with|within|without)\b",
    re.IGNORECASE,
)
GENERATED = re.compile(r"<!-- generated: \w+ -->.*?<!-- end -->", re.DOTALL)
QUOTING = {"docs/style.md"}
"""Pages that show what to avoid."""

CEILINGS: dict[str, int] = {}
"""Findings in the docstrings of a package, or of a module of asyncrl/ itself. A number may only go down."""


def sentences(prose: str) -> Iterator[str]:
    """Split at the marks that end a sentence, between paragraphs and between items of a list."""
    for part in re.split(
        r"(?<=[.?!])[)\"”*]*\s+|(?<=[.?!][)\"”*])\s+|\n\s*\n|\n(?=\s*[*-] |\s*\d+\. |#)|(?<=:)\n", prose
    ):
        yield " ".join(part.split())


def words_of(sentence: str) -> int:
    """Words, with code and links counted as one each."""
    return len(re.findall(r"\w[\w'.,/-]*", re.sub(r"`[^`]*`|\]\([^)]*\)", "x ", sentence)))


def findings(prose: str) -> Iterator[str]:
    for sentence in sentences(prose):
        if (count := words_of(sentence)) > SENTENCE:
            yield f"{count} words in a sentence, at most {SENTENCE}: {sentence}"
        for found in AVOID.finditer(re.sub(r"`[^`]*`", "", sentence)):
            yield f"`{found[0]}`: {sentence}"


def prose_of(page: str) -> tuple[list[str], str]:
    """(lines outside code, tables and generated parts; the same plus table cells, a paragraph each)."""
    plain, whole, fenced = [], [], False
    for line in GENERATED.sub("", page).splitlines():
        fenced ^= line.startswith("```")
        if fenced or line.startswith(("```", "    ", ":::")):
            whole.append("")
            continue
        if line.startswith("|"):
            whole += ["", *(f"{cell}\n" for cell in line.split("|"))]
        else:
            plain.append(line)
            whole.append(line)
    return plain, "\n".join(whole)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_is_plain(page: Path) -> None:
    lines, prose = prose_of(text_of(page))
    found = [f"{len(line)} characters: {line}" for line in lines if len(line) > LINE and " " in line[:LINE]]
    if page.relative_to(ROOT).as_posix() not in QUOTING:
        found += findings(prose)
    assert not found, "\n".join(["docs/style.md says how to write it:", *found])


def test_the_glossary_is_short() -> None:
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", text_of(ROOT / "docs" / "glossary.md"), re.MULTILINE)
    words = [word for word, _ in rows if word not in ("word", "---")]
    assert len(words) > 40 and len(set(words)) == len(words)
    assert [word for word, meaning in rows if words_of(meaning) > 15] == []


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of the docstrings of a module, its classes and functions, and below attributes."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text


def findings_of(path: Path) -> Iterator[str]:
    where = path.relative_to(ROOT).as_posix()
    for line, text in docstrings(path):
        if PREPOSITION.match(text.strip()):
            yield f"{where}:{line}: begins with a preposition: {text.splitlines()[0]}"
        rows = inspect.cleandoc(text).splitlines()
        prose = "\n".join("" if row.startswith("    ") else row for row in rows)
        yield from (f"{where}:{line}: {found}" for found in findings(prose))


def packages() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "asyncrl").rglob("*.py")):
        name = path.relative_to(ROOT / "asyncrl").parts[0].removesuffix(".py")
        found.setdefault(name, []).extend(findings_of(path))
    return found


def test_docstrings_get_plainer_and_never_less_plain() -> None:
    """Code may move from a package to another: then the sum tells."""
    found = packages()
    above = {name: texts for name, texts in found.items() if len(texts) > CEILINGS.get(name, 0)}
    advice = (
        "docs/style.md says how to write it. If you rewrote docstrings or moved code, set CEILINGS to the "
        "numbers that `python -m tests.unit.test_plain_english` prints. Packages above their ceiling:"
    )
    last = [
        f"{name}: {len(texts)}, ceiling {CEILINGS.get(name, 0)}\n  " + "\n  ".join(texts)
        for name, texts in above.items()
    ]
    assert sum(map(len, found.values())) <= sum(CEILINGS.values()), "\n".join([advice, *last])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The hub removes a generator that is silent.", 0),
        ("It is mended at once.", 2),
        (" ".join(["word"] * 41) + ".", 1),
        ("Code may say `mend` and `at once`.", 0),
    ],
)
def test_the_check_finds_what_it_should(text: str, expected: int) -> None:
    assert len(list(findings(text))) == expected


if __name__ == "__main__":
    by_package = packages()
    print("\n".join(line for name in sys.argv[1:] for line in by_package[name]))  # noqa: T201
    print(dict(sorted(Counter({name: len(found) for name, found in by_package.items()}).items())))  # noqa: T201
