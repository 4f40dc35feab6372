"""The critic's values against a stock backbone, and that none of them has seen what it is to judge."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModel, OPTConfig, OPTForCausalLM

from asyncrl.batch.packing import TrainSample, microbatch
from asyncrl.config.sections import ModelConfig
from asyncrl.trainer.base import MicroBatch
from asyncrl.trainer.loading import load_model
from asyncrl.trainer.policy import ValueHead, ValueModule, run
from tests.support.models import tiny_qwen2

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen2(tmp_path_factory.mktemp("model"))


def critic_of(model: Path, *, dtype: str = "float32", gradient_checkpointing: bool = False) -> ValueModule:
    """With a head so large that values differ visibly."""
    config = ModelConfig(path=str(model), dtype=dtype)
    critic = ValueModule(load_model(config, CPU, gradient_checkpointing=gradient_checkpointing).base_model)
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(1))
    torch.nn.init.constant_(critic.head.bias, 0.3)
    return critic


def random_sequences(shapes: list[tuple[int, int]], share_kept: float = 0.7) -> list[TrainSample]:
    rng = np.random.default_rng(5)
    return [
        TrainSample(
            prompt_ids=rng.integers(2, 40, p, dtype=np.int32),
            response_ids=rng.integers(2, 40, r, dtype=np.int32),
            keep=rng.random(r) < share_kept,
            behaviour_logprobs=np.zeros(r, np.float32),
            advantages=np.zeros(r, np.float32),
            lag=np.zeros(r, np.int64),
        )
        for p, r in shapes
    ]


SHAPES = [(3, 7), (5, 1), (1, 12), (3, 7), (9, 4)]


def test_values_are_the_head_on_a_stock_backbone_one_position_before_each_action(model: Path) -> None:
    critic, sequences = critic_of(model), random_sequences(SHAPES)
    stock = AutoModel.from_pretrained(model, dtype=torch.float32)
    expected: list[Tensor] = []
    for one in sequences:
        ids = torch.from_numpy(np.concatenate([one.prompt_ids, one.response_ids]).astype(np.int64))
        for r in np.flatnonzero(one.keep):
            # Ends with the token before the action: the action is not there at all.
            state = ids[: len(one.prompt_ids) + int(r)]
            expected.append(
                stock(input_ids=state[None]).last_hidden_state[0, -1] @ critic.head.weight[0] + 0.3
            )
    values_T = run(critic, microbatch(sequences, CPU))
    torch.testing.assert_close(values_T, torch.stack(expected), atol=1e-5, rtol=0)


def test_a_value_depends_neither_on_its_action_nor_on_anything_later(model: Path) -> None:
    critic, batch = critic_of(model), microbatch(random_sequences([(4, 20)], share_kept=1.0), CPU)
    values_T = run(critic, batch)
    for action in (0, 7, 19):
        position = 4 + action

        def changed(from_: int, to: int) -> MicroBatch:
            ids_N = batch.input_ids_N.clone()
            ids_N[from_:to] = (ids_N[from_:to] + 11) % 40
            return replace(batch, input_ids_N=ids_N)

        later_T, before_T = run(critic, changed(position, 24)), run(critic, changed(position - 1, position))
        assert torch.equal(later_T[: action + 1], values_T[: action + 1])
        assert (later_T[action + 1 :] != values_T[action + 1 :]).all()
        assert before_T[action] != values_T[action]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_equals_one_by_one_in_values_and_gradients(model: Path, checkpointing: bool) -> None:
    critic, sequences = critic_of(model, gradient_checkpointing=checkpointing), random_sequences(SHAPES)
    gradients = []
    for batches in ([sequences], [[one] for one in sequences]):
        critic.zero_grad()
        values_T = torch.cat([run(critic, microbatch(batch, CPU)) for batch in batches])
        values_T.square().sum().backward()
        gradients.append((values_T.detach(), [parameter.grad.clone() for parameter in critic.parameters()]))
    (whole_T, whole), (alone_T, alone) = gradients
    torch.testing.assert_close(whole_T, alone_T, atol=1e-5, rtol=0)
    for found, expected in zip(whole, alone, strict=True):
        # Terms of a sum that nearly cancel leave the rounding of the largest ones.
        torch.testing.assert_close(found, expected, atol=1e-6 * float(expected.abs().max()), rtol=1e-4)


def test_the_critic_starts_as_the_policys_backbone_with_small_values_that_every_process_draws_alike(
    model: Path,
) -> None:
    config = ModelConfig(path=str(model), dtype="float32")
    torch.manual_seed(1)
    critic = ValueModule(load_model(config, CPU).base_model)
    torch.manual_seed(2)
    again = ValueModule(load_model(config, CPU).base_model)
    backbone = dict(load_model(config, CPU).base_model.named_parameters())
    assert backbone.keys() == dict(critic.backbone.named_parameters()).keys()
    assert all(
        torch.equal(parameter, backbone[name]) for name, parameter in critic.backbone.named_parameters()
    )
    assert torch.equal(critic.head.weight, again.head.weight)
    values_T = run(critic, microbatch(random_sequences(SHAPES), CPU))
    assert 0 < values_T.abs().mean() < 0.5 and values_T.std() > 0
    values_T.sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in critic.backbone.parameters())


def test_a_backbone_that_ends_with_a_projection_has_a_head_of_its_size() -> None:
    sizes = {"hidden_size": 64, "ffn_dim": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    narrow = OPTConfig(vocab_size=42, word_embed_proj_dim=32, do_layer_norm_before=False, **sizes)
    critic = ValueModule(OPTForCausalLM(narrow).base_model)
    assert run(critic, microbatch(random_sequences(SHAPES), CPU)).isfinite().all()


def test_values_are_float32_whatever_the_backbone_is() -> None:
    head = ValueHead(64).to(torch.bfloat16)
    hidden_TD = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    torch.nn.init.constant_(head.bias, 8.0)
    expected_T = hidden_TD.double() @ head.weight[0].double() + 8.0
    assert head(hidden_TD).dtype == torch.float32
    # In bfloat16 the values near 8 would be multiples of 1/32.
    torch.testing.assert_close(head(hidden_TD).double(), expected_T, atol=1e-5, rtol=0)
