"""Hides libraries beside torch that are built for a GPU from a torch that is built for CPUs.

vLLM's build for CPUs requires torchvision, torchaudio and torchcodec, and does not say which build. PyPI has those for CUDA.
Beside a torch for CPUs none of them can be imported, and transformers, which looks whether torchvision is installed, fails with
"operator torchvision::nms does not exist". A package cannot declare that another one has to be absent, and nothing here needs the
three. So to our processes they are not installed, nor to vLLM's, which ask us at their start (pyproject.toml, entry points).
"""

import re
import sys
from importlib.machinery import PathFinder
from pathlib import Path

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
CPU = "cpu"


def hide_foreign_builds() -> None:
    """Let no import find what cannot be imported. Returns None, which tells vLLM that this is no platform for it."""
    for name in foreign_builds():
        # So `import` raises ModuleNotFoundError, and importlib.util.find_spec finds nothing.
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]


def foreign_builds() -> list[str]:
    """Which companions of torch are installed for CUDA while torch is for CPUs."""
    if build_of("torch") != CPU:
        return []
    return [name for name in COMPANIONS if build_of(name).startswith("cu")]


def build_of(package: str) -> str:
    """`cpu`, `cu130` or the like, as the package's own files say; empty where it is not installed or does not say."""
    spec = PathFinder.find_spec(package)
    for directory in (spec and spec.submodule_search_locations) or ():
        file = Path(directory, "version.py")
        found = (
            re.search(r"^__version__ = '[^'+]+\+(\w+)'", file.read_text(encoding="utf-8"), re.MULTILINE)
            if file.is_file()
            else None
        )
        if found:
            return found[1]
    return ""
