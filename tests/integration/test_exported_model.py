"""An exported directory is the trained model: real vLLM loads it and has the learner's log-probabilities."""

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from asyncrl.results.export import export_model
from asyncrl.run.directory import RunDirectory
from tests.support.models import tiny_qwen2
from tests.support.ranks import forked_ranks
from tests.support.trainer_worker import KEY
from tests.support.vllm_engines import running_engine

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

IDS = [3, 9, 4, 30, 12, 7, 7, 25]


def test_vllm_gives_the_learners_logprobs(tmp_path: Path) -> None:
    model = tiny_qwen2(tmp_path / "model")
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(model)
    directory = RunDirectory(tmp_path / "run")
    directory.create(fresh=True)
    directory.config.write_text(f"run: {{name: run}}\nmodel: {{path: {model}}}\n")
    (directory.path / "run.key").write_bytes(KEY)
    (directory.path / "run.key").chmod(0o600)
    scenario = {
        "run": "checkpoint",
        "name": "run",
        "stage": 0,
        "ids": IDS,
        "store": str(directory.checkpoints),
    }
    with forked_ranks() as ranks:
        _, (before, learner) = ranks.run(1, model, [scenario], tmp_path / "ranks", timeout_s=600)["run"]
    export_model(directory, tmp_path / "exported")

    with running_engine(tmp_path / "exported") as (runner, engine):
        served = runner.run(engine.score(IDS))
    np.testing.assert_allclose(served, learner, atol=1e-4)
    assert np.abs(np.array(before) - np.array(learner)).max() > 0.01, "the step changed what is compared"
    assert AutoTokenizer.from_pretrained(tmp_path / "exported").chat_template == template
    assert json.loads((tmp_path / "exported" / "generation_config.json").read_text())["eos_token_id"] == 1
    assert "# run, step 1" in (tmp_path / "exported" / "README.md").read_text()
    assert not list(tmp_path.glob(".writing-*"))
