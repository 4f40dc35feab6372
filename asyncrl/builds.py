"""Hides torchvision, torchaudio and torchcodec if they are CUDA builds and torch is a CPU build.

vLLM's CPU package requires all three and does not name a build, and PyPI has the builds for CUDA. With a CPU
build of torch, `import torchvision` fails with "operator torchvision::nms does not exist", and so does
transformers, which imports torchvision if it is installed. asyncrl needs none of the three, but a package
cannot declare that another package must be absent. So this module makes them look absent.

`import asyncrl` calls it, and vLLM's own processes, as one of their platform plugins (see pyproject.toml).
"""

import re
import sys
from importlib.machinery import PathFinder
from pathlib import Path

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
CPU = "cpu"


def hide_foreign_builds() -> None:
    """Make the companions that cannot be imported look absent. Returns None: to vLLM, "not a platform"."""
    for name in foreign_builds():
        # So `import` raises ModuleNotFoundError, and importlib.util.find_spec finds nothing.
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]


def foreign_builds() -> list[str]:
    """Names of the companions that are built for CUDA, if torch is a CPU build."""
    if build_of("torch") != CPU:
        return []
    return [name for name in COMPANIONS if build_of(name).startswith("cu")]


def build_of(package: str) -> str:
    """Return `cpu`, `cu130` and so on from the package's version.py; empty if it or the build is missing."""
    spec = PathFinder.find_spec(package)
    files = (Path(directory, "version.py") for directory in (spec and spec.submodule_search_locations) or ())
    text = "\n".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
    found = re.search(r"^__version__ = '[^'+]+\+(\w+)'", text, re.MULTILINE)
    return found[1] if found else ""
