"""Learner ranks as real processes, for tests; none outlives its `with`."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from tests.support.ports import free_ports

ROOT = Path(__file__).parents[2]

Results = dict[str, tuple[dict[str, Tensor], Any]]
"""What rank 0 saw, by scenario name."""


class Ranks:
    """Processes that run scenarios one after the other: importing torch and DeepSpeed takes longer than most
    scenarios."""

    def __init__(self, ranks: int) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
        self._logs = [Path(tempfile.mkstemp(suffix=f".rank-{rank}")[1]) for rank in range(ranks)]
        self._processes = [_worker(log, environment) for log in self._logs]
        self.is_usable = True
        """No scenario has failed: one that fails ends its process, and leaves the others within a
        collective."""

    def close(self) -> None:
        self.is_usable = False
        for process in self._processes:
            process.kill()
            process.communicate()
        for log in self._logs:
            log.unlink(missing_ok=True)

    def run(
        self, model: Path, scenarios: list[dict[str, Any]], out: Path, *, timeout_s: float = 240
    ) -> Results:
        """Fails with the output of a rank that failed."""
        out.mkdir(parents=True, exist_ok=True)
        ports = free_ports(len(scenarios))
        scenarios = [scenario | {"port": port} for scenario, port in zip(scenarios, ports, strict=True)]
        try:
            for rank, process in enumerate(self._processes):
                job = {
                    "rank": rank,
                    "ranks": len(self._processes),
                    "model": str(model),
                    "scenarios": scenarios,
                    "out": str(out),
                }
                process.stdin.write(json.dumps(job) + "\n")
                process.stdin.flush()
            self._wait(out, timeout_s)
        except BaseException:
            self.close()
            raise
        return {
            scenario["name"]: (
                load_file(out / f"{scenario['name']}.safetensors"),
                json.loads((out / f"{scenario['name']}.json").read_text()),
            )
            for scenario in scenarios
        }

    def _wait(self, out: Path, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        done = [out / f"{rank}.done" for rank in range(len(self._processes))]
        while left := [path.stem for path in done if not path.exists()]:
            for rank, (process, log) in enumerate(zip(self._processes, self._logs, strict=True)):
                code = process.poll()
                assert code is None, f"rank {rank} exited with {code}:\n{log.read_text()[-6000:]}"
            assert time.monotonic() < deadline, f"ranks {', '.join(left)} did not finish in {timeout_s:g} s"
            time.sleep(0.05)
        for path in done:
            path.unlink()


def _worker(log: Path, environment: dict[str, str]) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.support.trainer_worker"]
    with log.open("w") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
        )


@contextmanager
def resident_ranks() -> Iterator[Callable[[int], Ranks]]:
    """Some number of ranks, the same processes each time unless one has failed."""
    with ExitStack() as stack:
        started: dict[int, Ranks] = {}

        def ranks_of(ranks: int) -> Ranks:
            if ranks not in started or not started[ranks].is_usable:
                started[ranks] = Ranks(ranks)
                stack.callback(started[ranks].close)
            return started[ranks]

        yield ranks_of


def run_ranks(
    ranks: int, model: Path, scenarios: list[dict[str, Any]], out: Path, *, timeout_s: float = 240
) -> Results:
    """Run `scenarios` on `ranks` fresh processes."""
    with resident_ranks() as fresh:
        return fresh(ranks).run(model, scenarios, out, timeout_s=timeout_s)
