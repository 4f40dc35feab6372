"""Engines in bfloat16: the probe accepts rounding, and what rounding hides from the probe, checksums see."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.errors import TransferError
from asyncrl.weights.agreement import Agreement
from tests.support.vllm_engines import (
    STORIES,
    Sender,
    apply,
    disk_order,
    load,
    logprobs_of,
    needs_stories,
    running_engine,
    scrambled,
    slot_order,
)

pytestmark = [pytest.mark.integration, needs_stories]

PROBE = (1, *range(300, 331))
WRONG = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module", params=["vllm", "transformers"])
def world(request):
    """(runner, engine, the same model by Hugging Face, their agreement)"""
    with running_engine(STORIES, dtype="bfloat16", engine=request.param) as (runner, engine):
        model = load(STORIES).bfloat16()
        agreement = Agreement(limit=1e-6, dtype="bfloat16")
        _slot, first = slot_order(1, model)
        agreement.begin(runner.run(engine.score(PROBE)), probed(first, model, model))
        yield runner, engine, model, agreement


def probed(order, initial, model):
    """The order, with what a learner that holds `model` says about the probe."""
    logprobs = {"initial_logprobs": initial, "probe_logprobs": model}
    return replace(order, **{name: tuple(logprobs_of(each, PROBE)) for name, each in logprobs.items()})


def test_the_output_layer_computes_in_float32(world):
    """Else every logit, and so the differences of log-probabilities, would be a number of bfloat16."""
    runner, engine, _, _ = world
    if vllm := getattr(engine, "_llm", None):  # its kernels round the layers before in their own way
        assert vllm.vllm_config.model_config.head_dtype == torch.float32
        return
    model = AutoModelForCausalLM.from_pretrained(STORIES, dtype=torch.bfloat16)
    with torch.no_grad():
        hidden = model.model(torch.tensor([PROBE])).last_hidden_state[0, :-1].float()
        exact = (hidden @ model.lm_head.weight.float().T).log_softmax(-1)
    exact = exact.gather(-1, torch.tensor(PROBE)[1:, None]).squeeze(-1).numpy()
    np.testing.assert_allclose(runner.run(engine.score(PROBE)), exact, atol=1e-4)
    assert np.abs(logprobs_of(model, PROBE) - exact).max() > 0.01


@pytest.mark.parametrize("transport", ["slot", "disk", "tcp"])
def test_right_weights_pass_the_probe_and_wrong_ones_the_checksums_never(world, transport, tmp_path):
    runner, engine, model, agreement = world
    new = scrambled(model, 2)
    _slot, truth = slot_order(2, new)
    kept = []  # slots, which end with their last reference

    def order(version, sent):
        if transport == "disk":
            return disk_order(version, sent, tmp_path)
        if transport == "tcp":
            return Sender().order(version, sent)
        slot, made = slot_order(version, sent)
        kept.append(slot)
        return made

    runner.run(apply(engine, order(1, model)))
    for spoil in (one_element, a_shard, a_stale_layer):
        sent = copy.deepcopy(new)
        with torch.no_grad():
            spoil(dict(sent.named_parameters())[WRONG], dict(model.named_parameters())[WRONG])
        wrong = order(2, sent)
        details = {**wrong.details, "checksums": truth.details["checksums"]}
        with pytest.raises(TransferError, match=f"{WRONG}.*checksum"):
            runner.run(apply(engine, replace(wrong, details=details)))
        assert engine.weights.version == 1
    right = probed(order(3, new), model, new)
    runner.run(apply(engine, right))
    measured = agreement.judge(runner.run(engine.score(PROBE)), right)
    assert 0 < measured["floor_max"] < 1 and 0 < measured["probe_max"] < measured["probe_limit"]


def one_element(wrong, old):
    wrong.view(-1)[11] += 1.0


def a_shard(wrong, old):
    wrong[: len(wrong) // 2] = old[: len(old) // 2]


def a_stale_layer(wrong, old):
    wrong.copy_(old)
