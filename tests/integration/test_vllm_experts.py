"""A mixture of experts on vLLM: on a CPU, kernels read a packed copy, which every update must make again."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from tests.support.models import SIZES
from tests.support.vllm_engines import (
    apply,
    load,
    logprobs_of,
    needs_stories,
    running_engine,
    save,
    scrambled,
    slot_order,
)

pytestmark = [pytest.mark.integration, needs_stories]

PROBE = (1, *range(300, 331))


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """(runner, engine, the model of version 0 by transformers)"""
    torch.manual_seed(0)
    sizes = SIZES | {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    config = Qwen3MoeConfig(
        vocab_size=512, **sizes, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2,
        initializer_range=0.2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    directory = save(Qwen3MoeForCausalLM(config), tmp_path_factory.mktemp("experts"))
    with running_engine(directory) as (runner, engine):
        yield runner, engine, load(directory)


def sent(model, names):
    """What a learner sends, under the names of its modules (all experts of a layer in one) or a checkpoint's."""
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if names == "checkpoint":
        tensors = revert_weight_conversion(model, tensors)
    return SimpleNamespace(named_parameters=tensors.items)


# Once an engine distrusts its recorded loads, it always lets vLLM reload.
@pytest.mark.parametrize("way", ["recorded", "reloaded"])
@pytest.mark.parametrize("names", ["modules", "checkpoint"])
def test_a_model_with_experts_is_the_one_that_was_sent(experts, names, way):
    runner, engine, model = experts
    engine._trusted = way == "recorded"
    count = len(dict(sent(model, names).named_parameters()))
    assert (count < 30) == (names == "modules")
    for version in (1, 2):
        new = scrambled(model, version)
        before = runner.run(engine.score(PROBE))
        _slot, update = slot_order(version, sent(new, names))
        runner.run(apply(engine, update))
        found = runner.run(engine.score(PROBE))
        assert np.abs(found - before).max() > 0.01
        np.testing.assert_allclose(found, logprobs_of(new, PROBE), atol=1e-4)
