"""Logs: one file per process, every line with time, role and policy version."""

import logging
import os
import sys
from pathlib import Path

FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(role)s v%(version)s %(name)s: %(message)s"


class LogContext(logging.Filter):
    """Adds role and version to every line."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self.role = role
        self.version: int | str = "-"

    def follow(self, version: int) -> None:
        """From here on the lines are of `version`."""
        self.version = version

    def filter(self, record: logging.LogRecord) -> bool:
        """Always True; only adds to the record."""
        record.role, record.version = self.role, self.version
        return True


def setup_logging(role: str, directory: Path, *, console: bool) -> LogContext:
    """Log everything from INFO up to `directory/<role>.log`; to standard error too where `console`.

    Calling it again replaces what the last call set up.
    """
    directory.mkdir(parents=True, exist_ok=True)
    context = LogContext(role)
    handlers: list[logging.Handler] = [
        logging.FileHandler(directory / f"{role}.log", encoding="utf-8", errors="backslashreplace")
    ]
    if console:
        handlers.append(logging.StreamHandler(sys.stderr))
    formatter = logging.Formatter(FORMAT, datefmt="%Y-%m-%d %H:%M:%S")
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if any(isinstance(item, LogContext) for item in handler.filters)]:
        root.removeHandler(old)
        old.close()
    for handler in handlers:
        handler.setFormatter(formatter)
        handler.addFilter(context)
        root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    logging.getLogger(__name__).info("log of process %d begins", os.getpid())
    return context
