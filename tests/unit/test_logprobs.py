"""Packed, chunked log-probabilities against a padded model with full logits: values, gradients, memory."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from asyncrl.batch.packing import TrainSample, microbatch
from asyncrl.config.sections import ModelConfig
from asyncrl.errors import ConfigError, DataError
from asyncrl.trainer.attention import segment_attention
from asyncrl.trainer.base import MicroBatch
from asyncrl.trainer.head import TokenLogprobs
from asyncrl.trainer.loading import load_model
from asyncrl.trainer.policy import PolicyModule, run
from tests.support.models import tiny_qwen2

CPU = torch.device("cpu")
STORIES = Path(__file__).parents[2].parent / "shared" / "models" / "stories260K-hd32"
TEMPERATURE = 0.7


@pytest.fixture(params=["stories260K", "qwen2-tied", "qwen2-untied"])
def model_path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "stories260K":
        if not STORIES.exists():
            pytest.skip(f"{STORIES} is not here")
        return STORIES
    return tiny_qwen2(tmp_path / "model", tied=request.param == "qwen2-tied")


def random_sequences(
    rng: np.random.Generator, vocabulary: int, shapes: list[tuple[int, int]]
) -> list[TrainSample]:
    return [
        TrainSample(
            prompt_ids=rng.integers(2, vocabulary, p, dtype=np.int32),
            response_ids=rng.integers(2, vocabulary, r, dtype=np.int32),
            keep=rng.random(r) < 0.7,
            behaviour_logprobs=np.zeros(r, np.float32),
            advantages=rng.normal(size=r).astype(np.float32),
            lag=np.zeros(r, np.int64),
        )
        for p, r in shapes
    ]


def packed(policy: PolicyModule, batch: MicroBatch, chunk: int = 5, with_squares: bool = False) -> Tensor:
    how = {"temperature": TEMPERATURE, "chunk": chunk, "with_squares": with_squares}
    return run(policy, batch, target_T=batch.target_T, **how)


def padded(
    path: Path, sequences: list[TrainSample], dtype: torch.dtype
) -> tuple[torch.nn.Module, Tensor, Tensor]:
    """A stock model, padding, full logits. Not `eager`: its softmax is float32 whatever the dtype."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
    width = max(one.tokens for one in sequences)
    ids, mask = (
        torch.zeros(len(sequences), width, dtype=torch.int64),
        torch.zeros(len(sequences), width, dtype=torch.int64),
    )
    for s, one in enumerate(sequences):
        ids[s, : one.tokens] = torch.from_numpy(np.concatenate([one.prompt_ids, one.response_ids]))
        mask[s, : one.tokens] = 1
    logprobs = (model(input_ids=ids, attention_mask=mask).logits / TEMPERATURE).log_softmax(-1)
    rows = [
        logprobs[s, len(one.prompt_ids) + int(r) - 1]
        for s, one in enumerate(sequences)
        for r in np.flatnonzero(one.keep)
    ]
    targets = torch.cat([torch.from_numpy(one.response_ids[one.keep].astype(np.int64)) for one in sequences])
    table = torch.stack(rows)
    return model, table.gather(-1, targets[:, None]).squeeze(-1), -(table.exp() * table).sum(-1)


SHAPES = [(3, 7), (5, 1), (1, 12), (3, 7), (9, 4)]


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_packed_equals_padded_in_logprobs_and_entropy(
    model_path: Path, dtype: torch.dtype, atol: float
) -> None:
    sequences = random_sequences(np.random.default_rng(1), 40, SHAPES)
    policy = PolicyModule(load_model(ModelConfig(path=str(model_path), dtype="float32"), CPU)).to(dtype)
    logprobs_T, entropy_T = packed(policy, microbatch(sequences, CPU))
    _, expected_T, expected_entropy_T = padded(model_path, sequences, dtype)
    # Of a log-probability of -30, a unit in the last place of float32 is 2e-6.
    torch.testing.assert_close(logprobs_T, expected_T, atol=atol, rtol=atol / 10)
    torch.testing.assert_close(entropy_T, expected_entropy_T, atol=atol, rtol=0)


@pytest.mark.parametrize(
    ("dtype", "whole", "each"), [(torch.float32, 1e-5, 1e-4), (torch.float64, 1e-9, 1e-9)]
)
def test_packed_equals_padded_in_gradients(
    model_path: Path, dtype: torch.dtype, whole: float, each: float
) -> None:
    # float64 shows that the two are the same function. In float32 stock sdpa alone is 2.4e-5 off float64 on
    # the worst tensor of stories260K, so there 1e-5 is asked of the gradient as a whole.
    sequences = random_sequences(np.random.default_rng(1), 40, SHAPES)
    batch = microbatch(sequences, CPU)
    weights_T = batch.tokens.advantages_T.to(dtype)
    policy = PolicyModule(load_model(ModelConfig(path=str(model_path), dtype="float32"), CPU)).to(dtype)
    logprobs_T, entropy_T = packed(policy, batch)
    model, expected_T, expected_entropy_T = padded(model_path, sequences, dtype)
    (logprobs_T @ weights_T - 0.3 * entropy_T.sum()).backward()
    (expected_T @ weights_T - 0.3 * expected_entropy_T.sum()).backward()
    ours = {name: parameter.grad for name, parameter in policy.model.named_parameters()}
    theirs = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        # A key bias shifts all scores of a query alike: its gradient is zero but for rounding, so measure
        # against the rest.
        scale = max(
            float(expected.norm()), 1e-3 * float(torch.cat([g.flatten() for g in theirs.values()]).norm())
        )
        assert float((ours[name] - expected).norm()) < each * scale, name
    difference = torch.cat([(ours[name] - theirs[name]).flatten() for name in theirs])
    assert float(difference.norm() / torch.cat([g.flatten() for g in theirs.values()]).norm()) < whole


def test_the_model_gets_its_own_inputs_by_name(tmp_path: Path) -> None:
    config = ModelConfig(path=str(tiny_qwen2(tmp_path / "model")), dtype="float32")
    policy = PolicyModule(load_model(config, CPU))
    batch = microbatch(random_sequences(np.random.default_rng(2), 40, [(3, 7), (5, 9)]), CPU)
    positions_N = 3 * batch.position_ids_N
    given_RT = packed(policy, replace(batch, model_inputs={"position_ids": positions_N[None]}))
    assert torch.equal(given_RT, packed(policy, replace(batch, position_ids_N=positions_N)))
    assert not torch.equal(given_RT, packed(policy, batch))


@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
def test_neighbours_chunks_and_checkpointing_change_nothing(
    tmp_path: Path, checkpointing: bool | Literal["selective"]
) -> None:
    config = ModelConfig(path=str(tiny_qwen2(tmp_path / "model")), dtype="float32")
    policy = PolicyModule(load_model(config, CPU, gradient_checkpointing=checkpointing))
    sequences = random_sequences(np.random.default_rng(2), 40, [(3, 7), (5, 9), (1, 12)])
    whole_T, _ = packed(policy, microbatch(sequences, CPU), chunk=1000)
    alone_T = torch.cat([packed(policy, microbatch([one], CPU), chunk=2)[0] for one in sequences])
    torch.testing.assert_close(whole_T, alone_T, atol=1e-5, rtol=0)
    whole_T.sum().backward()
    gradients = [p.grad.clone() for p in policy.parameters()]
    policy.zero_grad()
    alone_T.sum().backward()
    for found, expected in zip((p.grad for p in policy.parameters()), gradients, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("scale", [1.0, 1e3])
@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_derivatives_are_those_of_log_softmax_and_finite_for_huge_logits(scale: float, chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    target_T, weights_T = torch.tensor([0, 6, 3, 3, 1]), torch.arange(1.0, 6.0)
    results = []
    for ours in (True, False):
        hidden_TD = torch.randn(5, 3, generator=generator.manual_seed(0)).mul_(scale).requires_grad_()
        weight_VD = torch.randn(7, 3, generator=generator).requires_grad_()
        if ours:
            logprobs_T, entropy_T = TokenLogprobs.apply(
                hidden_TD, weight_VD, target_T, 0.5, chunk, False, True
            )
        else:
            table = (hidden_TD @ weight_VD.T / 0.5).log_softmax(-1)
            logprobs_T, entropy_T = (
                table.gather(-1, target_T[:, None]).squeeze(-1),
                -(table.exp() * table).sum(-1),
            )
        (logprobs_T @ weights_T + 2 * entropy_T @ weights_T.flip(0)).backward()
        results.append((logprobs_T, entropy_T, hidden_TD.grad, weight_VD.grad))
    for found, expected in zip(*results, strict=True):
        assert found.isfinite().all()
        torch.testing.assert_close(found, expected, atol=1e-5 * scale, rtol=1e-4)


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e3])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_the_sum_of_squared_probabilities_is_that_of_a_full_softmax(scale: float, chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden_TD, weight_VD = (
        torch.randn(7, 3, generator=generator) * scale,
        torch.randn(11, 3, generator=generator),
    )
    target_T = torch.arange(7)
    expected_T = (hidden_TD.double() @ weight_VD.T.double() / 0.5).softmax(-1).square().sum(-1).float()
    with_T = TokenLogprobs.apply(hidden_TD, weight_VD, target_T, 0.5, chunk, True, True)
    torch.testing.assert_close(with_T[2], expected_T, atol=1e-6, rtol=1e-5)
    assert torch.equal(
        with_T[:2], TokenLogprobs.apply(hidden_TD, weight_VD, target_T, 0.5, chunk, False, True)
    )
    assert expected_T.min() >= 1 / 11 - 1e-6  # the uniform distribution has the smallest
    if scale == 0:
        assert with_T[2].tolist() == pytest.approx([1 / 11] * 7)


class LargestTensor(TorchDispatchMode):
    """Records the most elements, and leading rows beside V columns, that any operation returned."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.elements, self.logit_rows = vocabulary, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
                if tensor.dim() > 1 and tensor.shape[-1] == self.vocabulary:
                    self.logit_rows = max(self.logit_rows, tensor.numel() // self.vocabulary)
        return result


def test_neither_full_logits_nor_an_attention_mask_over_all_tokens_ever_exist(tmp_path: Path) -> None:
    config = ModelConfig(path=str(tiny_qwen2(tmp_path / "model")), dtype="float32")
    policy = PolicyModule(load_model(config, CPU))
    vocabulary = policy.head.weight.shape[0]
    batch = microbatch(random_sequences(np.random.default_rng(3), vocabulary, [(20, 30)] * 24), CPU)
    assert batch.target_T.numel() > 400
    with LargestTensor(vocabulary) as seen:
        logprobs_T, entropy_T, _ = packed(policy, batch, chunk=100, with_squares=True)
        (logprobs_T.sum() + entropy_T.sum()).backward()
    num_tokens = batch.input_ids_N.numel()
    assert seen.logit_rows == 100  # and not the action tokens
    # The widest thing left is the feed-forward layer (128): far below an N x N mask and N x V logits with a
    # real vocabulary.
    assert seen.elements <= num_tokens * 128 < num_tokens * num_tokens


def test_architectures_that_do_more_than_plain_attention_are_refused() -> None:
    query = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ConfigError, match="softcap"):
        segment_attention(
            torch.nn.Identity(), query, query, query, None, sequence_starts=(0, 4), softcap=30.0
        )
    with pytest.raises(ConfigError, match="sliding_window 2 on 4 tokens"):
        segment_attention(
            torch.nn.Identity(), query, query, query, None, sequence_starts=(0, 4), sliding_window=2
        )
    segment_attention(
        torch.nn.Identity(), query, query, query, None, sequence_starts=(0, 2, 4), sliding_window=2
    )


def test_a_directory_that_is_no_model_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"model\.path"):
        load_model(ModelConfig(path=str(tmp_path)), CPU)


def test_an_empty_micro_batch_runs_one_token_on_every_rank() -> None:
    """Ranks gather sharded weights in each layer that a token runs through."""
    ran: list[tuple[Tensor, tuple[int, ...]]] = []

    def module(*, input_ids_N: Tensor, sequence_starts: tuple[int, ...], **rest: Tensor) -> Tensor:
        ran.append((input_ids_N, sequence_starts))
        return rest["source_T"].float()

    assert run(module, microbatch([], CPU)).shape == (0,)
    ((input_ids_N, starts),) = ran
    assert (len(input_ids_N), starts) == (1, (0, 1))
