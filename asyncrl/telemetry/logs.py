"""Logs: a file of JSON lines for each process, and readable lines on the console.

Modules log with `logging.getLogger(__name__)` as usual. Values passed as `extra` become fields:

    {"time": "2026-01-31T12:00:00.123456Z", "level": "warning", "process": "g0", "version": 7,
     "logger": "asyncrl.generator", "event": "ticket 12 of lane train failed: ...", "ticket_id": 12}
"""

import contextlib
import json
import logging
import logging.handlers
import os
import re
import sys
from collections.abc import MutableMapping
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from structlog.processors import JSONRenderer, TimeStamper, format_exc_info
from structlog.stdlib import ExtraAdder, ProcessorFormatter, add_log_level, add_logger_name
from structlog.typing import Processor

from asyncrl.hosting.processes import is_secret

FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(role)s v%(version)s %(name)s: %(message)s"
ORDER = ("time", "level", "process", "rank", "version", "logger", "event")
SECRET_CHARACTERS = 6  # shorter values are not hidden: they occur inside ordinary words
URL_LOGIN = r"(?<=://)[^\s/@\"']+(?=@)"
HIDDEN = "***"


class LogContext(logging.Filter):
    """Adds the process's role and policy version to every line."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self.role = role
        self.version: int | str = "-"

    def follow(self, version: int) -> None:
        """Set the policy version of the following lines."""
        self.version = version

    def filter(self, record: logging.LogRecord) -> bool:
        """Add both to the record and keep it."""
        record.role, record.version = self.role, self.version
        return True


class _Redacted(logging.Formatter):
    """Removes secrets from the output of another formatter."""

    def __init__(self, inner: logging.Formatter, secrets: re.Pattern[str]) -> None:
        super().__init__()
        self._inner, self._secrets = inner, secrets

    def format(self, record: logging.LogRecord) -> str:
        return self._secrets.sub(HIDDEN, self._inner.format(record))


class _LogFile(logging.handlers.WatchedFileHandler):
    """A log file that reports a failed write once on standard error and tries again with every line."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8", delay=True)
        self._lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line. Never raises."""
        lost = self._lost
        try:
            super().emit(record)
        except OSError:  # it cannot be opened
            self.handleError(record)
        if lost and lost == self._lost:
            self._lost = 0
            logging.getLogger(__name__).warning("%d lines before these could not be written", lost)

    def handleError(self, record: logging.LogRecord) -> None:
        """Count a line that was lost, while its exception is handled."""
        self._lost += 1
        if self._lost == 1:
            message = f"{self.baseFilename} cannot be written and is tried again: {sys.exception()}\n"
            with contextlib.suppress(OSError, ValueError, AttributeError):
                sys.stderr.write(message)
        if self.stream is not None:
            with contextlib.suppress(OSError):
                self.stream.close()
        self.stream = None  # the next line opens it again

    def _open(self) -> TextIOWrapper:
        stream = super()._open()
        with Path(self.baseFilename).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            if file.read(1) not in (b"", b"\n"):  # the last line was cut off
                stream.write("\n")
        return stream


def setup_logging(role: str, directory: Path, *, console: bool) -> LogContext:
    """Log INFO and above to `directory/<role>.jsonl`, and with `console` as readable lines to standard error.

    A second call replaces the handlers of the first.
    """
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
    context, secrets = LogContext(role), _secrets()
    file = _LogFile(directory / f"{role}.jsonl")
    file.setFormatter(_Redacted(_json_formatter(), secrets))
    handlers: list[logging.Handler] = [file]
    if console:
        handlers.append(logging.StreamHandler(sys.stderr))
        handlers[-1].setFormatter(_Redacted(logging.Formatter(FORMAT, datefmt="%Y-%m-%d %H:%M:%S"), secrets))
    root = logging.getLogger()
    for old in list(root.handlers):
        if any(isinstance(item, LogContext) for item in old.filters):
            root.removeHandler(old)
            old.close()
    for handler in handlers:
        handler.addFilter(context)
        root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    logging.getLogger(__name__).info("log of process %d begins", os.getpid())
    return context


def _secrets() -> re.Pattern[str]:
    """Match logins in URLs and the values of secret environment variables, plain and escaped as in JSON."""
    values = [value for name, value in os.environ.items() if is_secret(name)]
    long = [value for value in values if len(value) >= SECRET_CHARACTERS]
    forms = {form for value in long for form in (value, json.dumps(value)[1:-1])}
    longest_first = sorted(forms, key=len, reverse=True)  # one may contain another
    return re.compile("|".join([URL_LOGIN, *map(re.escape, longest_first)]))


def _json_formatter() -> logging.Formatter:
    time_field = TimeStamper(fmt="iso", utc=True, key="time")
    fields: list[Processor] = [add_log_level, add_logger_name, ExtraAdder(), time_field, _named]
    return ProcessorFormatter(
        foreign_pre_chain=fields,
        # json.dumps writes ASCII: half an emoji from a tokenizer becomes an escape.
        processors=[ProcessorFormatter.remove_processors_meta, format_exc_info, JSONRenderer(json.dumps)],
    )


def _named(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Rename fields and put them in reading order."""
    for left in ("message", "asctime"):  # added by the formatter of another handler
        event.pop(left, None)
    event["process"] = event.pop("role")
    if event["version"] == "-":
        event["version"] = None
    if rank := os.environ.get("RANK"):
        event["rank"] = int(rank)
    return {name: event.pop(name) for name in ORDER if name in event} | dict(event)
