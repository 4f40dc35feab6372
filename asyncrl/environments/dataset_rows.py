"""Prints the tasks of a library as rows, in a Python that needs the library and nothing of asyncrl."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from asyncrl.environments.named import adapter
from asyncrl.errors import ConfigError

# Libraries whose adapter has `rows(name, size, seed)`, each with an example.
DATASETS = {"reasoning_gym": "reasoning_gym:chain_sum", "verifiers": "verifiers:gsm8k"}
PLACE = str(Path(__file__).parents[2])
# The library first: the working directory and our packages may have modules of the same name.
BEGIN = "import os, sys; sys.path = [*filter(None, sys.path), os.getcwd(), sys.argv[1]]"
START = f"{BEGIN}; from {__name__} import main; main()"


def dataset_rows(target: str, *, size: int, seed: int, python: Path | None = None) -> Iterator[str]:
    """Return rows of a library's tasks as JSON, made by another Python if one is named.

    Raises ConfigError, and ImportError if the library is missing.
    """
    library, _, name = target.partition(":")
    if library not in DATASETS:
        allowed = ", ".join(f"{one}:NAME" for one in DATASETS)
        raise ConfigError(
            f"dataset: found {target}; allowed is {allowed}, for example {DATASETS['reasoning_gym']}"
        )
    if python is not None:
        yield from _rows_of(python, [target, str(size), str(seed)])
        return
    try:
        yield from map(json.dumps, adapter(library).rows(name, size=size, seed=seed))
    except (ValueError, TypeError) as error:  # an unknown name or option
        raise ConfigError(f"dataset {target}: {error}") from error


def main() -> None:
    """Print the rows that the arguments name; exit with a text if there are none."""
    _, target, size, seed = sys.argv[1:]
    rows, sys.stdout = sys.stdout, sys.stderr  # libraries print, too
    try:
        for row in dataset_rows(target, size=int(size), seed=int(seed)):
            rows.write(f"{row}\n")
    except (ConfigError, ImportError) as error:
        sys.exit(f"asyncrl: {error}")


def _rows_of(python: Path, arguments: list[str]) -> Iterator[str]:
    try:
        with subprocess.Popen(
            [str(python), "-c", START, PLACE, *arguments],
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                yield line.rstrip("\n")
    except OSError as error:
        raise ConfigError(f"dataset: {python} cannot be started: {error}") from error
    if process.returncode:
        raise ConfigError(
            f"dataset {arguments[0]}: {python} ended with status {process.returncode}; it says why above"
        )
