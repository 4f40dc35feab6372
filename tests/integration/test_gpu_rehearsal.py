"""`python -m bench.gpu --device cpu`: the check of a GPU machine with every row that a CPU has, as typed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu.run_rows import MOST_STALLED

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
# A figure of each row that a CPU has, and its verdict.
EXPECTED = {
    "task": {"making a model of random weights": "noted"},
    "stack": {"packages": "ok", "vLLM's plugin asyncrl": "ok", "GPUs": "absent"},
    "engine": {"start": "rehearsed", "probe floor, mean": "ok", "probe floor, largest": "ok"},
    "copies": {"host: copy": "noted", "copies to and from a GPU": "absent"},
    "links": {"tcp": "noted", "nccl, peer to peer": "absent"},
    "weights": {
        "slot: sent, verified and loaded": "noted",
        "slot: time, divided by what is allowed": "rehearsed",
        "disk: sent, verified and loaded": "noted",
        "disk: time, divided by what is allowed": "rehearsed",
        "tcp: sent, verified and loaded": "noted",
        "tcp: time, divided by what is allowed": "rehearsed",
        "nccl: sent, verified and loaded": "noted",  # over Gloo
        "nccl: kill -9 of the learner's process during a transfer, back after": "ok",
        "nccl: learner's processes after kill -9 of the learner's": "ok",
        "nccl: kill -9 of the generator's process during a transfer, back after": "ok",
        "nccl: learner's processes after kill -9 of the generator's": "ok",
        "slot: pinned after kill -9 of the generator that loaded it": "ok",
        "slot: kill -9 of a generator that loads, another one has the next version after": "rehearsed",
    },
    "generator": {f"{running} running, of vLLM alone": "rehearsed" for running in (64, 256, 1024)},
    "learner": {"gradient norm": "ok", "speed": "noted", "MFU, peak memory against the plan": "absent"},
    "loop": {
        "speed": "noted",
        "updates that failed": "ok",
        "generators paused for weights": "rehearsed",
        "kill -9 of a generator, back after": "rehearsed",
    },
}


def test_every_row_that_a_cpu_has_is_rehearsed(tmp_path):
    command = [sys.executable, "-m", "bench.gpu", "--device", "cpu", "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.stdout, done.stderr
    said = json.loads(done.stdout)
    (directory,) = tmp_path.glob("gpu-check-*")
    assert said == json.loads((directory / "result.json").read_text())
    problems = {row["row"]: row["problem"] for row in said["rows"] if row["problem"]}
    assert not problems, problems
    found = {row["row"]: {each["name"]: each for each in row["figures"]} for row in said["rows"]}
    assert found.keys() == EXPECTED.keys()
    for row, figures in EXPECTED.items():
        assert {name: found[row].get(name, {}).get("verdict") for name in figures} == figures, row
    assert found["generator"]["1024 running, of vLLM alone"]["at_least"] == 0.97
    limited = found["weights"]["slot: time, divided by what is allowed"]
    assert limited["at_most"] == 1 and "for the calls of" in limited["note"]
    assert found["loop"]["generators paused for weights"]["at_most"] == MOST_STALLED
    assert done.returncode == 0 and {row["verdict"] for row in said["rows"]} == {"ok"}
    # What is large is gone, and figures and logs stay.
    assert not (directory / "model").exists() and (directory / "loop.log").is_file()
    assert not (directory / "loop" / "checkpoints").exists()
