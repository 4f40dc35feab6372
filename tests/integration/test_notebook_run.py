"""A run from the cells of a notebook: rows, functions and a callback that are in no file which can be imported."""

import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.commands.down import processes_of
from asyncrl.run.directory import RunDirectory
from asyncrl.run.starts import read_starts
from tests.support.command import ASYNCRL
from tests.support.models import tiny_qwen2

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

KEYS = (
    "run.name=cells", "learner.device=cpu", "learner.threads=1", "model.dtype=float32", "batch.groups=4",
    "batch.group_size=4", "sampling.max_prompt_tokens=8", "sampling.max_response_tokens=8",
    "generator.engine=transformers", "generator.count=1", "generator.threads=1", "generator.max_running=16",
)  # fmt: skip

CELLS = f"""
import asyncrl

keys = {KEYS!r}
DIGITS = "13579"

class Judge:
    def share(self, text):
        return sum(one in DIGITS for one in text) / 4

judge = Judge()

def odd(prompt, response, number):
    assert prompt.startswith(str(number))
    return judge.share(response)

rows = [dict(prompt=f"{{a}}+{{b}}=", number=a) for a in range(9) for b in range(9)]
seen = []

def see(step, metrics):
    seen.append(step)
    assert metrics["reward/odd/mean"] >= 0 and metrics["reward/reward/mean"] == 0.5
    if step == 2:
        raise KeyError("of the callback")

half = dict(function=lambda prompt, response: 0.5, weight=0.1)
try:
    asyncrl.train("learner.steps=1000", *keys, model="model", data=rows, reward=[odd, half], on_step=see)
except KeyError as error:
    print(error, seen, asyncrl.open("cells").is_up)
print(asyncrl.open("cells").status().step)
"""


def test_rows_functions_and_a_callback_of_cells_make_a_run_that_a_command_resumes(tmp_path: Path) -> None:
    tiny_qwen2(tmp_path / "model")
    command = [sys.executable, "-c", CELLS]
    cells = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert cells.returncode == 0, cells.stderr
    raised, step = cells.stdout.splitlines()
    assert raised == "'of the callback' [1, 2] False" and int(step) >= 2
    more = [*ASYNCRL, "up", "--plain", "runs/cells/config.yaml", f"learner.steps={int(step) + 2}"]
    again = subprocess.run(more, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert again.returncode == 0, again.stderr
    assert "changed since" not in again.stderr
    directory = RunDirectory(tmp_path / "runs" / "cells")
    assert not processes_of(directory.path)
    before, after = read_starts(directory.starts)
    assert len(before.code) == 2 and after.code == before.code and after.step == int(step)
