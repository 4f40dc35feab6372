"""What the log-probability head asks of the device: float32 sums, no waiting, one trace for every chunk."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl.trainer.deepspeed import head
from asyncrl.trainer.deepspeed.head import TokenLogprobs, off_target_gradient, statistics

WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "item", "equal")
TOKENS, HIDDEN, VOCABULARY = 10, 16, 50


class Calls(TorchDispatchMode):
    """Counts operators by name, and those that return something [*, V]."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.wide = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        self.names[func.overloadpacket.__name__] += 1
        self.wide += isinstance(result, Tensor) and result.shape[-1:] == (VOCABULARY,)
        return result


def inputs(dtype: torch.dtype, peak: float = 1.0, device: str = "cpu") -> list[Tensor]:
    """hidden_TD, weight_VD, target_T."""
    torch.manual_seed(0)
    hidden_TD = (torch.randn(TOKENS, HIDDEN) * peak).to(device, dtype).requires_grad_()
    weight_VD = torch.randn(VOCABULARY, HIDDEN).to(device, dtype).requires_grad_()
    return [hidden_TD, weight_VD, torch.arange(TOKENS, device=device)]


def derivatives(
    dtype: torch.dtype, *, entropy: bool, flag: bool, chunk: int = 4, peak: float = 1.0
) -> list[Tensor]:
    """Values, and gradients of hidden state and weight; the loss uses the entropy or not."""
    hidden_TD, weight_VD, target_T = inputs(dtype, peak)
    columns_RT = TokenLogprobs.apply(hidden_TD, weight_VD, target_T, 0.7, chunk, False, flag)
    slopes_T = torch.linspace(-1, 1, TOKENS)
    ((columns_RT[0] + entropy * columns_RT[1]) @ slopes_T).backward()
    return [columns_RT.detach(), hidden_TD.grad, weight_VD.grad]


def test_without_the_flag_the_gradient_is_that_of_a_loss_without_entropy() -> None:
    plain, with_flag, without = (
        derivatives(torch.float32, entropy=entropy, flag=flag)
        for entropy, flag in ((False, True), (True, True), (True, False))
    )
    for found, expected in zip(without, plain, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    assert not torch.allclose(with_flag[1], plain[1], atol=1e-2)


@pytest.mark.parametrize("flag", [True, False])
def test_nothing_waits_for_the_device(flag: bool) -> None:
    hidden_TD, weight_VD, target_T = inputs(torch.bfloat16, device="meta")  # it has no values to wait for
    with Calls() as calls:
        columns_RT = TokenLogprobs.apply(hidden_TD, weight_VD, target_T, 0.7, 4, True, flag)
        columns_RT[:2].sum().backward()
    assert not calls.names.keys() & set(WAITS)
    assert calls.names["mm"] == 4 * 3  # of each of 3 chunks: logits twice, two gradients


def test_bfloat16_rounds_only_its_inputs_and_its_gradients() -> None:
    # The same bfloat16 numbers in float64. Logits of this size, rounded to bfloat16, are 0.1 off.
    found = derivatives(torch.bfloat16, entropy=True, flag=True, peak=4.0)
    hidden_TD, weight_VD, target_T = inputs(torch.bfloat16, 4.0)
    exact = [column.detach().double().requires_grad_() for column in (hidden_TD, weight_VD)]
    table = (exact[0] @ exact[1].T / 0.7).log_softmax(-1)
    columns = [table.gather(-1, target_T[:, None])[:, 0], -(table.exp() * table).sum(-1)]
    (sum(columns) @ torch.linspace(-1, 1, TOKENS).double()).backward()
    torch.testing.assert_close(found[0].double(), torch.stack(columns), atol=1e-4, rtol=0)
    for gradient, expected in zip(found[1:], exact, strict=True):
        error = (gradient.double() - expected.grad).norm() / expected.grad.norm()
        assert error < 1e-2


@pytest.mark.parametrize("function", [statistics, off_target_gradient])
def test_every_chunk_runs_one_trace_of_plain_operators(function: Callable[..., Any]) -> None:
    traces = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        traces.append(graph)
        return graph.forward

    torch._dynamo.reset()
    traced = torch.compile(function, dynamic=True, fullgraph=True, backend=backend)
    for rows in (7, 4, 9):
        logits_CV = torch.randn(rows, VOCABULARY)
        row_C = torch.rand(rows)
        rest: tuple[Any, ...] = (row_C, row_C, row_C, row_C, torch.float32)
        if function is statistics:
            rest = (torch.arange(rows), True)
        before_CV = logits_CV.clone()
        for found, expected in zip(traced(logits_CV, *rest), function(logits_CV, *rest), strict=True):
            torch.testing.assert_close(found, expected)
        assert torch.equal(logits_CV, before_CV)  # a graph that changed them would write them back
    assert len(traces) == 1


def test_only_gpus_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: compiled.append(function) or "compiled")
    head.fused.cache_clear()
    assert head.fused(statistics, "cpu") is statistics
    assert head.fused(statistics, "cuda") == head.fused(statistics, "cuda") == "compiled"
    assert compiled == [statistics]
    head.fused.cache_clear()
