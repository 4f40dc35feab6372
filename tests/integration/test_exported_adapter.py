"""The exported adapter of a run: vLLM and PEFT load its directory, and have the learner's log-probabilities."""

import json
from pathlib import Path

import numpy as np
import pytest
from peft import PeftModel

from asyncrl.lora import SETTINGS
from asyncrl.results.export import export_model
from asyncrl.run.directory import RunDirectory
from tests.support.models import model_of, tiny_qwen2
from tests.support.ranks import forked_ranks
from tests.support.served_adapter import logprobs_of_vllm
from tests.support.trainer_worker import KEY
from tests.support.vllm_engines import logprobs_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

IDS = [3, 9, 4, 30, 12, 7, 7, 25]


def test_vllm_and_peft_give_the_learners_logprobs(tmp_path: Path) -> None:
    base, exported = tiny_qwen2(tmp_path / "model"), tmp_path / "exported"
    directory = RunDirectory(tmp_path / "run")
    directory.create(fresh=True)
    lora = {"rank": 8, "alpha": 24}
    directory.config.write_text(f"run: {{name: run}}\nmodel: {{path: {base}, lora: {json.dumps(lora)}}}\n")
    (directory.path / "run.key").write_bytes(KEY)
    (directory.path / "run.key").chmod(0o600)
    scenario = {"run": "checkpoint", "name": "run", "stage": 0, "ids": IDS, "lora": lora}
    with forked_ranks() as ranks:
        store = {"store": str(directory.checkpoints)}
        _, (before, learner) = ranks.run(1, base, [scenario | store], tmp_path / "ranks", timeout_s=600)[
            "run"
        ]
    export_model(directory, exported)

    assert json.loads((exported / SETTINGS).read_text())["base_model_name_or_path"] == str(base)
    by_peft = logprobs_of(PeftModel.from_pretrained(model_of(base), exported).eval(), IDS)
    np.testing.assert_allclose(by_peft, learner, atol=1e-5)
    by_vllm = logprobs_of_vllm(base, exported, IDS, tmp_path / "served", rank=8)
    np.testing.assert_allclose(by_vllm, learner, atol=1e-4)
    assert np.abs(np.array(before) - np.array(learner)).max() > 0.01, "the step changed what is compared"
