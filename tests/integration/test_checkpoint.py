"""Resume is exact: a run that was stopped and loaded in a fresh process ends with the same bits as one that was not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_models import tiny_qwen2
from helpers_ranks import run_ranks
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.trainer.checkpoint import EXPORT

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("ranks", "stage", "dtype"), [(1, 0, "float32"), (2, 0, "float32"), (2, 2, "float32"), (2, 3, "bfloat16")]
)
def test_four_steps_are_two_steps_a_fresh_process_and_two_more(tmp_path: Path, ranks: int, stage: int, dtype: str) -> None:
    model, store = tiny_qwen2(tmp_path / "model"), tmp_path / "store"
    base: dict[str, Any] = {"run": "train", "stage": stage, "dtype": dtype}
    saved = base | {"store": str(store)}
    first = run_ranks(
        ranks, model, [base | {"name": "whole", "steps": [0, 4]}, saved | {"name": "begun", "steps": [0, 2]}], tmp_path / "first"
    )
    second = run_ranks(ranks, model, [saved | {"name": "resumed", "steps": [2, 4]}], tmp_path / "second")

    (whole, whole_report), (begun, begun_report), (resumed, report) = first["whole"], first["begun"], second["resumed"]
    assert report["state"] == {"version": 2, "ledger": [1, 2]}
    assert begun_report["losses"] + report["losses"] == whole_report["losses"]
    assert whole.keys() == resumed.keys()
    for name, tensor in whole.items():
        assert torch.equal(resumed[name], tensor), name
    assert any(not torch.equal(begun[name], tensor) for name, tensor in whole.items())

    exported = store / "step-000002" / EXPORT
    served = dict(AutoModelForCausalLM.from_pretrained(exported, dtype=getattr(torch, dtype)).named_parameters())
    assert served.keys() == begun.keys()
    assert all(torch.equal(served[name].detach(), tensor) for name, tensor in begun.items())
    assert AutoTokenizer.from_pretrained(exported).encode("12+34") == AutoTokenizer.from_pretrained(model).encode("12+34")
    rng = {path.name for path in (store / "step-000002").glob("rng-*")}
    assert rng == {f"rng-{rank:04}.safetensors" for rank in range(ranks)}
    assert not list(store.rglob("latest"))


def test_another_number_of_ranks_is_refused_with_what_to_do(tmp_path: Path) -> None:
    model, store = tiny_qwen2(tmp_path / "model"), tmp_path / "store"
    base = {"run": "train", "stage": 0, "store": str(store)}
    run_ranks(1, model, [base | {"name": "begun", "steps": [0, 1]}], tmp_path / "first")
    assert json.loads((store / "step-000001" / "trainer.json").read_text())["ranks"] == 1
    with pytest.raises(AssertionError, match=r"CheckpointError: .*'ranks': 1.*resume with the same learner.ranks"):
        run_ranks(2, model, [base | {"name": "resumed", "steps": [1, 2]}], tmp_path / "second")
