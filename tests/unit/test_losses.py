"""Every policy loss against its formula written out, its gradient against calculus, and their invariants."""

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algo.aggregation import Counts
from asyncrl.algo.losses import TokenLoss, highest_entropy, value_loss
from asyncrl.algo.metrics import merge
from asyncrl.config import registry
from asyncrl.errors import ConfigError
from tests.support.algo_cases import Case, Token, cast, make_case, pick, rows

Values = list[tuple[float, float]]
"""(loss, d loss sum / d logprob) of every token of a sequence"""


def clamp(x: float, low: float, high: float) -> float:
    return max(low, min(high, x))


def sign(x: float) -> float:
    return (x > 0) - (x < 0)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def ppo_clip(
    row: list[Token], clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None
) -> Values:
    found = []
    for t in row:
        r = math.exp(t.logprob - t.anchor)
        kept = min(r * t.advantage, clamp(r, 1 - clip_low, 1 + clip_high) * t.advantage)
        is_flat = (t.advantage > 0 and r > 1 + clip_high) or (t.advantage < 0 and r < 1 - clip_low)
        if dual_clip is not None and t.advantage < 0 and kept < dual_clip * t.advantage:
            kept, is_flat = dual_clip * t.advantage, True
        found.append((-t.weight * kept, 0.0 if is_flat else -t.weight * r * t.advantage))
    return found


def two_sided(row: list[Token], delta: float, clip_low: float, clip_high: float) -> list[float]:
    """TRL's form: the ratio itself capped at delta, for both signs of the advantage."""
    ratios = [math.exp(t.logprob - t.anchor) for t in row]
    return [
        -t.weight * min(min(r, delta) * t.advantage, clamp(r, 1 - clip_low, 1 + clip_high) * t.advantage)
        for t, r in zip(row, ratios, strict=True)
    ]


def reinforce(row: list[Token]) -> Values:
    return [(-t.weight * t.advantage * t.logprob, -t.weight * t.advantage) for t in row]


def cispo(row: list[Token], clip_low: float | None = 0.2, clip_high: float = 0.2) -> Values:
    found = []
    for t in row:
        c = min(math.exp(t.logprob - t.anchor), 1 + clip_high)
        if clip_low is not None:
            c = max(c, 1 - clip_low)
        found.append((-t.weight * c * t.advantage * t.logprob, -t.weight * c * t.advantage))
    return found


def truncated_reinforce(row: list[Token], cap: float = 2.0) -> Values:
    weights = [t.weight * min(math.exp(t.logprob - t.anchor), cap) for t in row]
    return [(-w * t.advantage * t.logprob, -w * t.advantage) for t, w in zip(row, weights, strict=True)]


def sapo(row: list[Token], tau_positive: float = 1.0, tau_negative: float = 1.05) -> Values:
    found = []
    for t in row:
        tau = tau_positive if t.advantage > 0 else tau_negative
        r = math.exp(t.logprob - t.anchor)
        gate = 1 / (1 + math.exp(-tau * (r - 1)))
        found.append(
            (-t.weight * 4 / tau * gate * t.advantage, -t.weight * 4 * gate * (1 - gate) * r * t.advantage)
        )
    return found


def dro(row: list[Token], beta: float) -> Values:
    found = []
    for t in row:
        d = t.logprob - t.anchor
        found.append(
            (-t.weight * (t.logprob * t.advantage - beta / 2 * d * d), -t.weight * (t.advantage - beta * d))
        )
    return found


def cfpo(row: list[Token], epsilon: float = 0.2) -> Values:
    found = []
    for t in row:
        r = math.exp(t.logprob - t.anchor)
        value = abs(t.advantage) / (2 * epsilon) * (r - 1) ** 2 - r * t.advantage
        slope = abs(t.advantage) / epsilon * (r - 1) * r - r * t.advantage
        found.append((t.weight * value, t.weight * slope))
    return found


def gspo(row: list[Token], clip_low: float = 3e-4, clip_high: float = 4e-4) -> Values:
    if not row:
        return []
    s = math.exp(mean([t.logprob - t.anchor for t in row]))
    found = []
    for t in row:
        kept = min(s * t.advantage, clamp(s, 1 - clip_low, 1 + clip_high) * t.advantage)
        is_flat = (t.advantage > 0 and s > 1 + clip_high) or (t.advantage < 0 and s < 1 - clip_low)
        found.append((-t.weight * kept, 0.0 if is_flat else -t.weight * s * t.advantage))
    return found


def geo_mean(row: list[Token], clip_low: float = 0.4, clip_high: float = 0.4) -> Values:
    if not row:
        return []
    logs, passes = [], []
    for t in row:
        d, s = t.logprob - t.anchor, sign(t.advantage)
        logs.append(s * min(s * d, s * clamp(d, -clip_low, clip_high)))
        passes.append(s != 0 and not (s > 0 and d > clip_high) and not (s < 0 and d < -clip_low))
    objective = mean([t.advantage for t in row]) * math.exp(mean(logs))
    slope = -objective * sum(t.weight for t in row) / len(row)
    return [(-t.weight * objective, slope if passed else 0.0) for t, passed in zip(row, passes, strict=True)]


def dppo_tv(
    row: list[Token], limit_low: float = 0.2, limit_high: float = 0.2, cap: float = 3.0, pull: float = 0.0
) -> Values:
    found = []
    for t in row:
        p, q = math.exp(t.logprob), math.exp(t.anchor)
        keep = p - q <= limit_high if t.advantage > 0 else p - q >= -limit_low
        c = t.weight * min(p / q, cap) * t.advantage * keep
        d = t.logprob - t.anchor
        found.append((-c * t.logprob + t.weight * pull * d * d, -c + t.weight * 2 * pull * d))
    return found


def dppo_kl(
    row: list[Token], limit_low: float = 0.2, limit_high: float = 0.2, cap: float = 3.0, pull: float = 0.0
) -> Values:
    found = []
    for t in row:
        p, q = math.exp(t.logprob), math.exp(t.anchor)
        kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        keep = (kl <= limit_high or p <= q) if t.advantage > 0 else (kl <= limit_low or p >= q)
        c = t.weight * min(p / q, cap) * t.advantage * keep
        d = t.logprob - t.anchor
        found.append((-c * t.logprob + t.weight * pull * d * d, -c + t.weight * 2 * pull * d))
    return found


def at_level(row: list[Token], level: str) -> list[Token]:
    """Tokens that moved by what their whole sequence moved: gradients through each token's own
    log-probability stay the same."""
    moves = [clamp(t.logprob - t.anchor, -20, 20) for t in row]
    moved = clamp(sum(moves), -20, 20) if level == "sequence" else mean(moves) if row else 0.0
    return [t._replace(anchor=t.logprob - moved) for t in row]


def ppo_of_sequences(row: list[Token], level: str, **params: float) -> Values:
    return ppo_clip(at_level(row, level), **params)


def sapo_of_sequences(row: list[Token], level: str, **params: float) -> Values:
    return sapo(at_level(row, level), **params)


def vespo(
    row: list[Token],
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> Values:
    s = math.exp(clamp(sum(t.logprob - t.anchor for t in row), -20, 20))
    found = []
    for t in row:
        k, lam = (k_negative, lambda_negative) if t.advantage < 0 else (k_positive, lambda_positive)
        phi = s**k * math.exp(lam * (1 - s))
        found.append((-t.weight * phi * t.advantage * t.logprob, -t.weight * phi * t.advantage))
    return found


def topr(row: list[Token], level: str = "geometric") -> Values:
    found = []
    for t, moved in zip(row, at_level(row, level), strict=True):
        c = min(math.exp(moved.logprob - moved.anchor), 1.0) if t.advantage < 0 else 1.0
        found.append((-t.weight * c * t.advantage * t.logprob, -t.weight * c * t.advantage))
    return found


Oracle = Callable[..., Values]
CASES: list[tuple[str, Oracle, dict[str, Any]]] = [
    ("ppo_clip", ppo_clip, {}),
    ("ppo_clip", ppo_clip, {"clip_low": 0.1, "clip_high": 0.4}),
    ("ppo_clip", ppo_clip, {"clip_high": 0.28, "dual_clip": 1.5}),
    (
        "ppo_clip",
        ppo_of_sequences,
        {"level": "geometric", "clip_low": 0.1, "clip_high": 0.2, "dual_clip": 1.3},
    ),
    ("ppo_clip", ppo_of_sequences, {"level": "sequence", "dual_clip": 3.0}),
    ("sapo", sapo_of_sequences, {"level": "geometric"}),
    ("sapo", sapo_of_sequences, {"level": "sequence", "tau_positive": 2.0}),
    ("topr", topr, {}),
    ("topr", topr, {"level": "sequence"}),
    ("vespo", vespo, {}),
    ("vespo", vespo, {"k_positive": 1.0, "lambda_positive": 0.5, "k_negative": 0.0, "lambda_negative": 1.5}),
    ("reinforce", reinforce, {}),
    ("gpg", reinforce, {}),
    ("truncated_reinforce", truncated_reinforce, {}),
    ("truncated_reinforce", truncated_reinforce, {"cap": 0.9}),
    ("cispo", cispo, {}),
    ("cispo", cispo, {"clip_low": 0.5, "clip_high": 0.1}),
    ("cispo", cispo, {"clip_low": None, "clip_high": 0.5}),
    ("sapo", sapo, {}),
    ("sapo", sapo, {"tau_positive": 2.0, "tau_negative": 0.5}),
    ("dro", dro, {"beta": 0.7}),
    ("cfpo", cfpo, {}),
    ("cfpo", cfpo, {"epsilon": 0.5}),
    ("gspo", gspo, {}),
    ("gspo", gspo, {"clip_low": 0.1, "clip_high": 0.3}),
    ("geo_mean", geo_mean, {}),
    ("geo_mean", geo_mean, {"clip_low": 0.2, "clip_high": 0.7}),
    ("dppo_tv", dppo_tv, {}),
    ("dppo_tv", dppo_tv, {"limit_low": 0.05, "limit_high": 0.1, "cap": 1.2}),
    ("dppo_tv", dppo_tv, {"limit_low": 0.05, "limit_high": 0.1, "pull": 0.3}),
    ("dppo_kl", dppo_kl, {}),
    ("dppo_kl", dppo_kl, {"limit_low": 0.02, "limit_high": 0.05, "cap": 1.2, "pull": 0.7}),
]
IDS = [f"{name}-{params}" for name, _, params in CASES]
COVARIANCE = [("clip_cov", {}), ("kl_cov", {})]
ALL = [(name, params) for name, _, params in CASES] + COVARIANCE


def evaluate(name: str, params: dict[str, Any], case: Case) -> tuple[TokenLoss, torch.Tensor]:
    """Token losses and the gradient of their sum."""
    logprobs_T = case.logprobs_T.clone().requires_grad_()
    function = registry.resolve("policy_loss", name, params)
    extra = {"entropy_T": case.entropy_T} if registry.takes(function, "entropy_T") else {}
    loss = function(case.batch, logprobs_T, **extra)
    loss.losses_T.sum().backward()
    assert logprobs_T.grad is not None
    return loss, logprobs_T.grad


@pytest.mark.parametrize(("name", "oracle", "params"), CASES, ids=IDS)
@given(seed=st.integers(0, 10_000), proximal=st.booleans())
def test_loss_and_gradient_are_the_formula_written_out(name, oracle, params, seed, proximal):
    case = make_case(seed, proximal=proximal)
    loss, gradient_T = evaluate(name, params, case)
    expected = [value for row in rows(case) for value in oracle(row, **params)]
    assert loss.losses_T.tolist() == pytest.approx([value for value, _ in expected], rel=1e-6, abs=1e-7)
    assert gradient_T.tolist() == pytest.approx([slope for _, slope in expected], rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("name", [name for name in registry.names("policy_loss") if name != "clip_cov"])
def test_on_policy_gradient_is_reinforce(name):
    case = make_case(3, lengths=[3, 0, 4, 1])
    case = case._replace(logprobs_T=case.batch.anchor_logprobs_T)
    _, gradient_T = evaluate(name, {"beta": 0.5} if name == "dro" else {}, case)
    weights_T = case.batch.weights_T
    if name == "geo_mean":  # its sequence is one ratio, so its tokens share their weights
        weights_T = case.batch.mean_S(weights_T)[case.batch.sequence_T]
    torch.testing.assert_close(gradient_T, -case.batch.advantages_T * weights_T)


def test_without_weights_the_weight_is_one():
    case = make_case(4, lengths=[3, 2])
    one = case._replace(batch=dataclasses.replace(case.batch, weights_T=torch.ones(5, dtype=torch.float64)))
    none = case._replace(batch=dataclasses.replace(case.batch, weights_T=None))
    for name, params in ALL:
        torch.manual_seed(0)
        expected = evaluate(name, params, one)
        torch.manual_seed(0)
        actual = evaluate(name, params, none)
        torch.testing.assert_close(actual[0].losses_T, expected[0].losses_T, msg=name)
        torch.testing.assert_close(actual[1], expected[1], msg=name)


def test_a_rejected_token_has_no_loss_and_no_gradient_of_its_own():
    case = make_case(5, lengths=[4, 3])
    weights_T = case.batch.weights_T.clone()
    weights_T[[1, 5]] = 0.0
    case = case._replace(batch=dataclasses.replace(case.batch, weights_T=weights_T))
    for name, params in ALL:
        loss, gradient_T = evaluate(name, params, case)
        assert loss.losses_T[[1, 5]].tolist() == [0.0, 0.0], name
        if name != "geo_mean":
            assert gradient_T[[1, 5]].tolist() == [0.0, 0.0], name


@pytest.mark.parametrize(("name", "params"), ALL, ids=[*IDS, "clip_cov", "kl_cov"])
@pytest.mark.parametrize("proximal", [True, False])
@pytest.mark.parametrize("gap", [100.0, -100.0, math.inf, -math.inf, 88.0, 1000.0])
def test_extreme_ratios_give_finite_losses_and_gradients(name, params, proximal, gap):
    case = cast(make_case(6, lengths=[4, 3, 1, 2]), torch.float32)
    columns = {}
    for column in ("behaviour_logprobs_T", "proximal_logprobs_T"):
        values_T = getattr(case.batch, column).clone()
        values_T[[0, 3, 4, 7, 9]] -= gap
        columns[column] = values_T
    advantages_T = torch.tensor([1.0, -1.0] * 5)
    if not proximal:
        columns["proximal_logprobs_T"] = None
    case = case._replace(batch=dataclasses.replace(case.batch, advantages_T=advantages_T, **columns))
    loss, gradient_T = evaluate(name, params, case)
    assert torch.isfinite(loss.losses_T).all()
    assert torch.isfinite(gradient_T).all()
    assert all(math.isfinite(value) for value in loss.metrics.values())


def test_the_log_ratio_is_clamped_at_20():
    case = make_case(7, lengths=[2])
    logprobs_T = case.batch.anchor_logprobs_T + torch.tensor([19.0, 25.0], dtype=torch.float64)
    batch = dataclasses.replace(case.batch, advantages_T=torch.tensor([-1.0, -1.0]).double(), weights_T=None)
    loss, gradient_T = evaluate("ppo_clip", {}, Case(batch, logprobs_T, case.entropy_T))
    assert loss.losses_T.tolist() == pytest.approx([math.exp(19), math.exp(20)])
    assert gradient_T.tolist() == pytest.approx([math.exp(19), 0.0])


@pytest.mark.parametrize("name", ["gspo", "geo_mean"])
def test_sequence_losses_clamp_each_token_before_the_mean(name):
    """One impossible token must not make the ratio of a whole long answer extreme: 100 counts as 20."""
    case = make_case(8, lengths=[4])
    logprobs_T = case.batch.anchor_logprobs_T + torch.tensor([100.0, 0, 0, 0], dtype=torch.float64)
    batch = dataclasses.replace(case.batch, advantages_T=-torch.ones(4).double(), weights_T=None)
    loss, _ = evaluate(name, {}, Case(batch, logprobs_T, case.entropy_T))
    assert loss.losses_T.tolist() == pytest.approx([math.exp(5)] * 4)


def test_the_product_of_a_long_sequence_is_clamped_too():
    """Every token moved by 1, so the response by 50: its ratio counts as e^20, its gradient goes on."""
    case = make_case(8, lengths=[50])
    logprobs_T = case.batch.anchor_logprobs_T + 1.0
    batch = dataclasses.replace(case.batch, advantages_T=-torch.ones(50).double(), weights_T=None)
    moved = Case(batch, logprobs_T, case.entropy_T)
    loss, gradient_T = evaluate("ppo_clip", {"level": "sequence"}, moved)
    assert loss.losses_T.tolist() == pytest.approx([math.exp(20)] * 50)
    assert gradient_T.tolist() == pytest.approx([math.exp(20)] * 50)
    assert evaluate("vespo", {}, moved)[0].losses_T.abs().max() == 0.0


def test_ppo_of_responses_has_the_gradient_of_their_probability():
    """With seq-mean-token-sum, unclipped: d/dx of the mean of A pi(response) / pi_old(response)."""
    case = make_case(12, lengths=[4, 2, 3], spread=0.01)
    batch = dataclasses.replace(case.batch, weights_T=None)
    logprobs_T = case.logprobs_T.clone().requires_grad_()
    d_T = logprobs_T - batch.anchor_logprobs_T
    products = torch.stack([d_T[batch.sequence_T == s].sum().exp() for s in range(3)])
    advantages_S = torch.stack([batch.advantages_T[batch.sequence_T == s][0] for s in range(3)])
    (expected_T,) = torch.autograd.grad(-(products * advantages_S).mean(), logprobs_T)
    losses_T = registry.resolve("policy_loss", "ppo_clip", {"level": "sequence"})(batch, logprobs_T).losses_T
    loss = registry.resolve("aggregation", "seq-mean-token-sum", {})(losses_T, batch, Counts.of(batch))
    (gradient_T,) = torch.autograd.grad(loss, logprobs_T)
    torch.testing.assert_close(gradient_T, expected_T)


def test_vespo_is_reinforce_where_nothing_moved_and_quiet_far_away():
    """phi is 1 at a ratio of 1 and falls to both sides of its peak at k / lambda."""
    case = make_case(13, lengths=[1])
    batch = dataclasses.replace(case.batch, advantages_T=torch.ones(1).double(), weights_T=None)

    def phi(ratio: float) -> float:
        logprobs_T = batch.anchor_logprobs_T + math.log(ratio)
        return -evaluate("vespo", {}, Case(batch, logprobs_T, case.entropy_T))[1].item()

    assert phi(1.0) == pytest.approx(1.0)
    assert phi(2 / 3) > phi(0.6) > phi(0.1) and phi(2 / 3) > phi(0.7) > phi(1.0) > phi(5.0)


@pytest.mark.parametrize("advantage", [0.7, -0.7])
def test_cfpo_pushes_a_token_to_the_edge_of_the_clip_and_no_further(advantage):
    case = make_case(13, lengths=[3])
    steps_T = torch.tensor([0.2, 0.3, 0.4], dtype=torch.float64) * math.copysign(1.0, advantage)
    batch = dataclasses.replace(case.batch, advantages_T=torch.full((3,), advantage).double(), weights_T=None)
    logprobs_T = batch.anchor_logprobs_T + (1 + steps_T).log()
    _, gradient_T = evaluate("cfpo", {"epsilon": 0.3}, Case(batch, logprobs_T, case.entropy_T))
    wanted = [-math.copysign(1.0, advantage), 0.0, math.copysign(1.0, advantage)]
    assert gradient_T.sign().where(gradient_T.abs() > 1e-9, 0.0).tolist() == wanted


def test_a_broken_model_is_not_hidden():
    case = make_case(8, lengths=[3])
    case.logprobs_T[1] = math.nan
    for name, params in ALL:
        loss, _ = evaluate(name, params, case)
        assert not torch.isfinite(loss.losses_T).all(), name


@pytest.mark.parametrize(("name", "oracle", "params"), CASES, ids=IDS)
@given(seed=st.integers(0, 10_000), data=st.data())
def test_cutting_and_permuting_a_batch_changes_nothing(name, oracle, params, seed, data):
    case = make_case(seed)
    order = data.draw(st.permutations(range(case.batch.num_sequences)))
    cut = data.draw(st.integers(0, len(order)))
    whole = pick(case, order)
    loss, gradient_T = evaluate(name, params, whole)
    parts = [evaluate(name, params, pick(case, part)) for part in (order[:cut], order[cut:])]
    torch.testing.assert_close(torch.cat([part.losses_T for part, _ in parts]), loss.losses_T)
    torch.testing.assert_close(torch.cat([gradient for _, gradient in parts]), gradient_T)
    assert {key: sum(part.metrics[key] for part, _ in parts) for key in loss.metrics} == loss.metrics
    torch.testing.assert_close(loss.losses_T.sum(), evaluate(name, params, case)[0].losses_T.sum())


@pytest.mark.parametrize(("name", "params"), ALL, ids=[*IDS, "clip_cov", "kl_cov"])
def test_float32_agrees_with_float64(name, params):
    case = make_case(9, lengths=[40, 25, 60], spread=0.2)
    torch.manual_seed(1)
    double, double_gradient_T = evaluate(name, params, case)
    torch.manual_seed(1)
    single, single_gradient_T = evaluate(name, params, cast(case, torch.float32))
    assert single.losses_T.dtype == torch.float32
    torch.testing.assert_close(single.losses_T.double(), double.losses_T, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(single_gradient_T.double(), double_gradient_T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "params"), ALL, ids=[*IDS, "clip_cov", "kl_cov"])
@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_an_empty_micro_batch_has_no_loss_but_a_graph(name, params, lengths):
    loss, gradient_T = evaluate(name, params, make_case(1, lengths=lengths))
    assert loss.losses_T.sum().item() == 0.0
    assert gradient_T.shape == (0,)
    assert set(merge([loss.metrics]).values()) <= {0.0}


def test_clip_metrics_count_tokens_without_gradient_by_side():
    case = make_case(10, lengths=[30, 30, 30, 30])
    for name, low, high in [("ppo_clip", 0.2, 0.2), ("gspo", 3e-4, 4e-4)]:
        loss, gradient_T = evaluate(name, {}, case)
        assert loss.metrics["clipped_low"] > 0, name
        assert loss.metrics["clipped_high"] > 0, name
        is_flat_T = (gradient_T == 0) & (case.batch.advantages_T != 0)
        assert loss.metrics["clipped_low"] == float((is_flat_T & (case.batch.advantages_T < 0)).sum()), name
        assert loss.metrics["clipped_high"] == float((is_flat_T & (case.batch.advantages_T > 0)).sum()), name
        assert low < high or low == high


def test_other_metrics_count_what_they_say():
    case = make_case(10, lengths=[30, 30, 30, 30])
    advantages_T = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64).repeat(40)
    case = case._replace(batch=dataclasses.replace(case.batch, advantages_T=advantages_T))
    flat = [token for row in rows(case) for token in row]
    ratios = [math.exp(t.logprob - t.anchor) for t in flat]
    both = list(zip(flat, ratios, strict=True))
    assert evaluate("cispo", {}, case)[0].metrics == {
        "clipped_low": sum(r < 0.8 for r in ratios),
        "clipped_high": sum(r > 1.2 for r in ratios),
    }
    assert evaluate("ppo_clip", {"dual_clip": 1.4}, case)[0].metrics["dual_clipped"] == sum(
        t.advantage < 0 and r > 1.4 for t, r in both
    )
    assert evaluate("geo_mean", {"clip_low": 0.3, "clip_high": 0.6}, case)[0].metrics == {
        "clipped_low": sum(t.advantage < 0 and math.log(r) < -0.3 for t, r in both),
        "clipped_high": sum(t.advantage > 0 and math.log(r) > 0.6 for t, r in both),
    }
    moved = [(t, math.exp(t.logprob) - math.exp(t.anchor)) for t in flat]
    assert evaluate("dppo_tv", {"limit_low": 0.1, "limit_high": 0.15, "cap": 1.2}, case)[0].metrics == {
        "clipped_low": sum(t.advantage <= 0 and move < -0.1 for t, move in moved),
        "clipped_high": sum(t.advantage > 0 and move > 0.15 for t, move in moved),
        "capped": sum(
            r > 1.2 and not (move > 0.15 if t.advantage > 0 else move < -0.1)
            for (t, r), (_, move) in zip(both, moved, strict=True)
        ),
    }


@given(seed=st.integers(0, 10_000))
def test_dual_clip_is_the_two_sided_clip(seed):
    case = make_case(seed)
    loss, _ = evaluate("ppo_clip", {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.6}, case)
    expected = [value for row in rows(case) for value in two_sided(row, 1.6, 0.2, 0.28)]
    assert loss.losses_T.tolist() == pytest.approx(expected, abs=1e-12)


@given(seed=st.integers(0, 10_000), limit=st.sampled_from([0.05, 0.3]))
def test_sequences_that_drifted_away_are_left_out_only_with_a_negative_advantage(seed, limit):
    case = make_case(seed)
    loss, gradient_T = evaluate("ppo_clip", {"max_drift": limit}, case)
    expected, left_out = [], 0
    for row in rows(case):
        drift = mean([t.behaviour - t.logprob for t in row]) if row else 0.0
        keep = [t.advantage >= 0 or drift <= limit for t in row]
        left_out += keep.count(False)
        expected += [value if kept else (0.0, 0.0) for value, kept in zip(ppo_clip(row), keep, strict=True)]
    assert loss.losses_T.tolist() == pytest.approx([value for value, _ in expected], abs=1e-9)
    assert gradient_T.tolist() == pytest.approx([slope for _, slope in expected], abs=1e-9)
    assert loss.metrics["left_out"] == left_out


@given(
    seed=st.integers(0, 10_000),
    share=st.sampled_from([0.01, 0.2, 0.5, 0.9]),
    drift=st.sampled_from([None, 0.1]),
)
def test_only_the_tokens_of_highest_entropy_of_each_sequence_are_trained(seed, share, drift):
    case = make_case(seed)
    loss, _ = evaluate("ppo_clip", {"top_entropy": share, "max_drift": drift}, case)
    without, _ = evaluate("ppo_clip", {"max_drift": drift}, case)
    keep = []
    for row in rows(case):
        lowest = sorted((t.entropy for t in row), reverse=True)[: math.ceil(share * len(row))]
        keep += [t.entropy in lowest for t in row]
    expected = [value if kept else 0.0 for value, kept in zip(without.losses_T.tolist(), keep, strict=True)]
    assert loss.losses_T.tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("percent", [7, 15, 30, 55, 60, 80])
def test_a_share_is_rounded_up_exactly(percent):
    """In whole numbers, for every length: ceil(percent * length / 100); rounding never adds a token."""
    lengths = [*range(1, 130), 4096]
    case = make_case(1, lengths=lengths)
    keep_T = highest_entropy(case.batch, case.entropy_T, percent / 100)
    assert case.batch.sum_S(keep_T.double()).tolist() == [-(-percent * length // 100) for length in lengths]


def test_top_entropy_needs_entropies():
    case = make_case(1, lengths=[2])
    with pytest.raises(ConfigError, match="top_entropy"):
        registry.resolve("policy_loss", "ppo_clip", {"top_entropy": 0.2})(case.batch, case.logprobs_T)


def make_spread_case(seed: int) -> Case:
    """Advantages that differ, so that no two covariances are equal but for rounding."""
    case = make_case(seed, lengths=[9, 0, 14, 7])
    advantages_T = torch.randn(30, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return case._replace(batch=dataclasses.replace(case.batch, advantages_T=advantages_T))


def covariances(case: Case) -> list[float]:
    flat = [token for row in rows(case) for token in row]
    mean_advantage, mean_logprob = mean([t.advantage for t in flat]), mean([t.logprob for t in flat])
    return [(t.advantage - mean_advantage) * (t.logprob - mean_logprob) for t in flat]


@given(seed=st.integers(0, 10_000), share=st.sampled_from([2e-4, 0.1, 0.3]))
def test_kl_cov_penalises_the_tokens_of_highest_covariance(seed, share):
    case = make_spread_case(seed)
    loss, gradient_T = evaluate("kl_cov", {"share": share, "coefficient": 0.3}, case)
    found = covariances(case)
    highest = sorted(found, reverse=True)[: max(1, int(share * len(found)))]
    flat = [token for row in rows(case) for token in row]
    expected, slopes = [], []
    for t, covariance in zip(flat, found, strict=True):
        d = t.logprob - t.anchor
        penalty = 0.3 * (covariance in highest)
        expected.append(t.weight * (-math.exp(d) * t.advantage + penalty * abs(d)))
        slopes.append(t.weight * (-math.exp(d) * t.advantage + penalty * sign(d)))
    assert loss.losses_T.tolist() == pytest.approx(expected)
    assert gradient_T.tolist() == pytest.approx(slopes)
    assert loss.metrics == {"penalised": len(highest)}


@given(seed=st.integers(0, 10_000), share=st.sampled_from([2e-4, 0.1, 1.0]))
def test_clip_cov_leaves_out_some_tokens_between_the_bounds(seed, share):
    case = make_spread_case(seed)
    bounds = {"covariance_low": 0.2, "covariance_high": 1.0}
    loss, _ = evaluate("clip_cov", {"share": share, **bounds}, case)
    plain, plain_gradient_T = evaluate("ppo_clip", {}, case)
    advantages = case.batch.advantages_T.tolist()
    candidates = {
        index
        for index, covariance in enumerate(covariances(case))
        if 0.2 < covariance < 1.0 and not (plain_gradient_T[index] == 0 and advantages[index] != 0)
    }
    count = min(max(1, int(share * case.batch.tokens)), len(candidates))
    assert loss.metrics["left_out"] == count
    changed = {index for index in range(case.batch.tokens) if loss.losses_T[index] != plain.losses_T[index]}
    assert changed <= candidates
    assert len(changed) == count
    assert all(loss.losses_T[index] == 0 for index in changed)


@pytest.mark.parametrize("clip", [0.5, 0.05, None])
def test_value_loss_is_the_larger_of_the_clipped_and_the_plain_error(clip):
    draw = torch.Generator().manual_seed(0)
    values_T, old_T, returns_T = (torch.randn(50, generator=draw, dtype=torch.float64) for _ in range(3))
    values_T.requires_grad_()
    loss = value_loss(values_T, old_T, returns_T, clip=clip)
    loss.losses_T.sum().backward()
    expected, slopes, clipped = [], [], 0
    for v, old, r in zip(values_T.tolist(), old_T.tolist(), returns_T.tolist(), strict=True):
        plain = (v - r) ** 2
        bounded = plain if clip is None else (clamp(v, old - clip, old + clip) - r) ** 2
        clipped += bounded > plain
        expected.append(0.5 * max(plain, bounded))
        slopes.append(0.0 if bounded > plain else v - r)
    assert loss.losses_T.tolist() == pytest.approx(expected)
    assert values_T.grad.tolist() == pytest.approx(slopes)
    assert loss.metrics == ({} if clip is None else {"value_clipped": clipped})


def test_every_registered_loss_is_tested_here():
    assert {name for name, _ in ALL} == set(registry.names("policy_loss"))
    for name, params in ALL:
        assert inspect.signature(registry.resolve("policy_loss", name, params))
