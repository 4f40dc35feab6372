"""Finds the error in the output of a dead process, and counts deaths with the same error."""

import re
from dataclasses import dataclass
from pathlib import Path

READ_BYTES = 1 << 20  # read at most this much of the end of a log: engines print thousands of lines
LONGEST, LINES = 400, 40  # characters of an error; last lines in which `last_message` looks for one
SHOWN = 15  # lines of the output in a message
# Colour codes, the prefix of lines that vLLM's processes print, and the margin of a group of exceptions.
NOISE = re.compile(
    r"\x1b\[[0-9;]*m|^\((?:\w+ )?pid=\d+\)\s*|^\(\w+ pid=\d+\)\s*|"
    r"^(?:ERROR|WARNING|INFO) [\d: .-]+\[[^\]]*\]\s*|^\s*[|+][-+|\s]*"
)
# The last line of a traceback, and the message with which our own processes end.
ERROR = re.compile(
    r"(?:[A-Za-z_][\w.]*\.)?(?P<name>[A-Z]\w*(?:Error|Exception|Interrupt|Refused|Gap|Fenced))\b: "
    r"(?P<text>.*\S)"
)
# Errors that only point to another failure; a rank that loses another one says "closed by peer" or the like.
VAGUE = re.compile(
    r"see (?:root cause|the) |failed core proc|TimeoutError|cancelled|by peer|remote (?:worker|process)",
    re.IGNORECASE,
)
# How torch begins the lines of an exception that nobody caught in a rank.
UNCAUGHT = re.compile(r"\[rank\d+\]:")


def last_error(text: str) -> str:
    """Return the last error, and the first one too where the last is vague; without errors, the last line."""
    lines = [_plain(line) for line in text.splitlines()]
    found = [ERROR.fullmatch(line) or ERROR.search(line.partition(": ")[2]) for line in lines]
    errors = [f"{error['name']}: {error['text']}" for error in found if error]
    if not errors:
        return next((line for line in reversed(lines) if line), "")[:LONGEST]
    first, last = errors[0], errors[-1]
    more = f" (first: {first[:LONGEST]})" if VAGUE.search(last) and first != last else ""
    return last[:LONGEST] + more


def last_message(text: str) -> str:
    """Return the last error and all lines below it, which may list more mistakes; without errors, the end.

    The process has caught the error: what other ranks did not catch, because they lost it, is left out.
    """
    lines = [line for line in text.rstrip().splitlines() if not UNCAUGHT.match(line)][-LINES:]
    for index in reversed(range(len(lines))):
        if found := ERROR.search(_plain(lines[index])):
            return "\n".join([f"{found['name']}: {found['text']}", *lines[index + 1 :]])
    return "\n".join(lines)


def _plain(line: str) -> str:
    while (shorter := NOISE.sub("", line)) != line:
        line = shorter
    return line.strip()


@dataclass(slots=True)
class Deaths:
    """The deaths of one process over its restarts."""

    path: Path  # the file with the output of all restarts
    words: str = ""  # last error of the newest death
    last_lines: str = ""  # of its output
    in_a_row: int = 0  # newest deaths whose last errors differ in numbers only
    _read_to: int = 0

    def __post_init__(self) -> None:
        self._read_to = self._size()

    def note(self) -> str:
        """Read the output of the process that has just died and return its last error."""
        printed = self.printed()
        self.last_lines = "\n".join(printed.splitlines()[-SHOWN:])
        words = last_error(printed)
        # Numbers differ between restarts: ids, ports, times.
        shape, last_shape = (re.sub(r"0x[0-9a-f]+|\d+", "#", text) for text in (words, self.words))
        self.in_a_row = self.in_a_row + 1 if words and shape == last_shape else 1
        self.words = words
        return words

    def printed(self) -> str:
        """Return the output since the last call."""
        try:
            size = self._size()
            start, self._read_to = max(min(self._read_to, size), size - READ_BYTES), size
            with self.path.open("rb") as file:
                file.seek(start)
                return file.read(READ_BYTES).decode(errors="replace")
        except OSError:
            return ""

    def _size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0
