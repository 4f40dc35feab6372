"""What `asyncrl init` writes is a run: of a tiny model, from the first command to the last step."""

import pytest

from asyncrl.commands.down import processes_of
from asyncrl.quickstart.first_task import OWN, Answers, write_task
from tests.support.models import tiny_qwen2
from tests.support.whole_run import call, steps

pytestmark = pytest.mark.integration

SMALL = "learner.steps=2 batch.groups=2 generator.engine=transformers generator.max_running=16 eval.every=2"


def test_it_trains_as_it_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = tiny_qwen2(tmp_path / "model", max_position_embeddings=1024)
    config, *_ = write_task(tmp_path / "mine", Answers(model=str(model), reward=OWN, longest=8))
    run = tmp_path / "runs" / "mine"
    try:
        said = call("up", "--plain", str(config), *SMALL.split())
    finally:
        for process in processes_of(run):
            process.kill()
    assert steps(run) == [1, 2] and "eval/accuracy" in said
