"""Why a process died, in a line, out of all that it printed; and whether it dies of the same again and again."""

import re
from dataclasses import dataclass
from pathlib import Path

READ_BYTES = 1 << 20
"""Of the end of a log: engines print thousands of lines."""
LONGEST, LINES = 400, 40
NOISE = re.compile(r"\x1b\[[0-9;]*m|^\((?:\w+ )?pid=\d+\)\s*|^\(\w+ pid=\d+\)\s*|^(?:ERROR|WARNING|INFO) [\d: .-]+\[[^\]]*\]\s*")
"""Colours, and what vLLM puts before the lines of its processes."""
ERROR = re.compile(r"(?:[A-Za-z_][\w.]*\.)?(?P<name>[A-Z]\w*(?:Error|Exception|Interrupt|Refused|Gap|Fenced))\b: (?P<text>.*\S)")
"""The last line of a traceback, and how our processes say what ended them."""
VAGUE = re.compile(r"see (?:root cause|the) |failed core proc|TimeoutError|cancelled", re.IGNORECASE)
"""Says only that something else has failed."""


def last_error(text: str) -> str:
    """The error that ended a process, and the first one before it where that tells more; else its last line."""
    lines = [_plain(line) for line in text.splitlines()]
    errors = [found for line in lines if (found := ERROR.fullmatch(line) or ERROR.search(line.partition(": ")[2]))]
    said = [f"{found['name']}: {found['text']}" for found in errors]
    if not said:
        return next((line for line in reversed(lines) if line), "")[:LONGEST]
    last, first = said[-1], said[0]
    return f"{last[:LONGEST]} (first: {first[:LONGEST]})" if VAGUE.search(last) and first != last else last[:LONGEST]


def last_message(text: str) -> str:
    """The last error with the lines below it: an error of ours may be a list of mistakes. Without one, the last lines."""
    lines = text.rstrip().splitlines()[-LINES:]
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
    """Of one process, one after the other."""

    path: Path
    """Where it prints, every life after the one before."""
    words: str = ""
    """Of the newest."""
    in_a_row: int = 0
    """Newest deaths with the same words, whatever numbers are in them."""
    _read_to: int = 0

    def __post_init__(self) -> None:
        self._read_to = self._size()

    def note(self) -> str:
        """Read what the process that has just died printed; its last error."""
        words = last_error(self.printed())
        same = words and _shape(words) == _shape(self.words)
        self.in_a_row = self.in_a_row + 1 if same else 1
        self.words = words
        return words

    def printed(self) -> str:
        """What it printed since the last call."""
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


def _shape(words: str) -> str:
    """Without what differs from life to life: ids, ports, times."""
    return re.sub(r"0x[0-9a-f]+|\d+", "#", words)
