"""What the log-probability head asks of the device: float32 sums, no waiting, one trace for every chunk."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl.trainer import head
from asyncrl.trainer.head import TokenLogprobs, off_target_gradient, statistics

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


def plain_derivatives(dtype: torch.dtype) -> list[Tensor]:
    """The same with functions that are not compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "fused", lambda function, device_type: function)
        return derivatives(dtype, entropy=True, flag=True)


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
    # Of each of 3 chunks: logits, again but of the last, the gradients of hidden states and of the weight.
    assert calls.names["mm"] == 3 * 3 - 1 and calls.names["addmm_"] == 3


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


def test_what_all_logits_of_a_token_have_in_common_costs_no_digits() -> None:
    """Models without a final norm, and low temperatures, have logits of thousands."""
    torch.manual_seed(0)
    logits_CV, target_C = (torch.randn(TOKENS, VOCABULARY) * 3.0 + 1e4), torch.arange(TOKENS)
    table = logits_CV.double().log_softmax(-1)
    logprob_C, entropy_C = table[target_C, target_C], -(table.exp() * table).sum(-1)
    columns, scale_2C = statistics(logits_CV, target_C, True)
    exact = torch.stack((logprob_C, entropy_C, table.exp().square().sum(-1)))
    torch.testing.assert_close(columns.double(), exact, atol=0, rtol=2e-6)
    ones_C = torch.ones(TOKENS)
    found = off_target_gradient(logits_CV, scale_2C, ones_C, entropy_C.float(), ones_C, torch.float32)
    wanted = -table.exp() * (1.0 + table + entropy_C[:, None])
    torch.testing.assert_close(found.double(), wanted, atol=1e-6, rtol=2e-6)


def test_small_gradients_of_many_chunks_are_summed_in_float32() -> None:
    """In bfloat16 the sum would stand still once it is 256 times as large as a chunk's part."""
    tokens = 2048
    hidden_TD = torch.ones(tokens, 2, dtype=torch.bfloat16, requires_grad=True)
    weight_VD = torch.zeros(4, 2, dtype=torch.bfloat16, requires_grad=True)
    target_T = torch.zeros(tokens, dtype=torch.int64)
    TokenLogprobs.apply(hidden_TD, weight_VD, target_T, 1.0, 2, False, False)[0].sum().backward()
    expected = torch.tensor([0.75, -0.25, -0.25, -0.25])[:, None].expand(4, 2) * tokens
    torch.testing.assert_close(weight_VD.grad.float(), expected, rtol=1e-2, atol=0)


@pytest.mark.parametrize("gap", [8.0, 9.5, 11.0, 12.5, 14.0])
def test_a_nearly_certain_token_keeps_the_digits_of_its_gradient(gap: float) -> None:
    """d ln p / dz = 1 - p = -(exp(ln p) - 1), which is -ln p but for its square."""
    hidden_TD = torch.tensor([[gap, 0.0]], requires_grad=True)
    columns_RT = TokenLogprobs.apply(hidden_TD, torch.eye(2), torch.tensor([0]), 1.0, 1, False, False)
    columns_RT[0].sum().backward()
    logprob = columns_RT[0, 0].item()
    assert float(hidden_TD.grad[0, 0]) == pytest.approx(-logprob - logprob**2 / 2, rel=1e-6)


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
        scale_2C = torch.stack((row_C, row_C))
        rest: tuple[Any, ...] = (scale_2C, row_C, row_C, row_C, torch.float32)
        if function is statistics:
            rest = (torch.arange(rows), True)
        before_CV = logits_CV.clone()
        for found, expected in zip(traced(logits_CV, *rest), function(logits_CV, *rest), strict=True):
            torch.testing.assert_close(found, expected)
        assert torch.equal(logits_CV, before_CV)  # a graph that changed them would write them back
    assert len(traces) == 1


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The head uses what it uses on a GPU, with new compilations, also after the test."""
    fused = head.fused
    fused.cache_clear()
    monkeypatch.setattr(head, "fused", lambda function, device_type: fused(function, "cuda"))
    yield
    fused.cache_clear()


def test_only_gpus_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: compiled.append(function) or function)
    head.fused.cache_clear()
    assert head.fused(statistics, "cpu") is statistics
    assert head.fused(statistics, "cuda") is head.fused(statistics, "cuda")
    assert compiled == [statistics]
    head.fused.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_it_has_the_same_values_and_gradients(
    dtype: torch.dtype, as_on_a_gpu: None, caplog: pytest.LogCaptureFixture
) -> None:
    """By the compiler that torch has for CPUs, which gets the same graphs as the one for GPUs."""
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    compiled = derivatives(dtype, entropy=True, flag=True)
    assert not [record for record in caplog.records if record.name.startswith("asyncrl")]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs == 2
    for found, expected in zip(compiled, plain_derivatives(dtype), strict=True):
        tolerance = 1e-5 if dtype == torch.float32 else 8e-3
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


class Broken:
    """A compiled function that fails when it is called, like one without a C compiler."""

    def __init__(self, error: Exception) -> None:
        self.error, self.calls = error, 0

    def __call__(self, *_: Any) -> Any:
        self.calls += 1
        raise self.error


def test_what_cannot_be_compiled_runs_as_it_is_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, as_on_a_gpu: None, caplog: pytest.LogCaptureFixture
) -> None:
    broken: dict[str, Broken] = {}

    def compile_(function: Callable[..., Any], dynamic: bool) -> Broken:
        return broken.setdefault(function.__name__, Broken(RuntimeError("Failed to find C compiler")))

    monkeypatch.setattr(torch, "compile", compile_)
    for _ in range(2):
        found = derivatives(torch.float32, entropy=True, flag=True)
        for one, expected in zip(found, plain_derivatives(torch.float32), strict=True):
            assert torch.equal(one, expected)
    assert {name: one.calls for name, one in broken.items()} == {"statistics": 1, "off_target_gradient": 1}
    assert len(caplog.records) == 2 and caplog.text.count("RuntimeError: Failed to find C compiler") == 2


def test_a_full_gpu_is_no_failure_of_the_compiler(
    monkeypatch: pytest.MonkeyPatch, as_on_a_gpu: None, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Broken(torch.OutOfMemoryError("CUDA out of memory"))
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: broken)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            derivatives(torch.float32, entropy=True, flag=True)
    assert broken.calls == 2 and not caplog.records
