"""Learner ranks as real processes, for tests; none outlives the call."""

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from helpers_ports import free_ports
from safetensors.torch import load_file
from torch import Tensor

WORKER = Path(__file__).parent / "integration" / "trainer_worker.py"


def run_ranks(
    ranks: int, model: Path, scenarios: list[dict[str, Any]], out: Path, *, timeout_s: float = 240
) -> dict[str, tuple[dict[str, Tensor], Any]]:
    """Run `scenarios` on `ranks` processes; what rank 0 saw, by scenario name. Fails with the output of a rank that failed."""
    out.mkdir(parents=True, exist_ok=True)
    scenarios = [scenario | {"port": port} for scenario, port in zip(scenarios, free_ports(len(scenarios)), strict=True)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(WORKER.parents[2]), "DS_ACCELERATOR": "cpu"}
    with ExitStack() as stack:
        processes, logs = [], []
        for rank in range(ranks):
            job = {"rank": rank, "ranks": ranks, "model": str(model), "scenarios": scenarios, "out": str(out)}
            logs.append(stack.enter_context(tempfile.TemporaryFile("w+")))
            command = [sys.executable, str(WORKER), json.dumps(job)]
            processes.append(subprocess.Popen(command, stdout=logs[-1], stderr=subprocess.STDOUT, env=environment))
            stack.callback(processes[-1].wait)
            stack.callback(processes[-1].kill)
        deadline = time.monotonic() + timeout_s
        while any(process.poll() is None for process in processes):
            if time.monotonic() > deadline or any(process.poll() for process in processes):
                break
            time.sleep(0.05)
        codes = [process.poll() for process in processes]
        for rank, (code, log) in enumerate(zip(codes, logs, strict=True)):
            log.seek(0)
            assert code in (0, None), f"rank {rank} exited with {code}:\n{log.read()[-6000:]}"
        assert None not in codes, f"ranks {[r for r, code in enumerate(codes) if code is None]} did not finish in {timeout_s:g} s"
    return {
        scenario["name"]: (
            load_file(out / f"{scenario['name']}.safetensors"),
            json.loads((out / f"{scenario['name']}.json").read_text()),
        )
        for scenario in scenarios
    }
