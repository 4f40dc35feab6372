"""What our Markdown holds: pages, blocks of code, commands."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "deploy").glob("*.md")])
SHELL = {"sh", "bash", "console", "shell"}


@dataclass(frozen=True, slots=True)
class Command:
    """A line that a reader is told to type, without its comment."""

    page: str
    text: str

    @property
    def words(self) -> list[str]:
        """As a shell splits it."""
        return shlex.split(self.text, comments=True)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """(language, text) of every block of code; an indented one has no language."""
    for token in MarkdownIt().parse(text_of(page)):
        if token.type in ("fence", "code_block"):
            yield token.info.strip(), token.content


def commands(page: Path, programs: set[str]) -> Iterator[Command]:
    """Every line of a block that starts with a program, or is in a block of shell."""
    for language, content in blocks(page):
        for line in content.splitlines():
            text = re.sub(r"\s+#\s.*$", "", line.strip())
            if text and (language in SHELL or (not language and text.split()[0] in programs)):
                yield Command(page.relative_to(ROOT).as_posix(), text)


def inline_commands(page: Path) -> Iterator[Command]:
    """`asyncrl …` within a sentence or a table."""
    for text in re.findall(r"(?<!`)`(asyncrl [^`]+)`", text_of(page)):
        yield Command(page.relative_to(ROOT).as_posix(), text)


def files(page: Path) -> dict[str, str]:
    """Blocks whose first line is a comment with a file name: what a reader is told to save."""
    named = ((re.match(r"# (\S+\.(?:py|yaml))\n", content), content) for _, content in blocks(page))
    return {match[1]: content for match, content in named if match}
