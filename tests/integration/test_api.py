"""A whole run from Python: started, watched, read, evaluated, exported, stopped, resumed."""

import json
import os
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import asyncrl
from asyncrl.commands.down import processes_of
from tests.support.models import tiny_qwen2

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


def odd(prompt: str, response: str, **row: object) -> float:
    return sum(c in "13579" for c in response) / 4


@pytest.fixture
def config(tmp_path, monkeypatch):
    tiny_qwen2(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{a}+{b}="}) + "\n" for a in range(9) for b in range(9))
    )
    monkeypatch.chdir(tmp_path)
    # The reward of this file is imported by name in the reward's process.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
    yield {
        "run": {"name": "python"},
        "model": {"path": tmp_path / "model", "dtype": "float32"},
        "data": {"train": "rows.jsonl", "eval": "rows.jsonl"},
        "reward": {"functions": [{"function": odd}]},
        "batch": {"groups": 4, "group_size": 4},
        "sampling": {"max_prompt_tokens": 8, "max_response_tokens": 8},
        "learner": {"steps": 1000, "device": "cpu", "threads": 1},
        "generator": {"count": 1, "threads": 1, "max_running": 16, "kv_cache_gib": 0.25},
        "eval": {"every": 500, "prompts": 8},
    }
    for process in processes_of(Path("runs/python")):
        process.kill()


def test_a_run_from_start_to_export(config):
    run = asyncrl.start(config)
    assert run.is_up and run.directory == Path("runs/python")
    with pytest.raises(TimeoutError, match="it goes on"):
        run.wait(timeout_s=0.1)
    while (status := run.status()) is None or status.step < 2:
        with pytest.raises(TimeoutError):
            run.wait(timeout_s=1.0)
    again = asyncrl.open("python")
    assert again.is_up and "reward/mean" in again.metrics()[2]
    stopped = again.stop()
    assert not stopped.is_finished and not again.is_up and not processes_of(run.directory)
    assert run.wait() == stopped

    finished = asyncrl.train(config, f"learner.steps={stopped.step + 1}")
    assert finished == asyncrl.Result(directory=run.directory, is_finished=True, step=stopped.step + 1)
    steps = [step for step, row in run.metrics().items() if "reward/mean" in row]
    assert steps == list(range(1, finished.step + 1))
    best, worst = (run.samples(1, kind="train", order=order)[0].reward for order in ("best", "worst"))
    assert best >= worst >= 0.0

    model = AutoModelForCausalLM.from_pretrained(run.export("exported"))
    assert model.config.num_hidden_layers == 2
    with pytest.raises(asyncrl.RunError, match="exists"):
        run.export("exported")
    assert run.evaluate()["eval/reward_mean"] >= 0.0
