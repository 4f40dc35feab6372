"""What our Markdown holds: pages, blocks of code, commands."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "deploy").glob("*.md"),
        *(ROOT / "reliability").glob("*.md"),
    ]
)
PROGRAMS = {
    "asyncrl", "bash", "cd", "cp", "curl", "docker", "export", "git", "jq", "kubectl", "make", "mkdir", "mypy", "pip", "pytest", "python",
    "ray", "ruff", "sbatch", "scp", "sed", "source", "tensorboard", "vllm", "wandb",
}  # fmt: skip
"""What a line begins with that a reader is told to type."""


@dataclass(frozen=True, slots=True)
class Command:
    """A line that a reader is told to type, without its comment."""

    page: str
    text: str

    @property
    def words(self) -> list[str]:
        """As a shell splits it, from the program on, up to a pipe."""
        words = shlex.split(self.text, comments=True)
        if "|" in words[1:]:
            words = words[: words.index("|")]
        while words and (words[0] == "time" or re.match(r"[A-Z_]+=", words[0])):
            words.pop(0)
        return words

    @property
    def program(self) -> str:
        """Without where it lies; empty for a line that is no command."""
        return Path(self.words[0]).name if self.words else ""


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """(language, text) of every block of code; an indented one has no language."""
    for token in MarkdownIt().parse(text_of(page)):
        if token.type in ("fence", "code_block"):
            yield token.info.strip(), token.content


def commands(page: Path) -> Iterator[Command]:
    """Every line of an indented or fenced block that begins with a program."""
    for language, content in blocks(page):
        for line in (
            content.splitlines() if not language or language in ("sh", "bash", "console", "shell") else ()
        ):
            command = Command(page.relative_to(ROOT).as_posix(), re.sub(r"\s+#\s.*$", "", line.strip()))
            if _begins_with_a_program(command):
                yield command


def inline_commands(page: Path) -> Iterator[Command]:
    """`asyncrl …`, `make test` within a sentence or a table: a program and at least one word more."""
    for token in MarkdownIt().parse(text_of(page)):
        for code in token.children or ():
            command = Command(page.relative_to(ROOT).as_posix(), " ".join(code.content.split()))
            if code.type == "code_inline" and " " in command.text and _begins_with_a_program(command):
                yield command


def _begins_with_a_program(command: Command) -> bool:
    try:
        return command.program in PROGRAMS
    except ValueError:  # an apostrophe: prose, or a picture
        return False


def files(page: Path) -> dict[str, str]:
    """Blocks whose first line is a comment with a file name: what a reader is told to save."""
    named = ((re.match(r"# (\S+\.(?:py|yaml))\n", content), content) for _, content in blocks(page))
    return {match[1]: content for match, content in named if match}
