"""torch's attention for packed sequences: shapes on the meta device, values against one call per sequence.

Its kernels run on GPUs only, so here the operators behind `varlen_attn` are replaced by plain formulas. The
arguments that we pass, and torch's own backward, are the real ones.
"""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl.batch.packing import microbatch
from asyncrl.config.sections import ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.trainer import attention
from asyncrl.trainer.attention import (
    SEGMENTS,
    VARLEN,
    attention_kwargs,
    choose_attention,
    segment_attention,
    varlen_attention,
)
from asyncrl.trainer.loading import load_model
from asyncrl.trainer.policy import PolicyModule, run
from tests.support.dispatches import META, dispatches_of, samples_of
from tests.support.models import tiny_qwen2

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
STARTS = (0, 5, 6, 17, 30)
LAYER = torch.nn.Identity()


def weights(query: Tensor, key: Tensor, starts: list[int], scale: float, left: int) -> Tensor:
    """[H, Q, K]: softmax under a mask over all tokens; `left` tokens before a query's own, -1 for all."""
    tokens = torch.arange(len(query))
    sequence = torch.bucketize(tokens, torch.tensor(starts[1:]), right=True)
    behind = tokens[:, None] - tokens
    seen = (sequence[:, None] == sequence) & (behind >= 0) & ((behind <= left) | (left < 0))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    return scores.masked_fill(~seen, -torch.inf).softmax(-1)


def repeated(query: Tensor, *columns: Tensor) -> list[Tensor]:
    """Keys and values with a head for each head of the query."""
    return [column.repeat_interleave(query.shape[1] // column.shape[1], dim=1) for column in columns]


class Kernels(TorchDispatchMode):
    """Plain formulas in place of the two GPU operators; counts how often each ran."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = self.backwards = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.torch_attn._varlen_attn.default:
            self.forwards += 1
            query, key, value, starts, same, _, _, causal, scale, window, *_ = args
            assert starts.dtype == torch.int32
            assert torch.equal(starts, same)
            assert window[1] == 0
            assert causal == (window[0] < 0)
            many_key, many_value = repeated(query, key, value)
            scale = scale or query.shape[-1] ** -0.5
            p_HQK = weights(query, many_key, starts.tolist(), scale, window[0])
            out = torch.einsum("hqk,khd->qhd", p_HQK, many_value)
            return out, torch.zeros(query.shape[1], len(query)), torch.zeros(2, dtype=torch.uint64)
        if func is torch.ops.torch_attn._varlen_attn_backward.default:
            self.backwards += 1
            gradient, query, key, value, _, _, starts, *_, scale, window = args
            scale = scale or query.shape[-1] ** -0.5
            many_key, many_value = repeated(query, key, value)
            p_HQK = weights(query, many_key, starts.tolist(), scale, window[0])
            of_p_HQK = torch.einsum("qhd,khd->hqk", gradient, many_value)
            of_scores_HQK = scale * p_HQK * (of_p_HQK - (of_p_HQK * p_HQK).sum(-1, keepdim=True))
            of_query = torch.einsum("hqk,khd->qhd", of_scores_HQK, many_key)
            of_key = torch.einsum("hqk,qhd->khd", of_scores_HQK, query)
            of_value = torch.einsum("hqk,qhd->khd", p_HQK, gradient)
            grouped = (*key.shape[:2], -1, key.shape[2])
            return of_query, of_key.view(grouped).sum(2), of_value.view(grouped).sum(2)
        return func(*args, **(kwargs or {}))


def columns(*, kv_heads: int, head: int = 8, device: torch.device = CPU) -> list[Tensor]:
    """Queries, keys, values [1, H, N, D], strided as a model's projections are."""
    torch.manual_seed(0)
    shapes = [(1, STARTS[-1], heads, head) for heads in (4, kv_heads, kv_heads)]
    return [torch.randn(shape, device=device).transpose(1, 2).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_one_kernel_gives_what_one_call_per_sequence_gives(kv_heads: int, scaling: float | None) -> None:
    results = []
    for function, name in ((segment_attention, SEGMENTS), (varlen_attention, VARLEN)):
        inputs = columns(kv_heads=kv_heads)
        with Kernels() as kernels:
            out, _ = function(LAYER, *inputs, None, scaling=scaling, **attention_kwargs(name, STARTS, CPU))
            (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        assert kernels.forwards == kernels.backwards == (name == VARLEN)
        results.append([out, *(column.grad for column in inputs)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_the_kernel_of_the_oldest_torch_is_called_as_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    new = attention.varlen_attn

    def old(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *,
        return_aux=None, scale=None, window_size=(-1, -1),
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        """With the parameters that it has in torch 2.11."""
        return new(
            query, key, value, cu_seq_q, cu_seq_k, max_q, max_k,
            scale=scale, window_size=window_size, enable_gqa=True,
        )  # fmt: skip

    outs = []
    for kernel in (new, old):
        monkeypatch.setattr(attention, "varlen_attn", kernel)
        with Kernels():
            outs.append(
                varlen_attention(LAYER, *columns(kv_heads=2), None, **attention_kwargs(VARLEN, STARTS, CPU))
            )
    assert torch.equal(outs[0][0], outs[1][0])


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_heads_are_repeated_as_torch_groups_them(kv_heads: int) -> None:
    query, key, value = columns(kv_heads=kv_heads)
    many = [attention.repeated(each, query) for each in (key, value)]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    assert many[0].shape == query.shape
    torch.testing.assert_close(sdpa(query, *many), sdpa(query, key, value, enable_gqa=True))


@pytest.mark.parametrize("window", [1, 4, 100])
def test_a_sliding_window_holds_the_token_itself_and_those_before_it(window: int) -> None:
    query, key, value = columns(kv_heads=2)
    with Kernels():
        out, _ = varlen_attention(
            LAYER, query, key, value, None, sliding_window=window, **attention_kwargs(VARLEN, STARTS, CPU)
        )
    for start, token in ((0, 2), (5, 5), (17, 29)):  # the middle, the only and the last of a sequence
        seen = slice(max(start, token - window + 1), token + 1)
        alone = [column[:, :, seen] for column in (query, key, value)]
        one, _ = segment_attention(LAYER, *alone, None, sequence_starts=(0, seen.stop - seen.start))
        torch.testing.assert_close(out[:, token], one[:, -1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shapes_and_gradients_flow_through_the_real_operators_on_the_meta_device(dtype: torch.dtype) -> None:
    inputs = [column.detach().to(dtype).requires_grad_() for column in columns(kv_heads=2, device=META)]
    out, _ = varlen_attention(LAYER, *inputs, None, **attention_kwargs(VARLEN, STARTS, META))
    assert (out.shape, out.dtype) == ((1, STARTS[-1], 4, 8), dtype)
    out.sum().backward()
    for column in inputs:
        assert (column.grad.shape, column.grad.dtype) == (column.shape, dtype)


def test_many_sequences_cost_no_more_dispatches_than_few() -> None:
    few, many = dispatches_of(4), dispatches_of(110)
    assert few == many <= 3000


def test_a_whole_policy_has_the_same_values_and_gradients(tmp_path: Path) -> None:
    batch = microbatch(samples_of(4, 1, 9), CPU)
    model = load_model(ModelConfig(path=str(tiny_qwen2(tmp_path / "model")), dtype="float32"), CPU)
    policy, results = PolicyModule(model), []
    for name in (SEGMENTS, VARLEN):
        model.config._attn_implementation = name
        policy.zero_grad()
        with Kernels() as kernels:
            logprobs_T = run(policy, batch, target_T=batch.target_T, temperature=1.0, chunk=100)[0]
            logprobs_T.sum().backward()
        assert kernels.forwards == kernels.backwards == (2 if name == VARLEN else 0)  # one per layer
        results.append([logprobs_T, *(parameter.grad for parameter in policy.parameters())])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_head_sizes_without_a_kernel_take_one_call_per_sequence() -> None:
    query, key, value = columns(kv_heads=2, head=12)
    packing = attention_kwargs(VARLEN, STARTS, CPU)
    with Kernels() as kernels:
        out, _ = varlen_attention(LAYER, query, key, value, None, scaling=0.3, **packing)
    expected = segment_attention(LAYER, query, key, value, None, scaling=0.3, sequence_starts=STARTS)[0]
    assert torch.equal(out, expected)
    assert kernels.forwards == 0


def test_architectures_that_do_more_are_refused_here_too() -> None:
    with pytest.raises(ConfigError, match="softcap"):
        varlen_attention(
            LAYER, *columns(kv_heads=2), None, softcap=30.0, **attention_kwargs(VARLEN, STARTS, CPU)
        )


def test_the_choice_depends_on_package_device_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(dtype: torch.dtype = torch.bfloat16, *, capability: tuple[int, int] = (9, 0)) -> str:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        return choose_attention(GPU, dtype)

    assert choose_attention(CPU, torch.bfloat16) == SEGMENTS
    assert chosen() == chosen(capability=(8, 0)) == VARLEN
    assert chosen(torch.float32) == chosen(capability=(7, 5)) == SEGMENTS
    for module in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    monkeypatch.setattr(attention, "is_flash_attn_2_available", lambda: True)
    assert chosen() == "flash_attention_2"
    monkeypatch.setattr(attention, "is_flash_attn_3_available", lambda: True)
    assert chosen() == "flash_attention_3"
    assert choose_attention(GPU, torch.bfloat16, sequence_parallel=True) == VARLEN
    assert chosen(torch.float32) == SEGMENTS
