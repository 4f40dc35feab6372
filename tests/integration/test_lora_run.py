"""A whole run that trains an adapter: it moves, engines agree, it resumes, and its result can be used."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from asyncrl.lora import SETTINGS
from tests.support.command import ASYNCRL
from tests.support.models import model_of
from tests.support.whole_run import call, rows, start, steps, tiny_run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

ADAPTER = ("model.lora.rank=8", "learner.optimizer.lr=5e-2")


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Path]:
    with tiny_run(tmp_path) as path:
        yield path


def agreed(run: Path) -> bool:
    updates = [row for row in rows(run) if "weights/probe_max" in row]
    return bool(updates) and all(row["weights/probe_max"] < row["weights/probe_limit"] for row in updates)


@pytest.mark.parametrize("sync", ["adapter", "merged"])
def test_an_adapter_moves_resumes_and_can_be_used(config: Path, sync: str) -> None:
    run, base = config.parent / "runs" / "whole", config.parent / "model"
    before = (base / "model.safetensors").read_bytes()
    chosen = (*ADAPTER, f"model.lora.sync={sync}")
    assert start(config, *chosen, "learner.steps=6", "checkpoint.every=3").wait(timeout=600) == 0
    assert start(config, *chosen, "learner.steps=12", "checkpoint.every=3").wait(timeout=600) == 0
    assert steps(run) == list(range(1, 13)) and agreed(run)
    # A step of this size shows in the log-probabilities, so that agreement means something.
    assert max(row.get("weights/moved", 0) for row in rows(run)) > 1e-3
    assert (base / "model.safetensors").read_bytes() == before

    exported, merged = config.parent / "exported", config.parent / "merged"
    assert f"vllm serve {base} --enable-lora --max-lora-rank 8" in call(
        "export", str(run), "--to", str(exported)
    )
    assert json.loads((exported / SETTINGS).read_text())["base_model_name_or_path"] == str(base)
    call("export", str(run), "--merge", "--to", str(merged))
    ids = torch.arange(2, 30)[None]
    with torch.no_grad():
        plain = model_of(base).eval()(ids).logits.log_softmax(-1)
        adapted = PeftModel.from_pretrained(model_of(base), exported).eval()(ids).logits.log_softmax(-1)
        whole = AutoModelForCausalLM.from_pretrained(merged).eval()(ids).logits.log_softmax(-1)
    # Training differs from run to run, and with it how far float32 rounds: it is judged by what the adapter does.
    does = (adapted - plain).abs().max().item()
    assert does > 0.1
    torch.testing.assert_close(whole, adapted, rtol=0, atol=1e-4 * does)
    assert load_file(merged / "model.safetensors").keys() == load_file(base / "model.safetensors").keys()

    score = json.loads(call("eval", str(run)))["eval/reward_mean"]
    assert score == pytest.approx(
        [row["eval/reward_mean"] for row in rows(run) if "eval/reward_mean" in row][-1]
    )

    done = subprocess.run(
        [*ASYNCRL, "up", "--plain", "--config", str(config), "model.lora=null", "learner.steps=15"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0 and "model.lora.rank" in done.stderr + done.stdout
    assert "asyncrl export --merge" in done.stderr + done.stdout
