"""Runs every row of the check in a process of its own, within a time limit: docs/gpu.md.

    DIRECTORY/place.json     device and model
    DIRECTORY/ROW.jsonl      a figure a line, as soon as it is measured
    DIRECTORY/ROW.log        what the row's libraries have printed
    DIRECTORY/result.json    all rows so far, with their verdicts

Rows are in the order of risk. One that hangs or dies costs only what it has not measured yet. The process of
a row is `python -m bench.gpu.kit NAME MODULE:FUNCTION DIRECTORY`: the function gets the `Place` and yields
figures, and each is on disk before the next one is measured.
"""

import json
import os
import pkgutil
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from asyncrl.engine.base import Device
from asyncrl.errors import ConfigError
from asyncrl.files import replace_text
from asyncrl.hosting.environment import WITHOUT_CUDA
from asyncrl.hosting.gpus import BY_BUS, count_gpus
from asyncrl.hosting.processes import (
    die_with_parent,
    die_with_spawner,
    module_argv,
    public_environment,
    stop_processes,
)
from asyncrl.hosting.workers import ending
from asyncrl.version import __version__
from bench.gpu.figures import Figure, Place, append, figures_in

SAID_CHARACTERS = 600  # quoted from the end of a log
# Directories that are large, and worth nothing after the check.
BULKY = ("model", "weights", "loop/checkpoints")
HERE = "bench.gpu"
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table: a function that yields figures, and the time that it may take."""

    name: str
    target: str  # MODULE:FUNCTION
    limit_s: float  # about four times what a row took on a machine of one H200
    reads: tuple[str, ...] = ()  # earlier rows whose figures it needs


ROWS = (
    Row("task", f"{HERE}.run_rows:task", 180.0),
    Row("stack", f"{HERE}.hardware_rows:stack", 120.0),
    Row("engine", f"{HERE}.engine_rows:engine", 600.0),
    Row("copies", f"{HERE}.hardware_rows:copies", 120.0),
    Row("links", f"{HERE}.hardware_rows:links", 120.0),
    Row("weights", f"{HERE}.weights_rows:weights", 600.0, reads=("copies", "links")),
    Row("generator", f"{HERE}.engine_rows:generator", 900.0),
    Row("learner", f"{HERE}.learner_rows:learner", 240.0),
    Row("loop", f"{HERE}.run_rows:loop", 600.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a row has measured, and how it ended."""

    name: str
    limit_s: float
    seconds: float
    figures: tuple[Figure, ...]
    problem: str = ""  # why the row did not measure everything

    @property
    def verdict(self) -> Literal["ok", "failed"]:
        """Failed if a figure is, or if the row did not end well."""
        return "failed" if self.problem or any(f.verdict == "failed" for f in self.figures) else "ok"

    def to_values(self) -> dict[str, Any]:
        """Return JSON values."""
        head = {"row": self.name, "verdict": self.verdict, "problem": self.problem}
        times = {"seconds": round(self.seconds, 1), "limit_s": self.limit_s}
        return {**head, **times, "figures": [asdict(figure) for figure in self.figures]}


def open_place(device: Device, model: Path | None) -> Place:
    """Make the directory of a check below the working directory. Raises ConfigError."""
    if device == "cuda" and not count_gpus():
        raise ConfigError(
            "bench.gpu: found no NVIDIA GPU (/dev/nvidia*, nvidia-smi -L, CUDA_VISIBLE_DEVICES); run it "
            "where `nvidia-smi` shows one, or rehearse it here with `python -m bench.gpu --device cpu`"
        )
    if model is not None and not (model / "config.json").is_file():
        raise ConfigError(
            f"bench.gpu: {model} has no config.json; give --model the directory of a Hugging Face model, "
            "or leave it out: the check then makes one of random weights"
        )
    directory = Path(f"gpu-check-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    directory.mkdir()
    place = Place(directory, device, str(model.absolute() if model else directory / "model"))
    place.write()
    return place


def check(place: Place, rows: Sequence[Row] = ROWS) -> Iterator[Result]:
    """Run the rows and yield their results in order; each is in result.json first.

    The first row makes what the others need. On GPUs they run one after the other. A rehearsal judges no
    speed, so there two run at a time.
    """
    runner, results = _Runner(place), list[Result]()
    pool = ThreadPoolExecutor(1 if place.on_gpu else 2)
    try:
        for result in runner.run_all(rows, pool):
            results.append(result)
            values = [each.to_values() for each in results]
            head = {"asyncrl": __version__, "device": place.device, "model": place.model}
            replace_text(place.directory / "result.json", json.dumps({**head, "rows": values}, indent=1))
            yield result
    finally:
        runner.stop()
        pool.shutdown(cancel_futures=True)
        for name in BULKY:
            shutil.rmtree(place.directory / name, ignore_errors=True)


class _Runner:
    def __init__(self, place: Place) -> None:
        self._place = place
        self._lock, self._stopped = threading.Lock(), False
        self._running: set[subprocess.Popen[bytes]] = set()

    def run_all(self, rows: Sequence[Row], pool: ThreadPoolExecutor) -> Iterator[Result]:
        """Run the first row, and then the others in the threads of `pool`."""
        yield self.run(rows[0])
        begun: dict[str, Future[Result]] = {}
        for row in rows[1:]:
            begun[row.name] = pool.submit(self.run, row, [begun[name] for name in row.reads if name in begun])
        yield from (each.result() for each in begun.values())

    def run(self, row: Row, earlier: Sequence[Future[Result]] = ()) -> Result:
        """Run a row to its end or its limit, after the rows that it reads."""
        wait(earlier)
        directory, started_s = self._place.directory, time.monotonic()
        log = directory / f"{row.name}.log"
        command = row_argv(row.name, row.target, directory)
        environment = BY_BUS | public_environment() | WITHOUT_CUDA
        environment |= {"PYTHONUNBUFFERED": "1", "SPT_NOENV": "1", "PYTHONPATH": str(ROOT)}
        if not self._place.on_gpu:
            environment["OMP_NUM_THREADS"] = "1"
        with self._lock, log.open("wb") as output:
            if self._stopped:
                return self._result(row, 0.0, "not started")
            process = subprocess.Popen(
                command, stdout=output, stderr=output, env=environment, start_new_session=True
            )
            self._running.add(process)
        try:
            status = process.wait(row.limit_s)
            problem = f"its process ended early ({ending(status)}){_end_of(log)}" if status else ""
        except subprocess.TimeoutExpired:
            problem = f"cut off after {row.limit_s:.0f} s{_end_of(log)}"
        finally:
            _end(process)
            self._running.discard(process)
        return self._result(row, time.monotonic() - started_s, problem)

    def stop(self) -> None:
        """End the rows that run, and start no others."""
        with self._lock:
            self._stopped = True
            for process in tuple(self._running):
                _end(process)

    def _result(self, row: Row, seconds: float, problem: str) -> Result:
        figures = tuple(figures_in(self._place.directory / f"{row.name}.jsonl"))
        return Result(name=row.name, limit_s=row.limit_s, seconds=seconds, figures=figures, problem=problem)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill a row with its descendants, of which some are in sessions of their own."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:  # they end with their parent
        family = []
    stop_processes([process], grace_s=0.0)
    for child in family:
        if child.is_running():
            child.kill()


def _end_of(log: Path) -> str:
    said = log.read_text(errors="replace").strip()[-SAID_CHARACTERS:]
    return f"; {log} ends with: {said}" if said else ""


def row_argv(name: str, target: str, directory: Path) -> list[str]:
    """Return the command of a row's process."""
    return module_argv(f"{HERE}.kit", name, target, str(directory))


def _measure_row() -> None:
    name, target, directory = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    die_with_parent()
    for figure in pkgutil.resolve_name(target)(Place.read(directory)):
        append(directory / f"{name}.jsonl", figure)
    # What a library's threads or children still do must not keep the row.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    _measure_row()
# For the engine's processes, as in a generator.
elif __name__ == "__mp_main__":
    die_with_spawner()
