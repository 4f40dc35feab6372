"""What a figure depends on: the command, the machine, the versions."""

import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any


def describe(*packages: str, **binaries: Path) -> dict[str, Any]:
    """Plain values for the JSON beside every result."""
    versions = {name: version(name) for name in packages}
    for name, path in binaries.items():
        versions[name] = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
    return {
        "command": " ".join(["python", *_what_ran(), *sys.argv[1:]]),
        "python": platform.python_version(),
        "versions": versions,
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def _what_ran() -> list[str]:
    """A module by its name, not by where it lies on this machine."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return ["-m", spec.name.removesuffix(".__main__")] if spec else [sys.argv[0]]


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )
