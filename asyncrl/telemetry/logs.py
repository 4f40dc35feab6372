"""Logs: a file of JSON lines for each process, and readable lines on the console.

Modules log with `logging.getLogger(__name__)` as usual. Values passed as `extra` become fields:

    {"time": "2026-01-31T12:00:00.123456Z", "level": "warning", "process": "g0", "version": 7,
     "logger": "asyncrl.generator", "event": "ticket 12 of lane train failed: ...", "ticket_id": 12}
"""

import contextlib
import json
import logging
import os
import re
import sys
from datetime import UTC, datetime
from pathlib import Path

from asyncrl.hosting.processes import is_secret
from asyncrl.telemetry.jsonl import Lines

FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(role)s v%(version)s %(name)s: %(message)s"
# Fields of every record; all others were passed as `extra`.
USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "role", "version"}
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
        record.role, record.version = self.role, self.version
        return True


class _Json(logging.Formatter):
    """Writes a record as a line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        at, context = datetime.fromtimestamp(record.created, UTC), vars(record)
        rank, version = os.environ.get("RANK"), context["version"]
        fields = {
            "time": at.isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "process": context["role"],
            **({"rank": int(rank)} if rank else {}),
            "version": None if version == "-" else version,
            "logger": record.name,
            "event": record.getMessage(),
            **{name: value for name, value in context.items() if name not in USUAL},
            **({"exception": self.formatException(record.exc_info)} if record.exc_info else {}),
        }
        # ASCII: half an emoji from a tokenizer becomes an escape.
        return json.dumps(fields, default=repr)


class _Redacted(logging.Formatter):
    """Removes secrets from the output of another formatter."""

    def __init__(self, inner: logging.Formatter, secrets: re.Pattern[str]) -> None:
        super().__init__()
        self._inner, self._secrets = inner, secrets

    def format(self, record: logging.LogRecord) -> str:
        return self._secrets.sub(HIDDEN, self._inner.format(record))


class _LogFile(logging.Handler):
    """A log file. Standard error says once that it cannot be written; the lines wait until it can be."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path, self._lines = path, Lines(path)
        self._is_failing = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line. Never raises."""
        try:
            self._lines.put(self.format(record))
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    sys.stderr.write(f"{self._path} cannot be written and is tried again: {error}\n")
            self._is_failing = True
        except Exception:  # noqa: BLE001 - what is logged may have a method that raises anything
            self.handleError(record)

    def close(self) -> None:
        self._lines.close()
        super().close()


def setup_logging(role: str, directory: Path, *, console: bool) -> LogContext:
    """Log INFO and above to `directory/<role>.jsonl`, and with `console` as readable lines to standard error.

    A second call replaces the handlers of the first.
    """
    context, secrets = LogContext(role), _secrets()
    file = _LogFile(directory / f"{role}.jsonl")
    file.setFormatter(_Redacted(_Json(), secrets))
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
    # Without white space, so that a form in which a newline is escaped twice is found, too.
    values = [value.strip() for name, value in os.environ.items() if is_secret(name)]
    long = [value for value in values if len(value) >= SECRET_CHARACTERS]
    forms = {form for value in long for form in (value, json.dumps(value)[1:-1])}
    longest_first = sorted(forms, key=len, reverse=True)  # one may contain another
    return re.compile("|".join([URL_LOGIN, *map(re.escape, longest_first)]))
