"""KL estimators: value, gradient, extremes; their expected gradients are the divergences that they claim."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algo.kl import bias_corrected
from asyncrl.algo.tokens import TokenBatch
from asyncrl.batch.coefficients import adapt_coefficient
from asyncrl.config import registry

VALUES = {
    "k1": lambda d: d,
    "abs": abs,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: min(math.exp(-d) - 1 + d, 10.0),
    "k1+": lambda d: d,
    "k3+": lambda d: min(math.exp(-d) - 1 + d, 10.0),
    "abs+": abs,
}
SLOPES = {
    "k1": lambda d: 1.0,
    "abs": lambda d: math.copysign(1.0, d),
    "k2": lambda d: d,
    "k3": lambda d: 0.0 if math.exp(-d) - 1 + d > 10 else 1 - math.exp(-d),
    "k1+": lambda d: d,
    "k3+": lambda d: d,
    "abs+": lambda d: d,
}


def evaluate(name: str, logprobs: list[float], reference: list[float], dtype=torch.float64):
    logprobs_T = torch.tensor(logprobs, dtype=dtype, requires_grad=True)
    kl_T = registry.resolve("kl", name, {})(logprobs_T, torch.tensor(reference, dtype=dtype))
    kl_T.sum().backward()
    return kl_T.detach(), logprobs_T.grad


@pytest.mark.parametrize("name", registry.names("kl"))
@given(pairs=st.lists(st.tuples(st.floats(-12, -0.01), st.floats(-12, -0.01)), min_size=1, max_size=6))
def test_value_and_gradient_are_the_formula_written_out(name, pairs):
    kl_T, gradient_T = evaluate(name, *map(list, zip(*pairs, strict=True)))
    differences = [p - q for p, q in pairs]
    assert kl_T.tolist() == pytest.approx([VALUES[name](d) for d in differences], abs=1e-9)
    expected = [0.0 if name == "abs" and d == 0 else SLOPES[name](d) for d in differences]
    assert gradient_T.tolist() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", registry.names("kl"))
@pytest.mark.parametrize("reference", [100.0, -100.0, -1e4, math.inf, -math.inf])
def test_extremes_are_finite(name, reference):
    kl_T, gradient_T = evaluate(name, [-1.0, -0.5], [reference, -0.4], torch.float32)
    assert torch.isfinite(kl_T).all()
    assert torch.isfinite(gradient_T).all()


@pytest.mark.parametrize("name", registry.names("kl"))
def test_log_ratios_are_clamped_at_20(name):
    for gap in (30.0, -30.0):
        far, _ = evaluate(name, [-1.0], [-1.0 - gap])
        edge, _ = evaluate(name, [-1.0], [-1.0 - math.copysign(20.0, gap)])
        assert far.item() == edge.item()


@pytest.mark.parametrize("name", ["k2", "k3", "abs", "k3+"])
def test_small_differences_keep_their_precision(name):
    d = 2.0**-12  # exact in float32, so that only the estimator can lose digits
    kl_T, _ = evaluate(name, [-1.0 + d], [-1.0], torch.float32)
    assert kl_T.item() == pytest.approx(d if name == "abs" else d * d / 2, rel=1e-3)


def test_expected_gradients_are_those_of_the_divergences():
    """Over all tokens of a small vocabulary: k1 has none, k2 has KL(pi || ref)'s, k3 has KL(ref || pi)'s."""
    logits_V = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    reference_V = torch.tensor([-0.2, 0.4, 0.0, 0.9], dtype=torch.float64).log_softmax(0)

    def gradient(value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(value, logits_V)[0]

    def expected(name: str) -> torch.Tensor:
        logprobs_V = logits_V.log_softmax(0)
        probs_V = logprobs_V.exp().detach()
        return gradient((probs_V * registry.resolve("kl", name, {})(logprobs_V, reference_V)).sum())

    logprobs_V = logits_V.log_softmax(0)
    reverse = gradient((logprobs_V.exp() * (logprobs_V - reference_V)).sum())
    logprobs_V = logits_V.log_softmax(0)
    forward = gradient((reference_V.exp() * (reference_V - logprobs_V)).sum())
    torch.testing.assert_close(expected("k1"), torch.zeros(4, dtype=torch.float64))
    for name in ("k2", "k1+", "k3+", "abs+"):
        torch.testing.assert_close(expected(name), reverse)
    torch.testing.assert_close(expected("k3"), forward)


@pytest.mark.parametrize("far", [1.0, 6.0])  # at 6, k3 is beyond its bound
@pytest.mark.parametrize("name", registry.names("kl"))
@pytest.mark.parametrize("proximal", [True, False])
def test_the_bias_corrected_gradient_is_that_of_the_divergence_whoever_sampled(name, proximal, far):
    """Over all tokens of a small vocabulary, by the probabilities of a third policy, with exact weights to
    the proximal one."""
    draw = torch.Generator().manual_seed(3)
    logits_V = torch.randn(5, generator=draw, dtype=torch.float64).requires_grad_()
    reference_V, behaviour_V, proximal_V = (
        torch.tensor([[far], [1.0], [1.0]]) * torch.randn(3, 5, generator=draw, dtype=torch.float64)
    ).log_softmax(1)
    batch = TokenBatch(
        sequence_T=torch.arange(5),
        num_sequences=5,
        behaviour_logprobs_T=behaviour_V,
        proximal_logprobs_T=proximal_V if proximal else None,
        reference_logprobs_T=reference_V,
        weights_T=(proximal_V - behaviour_V).exp() if proximal else None,
        advantages_T=torch.zeros(5),
    )
    logprobs_V = logits_V.log_softmax(0)
    (divergence,) = torch.autograd.grad(
        (logprobs_V.exp() * (logprobs_V - reference_V)).sum(), logits_V, retain_graph=True
    )
    kl_V = bias_corrected(registry.resolve("kl", name, {})(logprobs_V, reference_V), batch, logprobs_V)
    value = (behaviour_V.exp() * kl_V).sum()
    (gradient,) = torch.autograd.grad(value, logits_V)
    torch.testing.assert_close(gradient, divergence)
    if far == 1.0 and name[:2] in ("k1", "k3"):
        torch.testing.assert_close(value, (logprobs_V.exp() * (logprobs_V - reference_V)).sum())


@pytest.mark.parametrize(
    ("kl", "factor"),
    [
        (0.1, 1.0),
        (0.11, 1 + 0.1 * 50 / 1000),
        (0.05, 1 - 0.2 * 50 / 1000),
        (9.0, 1 + 0.2 * 50 / 1000),
        (0.09, 1 - 0.1 * 50 / 1000),
    ],
)
def test_the_coefficient_follows_the_divergence_within_limits(kl, factor):
    assert adapt_coefficient(0.02, kl, target=0.1, horizon=1000, steps=50) == pytest.approx(0.02 * factor)
