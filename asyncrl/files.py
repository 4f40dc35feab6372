"""Small text files that others read while they are written. What must survive a loss of power is `trainer.files`."""

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write a file at once: whoever opens it sees the old content or the new."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
