"""A whole run from Python: started, watched, read, evaluated, exported, stopped, resumed."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import asyncrl
from asyncrl.commands.down import processes_of
from tests.support.models import tiny_qwen2

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


def odd(prompt: str, response: str, **row: object) -> float:
    return sum(c in "13579" for c in response) / 4


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("api")
    tiny_qwen2(directory / "model")
    (directory / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{a}+{b}="}) + "\n" for a in range(9) for b in range(9))
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        # The reward of this file is imported by name in the reward's process.
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
        yield {
            "run": {"name": "python"},
            "model": {"path": directory / "model", "dtype": "float32"},
            "data": {"train": "rows.jsonl", "eval": "rows.jsonl"},
            "reward": {"functions": [{"function": odd}]},
            "batch": {"groups": 4, "group_size": 4},
            "sampling": {"max_prompt_tokens": 8, "max_response_tokens": 8},
            "learner": {"steps": 1000, "device": "cpu", "threads": 1},
            "generator": {
                "engine": "transformers",
                "count": 1,
                "threads": 1,
                "max_running": 16,
                "kv_cache_gib": 0.25,
            },
            "eval": {"every": 500, "prompts": 8},
        }
        for process in processes_of(Path("runs/python")):
            process.kill()


@pytest.fixture(scope="module")
def stopped(config: dict[str, Any]) -> asyncrl.Run:
    """A run that was started, watched and stopped from Python."""
    run = asyncrl.start(config)
    assert run.is_up and run.directory == Path("runs/python").absolute()
    with pytest.raises(TimeoutError, match="it goes on"):
        run.wait(timeout_s=0.1)
    while (status := run.status()) is None or status.step < 2:
        with pytest.raises(TimeoutError):
            run.wait(timeout_s=1.0)
    again = asyncrl.open("python")
    assert again.is_up and "reward/mean" in again.metrics()[2]
    result = again.stop()
    assert not result.is_finished and result.step >= 2 and run.wait() == result
    return run


def test_a_stopped_run_has_left_no_process(stopped: asyncrl.Run) -> None:
    assert not stopped.is_up and not processes_of(stopped.directory)


def test_what_a_run_recorded_can_be_read(stopped: asyncrl.Run) -> None:
    steps = [step for step, row in stopped.metrics().items() if "reward/mean" in row]
    assert steps == list(range(1, stopped.wait().step + 1))
    best, worst = (stopped.samples(1, kind="train", order=order)[0].reward for order in ("best", "worst"))
    assert best >= worst >= 0.0


def test_the_newest_checkpoint_becomes_a_model_once(stopped: asyncrl.Run) -> None:
    model = AutoModelForCausalLM.from_pretrained(stopped.export("exported"))
    assert model.config.num_hidden_layers == 2
    with pytest.raises(asyncrl.RunError, match="exists"):
        stopped.export("exported")


def test_a_stopped_run_goes_on_to_its_end(config: dict[str, Any], stopped: asyncrl.Run) -> None:
    last = stopped.wait().step + 1
    finished = asyncrl.train(config, f"learner.steps={last}")
    assert finished == asyncrl.Result(directory=stopped.directory, is_finished=True, step=last)
    steps = [step for step, row in stopped.metrics().items() if "reward/mean" in row]
    assert steps == list(range(1, last + 1))


def test_the_newest_checkpoint_is_evaluated(stopped: asyncrl.Run) -> None:
    assert stopped.evaluate()["eval/reward_mean"] >= 0.0
