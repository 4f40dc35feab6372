"""A model that ranks load in parts is the model that one process loads, and no rank ever holds all of it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support.models import tiny_qwen2
from tests.support.ranks import forked_ranks

pytestmark = pytest.mark.integration

DTYPES = ("float32", "bfloat16")


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_loaded_in_parts_is_the_whole_one_and_no_rank_holds_it(tmp_path: Path, tied: bool) -> None:
    path = tiny_qwen2(tmp_path / "model", tied=tied, num_hidden_layers=8)
    with forked_ranks() as learner:
        scenarios = [{"run": "loading", "name": dtype, "dtype": dtype} for dtype in DTYPES]
        results = learner.run(2, path, scenarios, tmp_path)
    for dtype, (found, report) in results.items():
        stock = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
        whole = sum(parameter.nbytes for parameter in stock.parameters())
        # Rotary frequencies stay float32: bfloat16 is wrong in the third digit.
        assert {buffer.dtype for buffer in stock.buffers()} == {torch.float32}
        expected = dict(stock.named_parameters()) | dict(stock.named_buffers())
        assert found.keys() == expected.keys(), dtype
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype, (dtype, name)
            assert torch.equal(found[name], tensor), (dtype, name)
        for kept, peak in report["bytes"]:
            assert 0.49 * whole < kept < 0.52 * whole, dtype
            assert peak < 0.6 * whole, dtype


def test_every_rank_names_the_tensors_that_do_not_fit_the_config(tmp_path: Path) -> None:
    """With shards only rank 0 reads them; the others would wait for it."""
    path = tiny_qwen2(tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    wide = config | {"intermediate_size": 2 * config["intermediate_size"]}
    (path / "config.json").write_text(json.dumps(wide))
    with forked_ranks() as learner:
        _, ranks = learner.run(2, path, [{"run": "misfit", "name": "misfit"}], tmp_path)["misfit"]
    assert [len(errors) for errors in ranks] == [2, 2]
    for error in (error for errors in ranks for error in errors):
        assert "do not fit its config.json" in error and "mlp.down_proj.weight" in error, error
        assert str(config["intermediate_size"]) in error and str(wide["intermediate_size"]) in error


@pytest.mark.parametrize("tied", [True, False])
def test_every_rank_names_the_tensors_that_the_checkpoint_lacks(tmp_path: Path, tied: bool) -> None:
    """transformers would draw them at random. A head that is tied to the embedding is not among them."""
    path = tiny_qwen2(tmp_path / "model", tied=tied)
    tensors = load_file(path / "model.safetensors")
    assert ("lm_head.weight" in tensors) != tied
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors.pop("lm_head.weight", None)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with forked_ranks() as learner:
        _, ranks = learner.run(2, path, [{"run": "misfit", "name": "misfit"}], tmp_path)["misfit"]
    assert [len(errors) for errors in ranks] == [2, 2]
    for error in (error for errors in ranks for error in errors):
        assert "model.layers.1.mlp.up_proj.weight is missing" in error
        assert ("lm_head.weight is missing" in error) != tied
        assert error.count("is missing") == 2 - tied
