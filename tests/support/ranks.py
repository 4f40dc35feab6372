"""Learner ranks as real processes, for tests."""

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from tests.support import trainer_worker
from tests.support.forks import fork_server
from tests.support.ports import free_ports
from tests.support.waiting import wait_until

Results = dict[str, tuple[dict[str, Tensor], Any]]
"""What rank 0 saw, by scenario name."""


class Ranks:
    """Runs scenarios, each call on fresh processes."""

    def __init__(self, context: ForkServerContext) -> None:
        self._context = context

    def run(
        self,
        ranks: int,
        model: Path,
        scenarios: list[dict[str, Any]],
        out: Path,
        *,
        timeout_s: float = 240,
        networks: Sequence[Path] = (),
        address: str = "127.0.0.1",
    ) -> Results:
        """Fails with the output of a rank that failed. No process is left.

        With `networks`, each rank runs in one of them, and rank 0 has the `address` there.
        """
        out.mkdir(parents=True, exist_ok=True)
        ports = free_ports(len(scenarios))
        job = {
            "ranks": ranks,
            "model": str(model),
            "scenarios": [scenario | {"port": port} for scenario, port in zip(scenarios, ports, strict=True)],
            "out": str(out),
            "address": address,
        }
        places: list[dict[str, Any]] = [{"rank": rank} for rank in range(ranks)]
        for place, network in zip(places, networks, strict=False):
            place["network"] = str(network)
        with tempfile.TemporaryDirectory() as directory:
            logs = [Path(directory) / str(rank) for rank in range(ranks)]
            processes = [
                self._context.Process(target=trainer_worker.work, args=(job | place, log))
                for place, log in zip(places, logs, strict=True)
            ]
            try:
                for process in processes:
                    process.start()
                _wait(processes, logs, timeout_s)
            finally:
                for process in processes:
                    process.kill()
                    process.join()
        return {
            scenario["name"]: (
                load_file(out / f"{scenario['name']}.safetensors"),
                json.loads((out / f"{scenario['name']}.json").read_text()),
            )
            for scenario in scenarios
        }


def _wait(processes: list[Any], logs: list[Path], timeout_s: float) -> None:
    def have_ended() -> bool:
        codes = [process.exitcode for process in processes]
        for rank, (code, log) in enumerate(zip(codes, logs, strict=True)):
            # A rank that fails leaves the others within a collective.
            assert not code, f"rank {rank} exited with {code}:\n{log.read_text()[-6000:]}"
        return None not in codes

    wait_until(have_ended, timeout_s, lambda: "the ranks did not finish")


@contextmanager
def forked_ranks() -> Iterator[Ranks]:
    """Ranks that need not import torch and DeepSpeed each time."""
    with fork_server("tests.support.trainer_worker") as context:
        yield Ranks(context)
