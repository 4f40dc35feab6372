"""The composed losses: what each column does, and that leaving a pass out changes nothing."""

import math
from dataclasses import replace

import pytest
import torch

from asyncrl.algo.aggregation import Counts
from asyncrl.algo.losses import TokenLoss
from asyncrl.algo.metrics import finish, merge
from asyncrl.algo.tokens import TokenBatch
from asyncrl.batch.objective import Objective
from asyncrl.batch.recipe import critic_loss
from asyncrl.batch.resolve import make_objective
from asyncrl.config.algorithm import AlgorithmConfig, ImitationConfig, KLConfig
from asyncrl.config.base import Choice
from asyncrl.errors import ConfigError
from asyncrl.trainer.base import LOSS, LossSums, MicroBatch


class Policy:
    """Log-probabilities that are parameters themselves."""

    def __init__(self, tokens: int) -> None:
        draw = torch.Generator().manual_seed(0)
        self.logprobs_T = (-torch.rand(tokens, generator=draw)).requires_grad_()
        self.reference_T = -torch.rand(tokens, generator=draw)


def microbatch(tokens: int = 6, **columns: torch.Tensor) -> MicroBatch:
    draw = torch.Generator().manual_seed(1)
    none = torch.empty(0, dtype=torch.int64)
    return MicroBatch(
        input_ids_N=none,
        position_ids_N=none,
        sequence_starts=(0,),
        source_T=none,
        target_T=none,
        tokens=TokenBatch(
            sequence_T=torch.tensor([0, 0, 0, 1, 1, 1]),
            num_sequences=2,
            behaviour_logprobs_T=-2 * torch.rand(tokens, generator=draw),
            advantages_T=torch.randn(tokens, generator=draw),
            **{"lag_T": torch.zeros(tokens, dtype=torch.int64), **columns},
        ),
    )


def build(config: AlgorithmConfig) -> Objective:
    return make_objective(config, max_response_tokens=9)


def evaluate(
    objective: Objective, batch: MicroBatch, policy: Policy, kl: float = 0.0
) -> tuple[LossSums, torch.Tensor]:
    policy.logprobs_T.grad = None
    loss = objective.loss(Counts(tokens=6, sequences=2), kl_coefficient=kl, entropy_coefficient=0.0)
    sums = loss(batch, policy.logprobs_T, torch.zeros(6))
    sums.loss.backward()
    return replace(sums, metrics=merge([sums.metrics])), policy.logprobs_T.grad


@pytest.mark.parametrize("loss", ["ppo_clip", "reinforce"])
@pytest.mark.parametrize(
    "correction", [Choice(name="truncate", cap=1.1), Choice(name="mask"), Choice(name="none")]
)
def test_one_step_per_batch_needs_no_pass_for_the_proximal_policy(loss, correction):
    objective = build(AlgorithmConfig(policy_loss=Choice(name=loss), correction=correction))
    policy = Policy(6)
    quick, quick_T = evaluate(objective, microbatch(), policy)
    measured = microbatch(proximal_logprobs_T=policy.logprobs_T.detach().clone())
    expected, expected_T = evaluate(objective, measured, policy)
    assert quick.metrics == pytest.approx(expected.metrics, rel=1e-6)
    torch.testing.assert_close(quick_T, expected_T)


def test_several_steps_anchor_the_ratio_at_the_start_of_the_batch():
    objective = build(AlgorithmConfig(correction=Choice(name="none")))
    policy = Policy(6)
    measured = microbatch(proximal_logprobs_T=policy.logprobs_T.detach().clone())
    with torch.no_grad():
        policy.logprobs_T += 0.1
    sums, _ = evaluate(objective, measured, policy)
    assert sums.metrics["policy/ratio"] == pytest.approx(6 * 1.10517, rel=1e-4)


def test_log_linear_interpolates_from_the_version_being_made():
    """Of a token of lag d (from the version being trained), d + 1 updates lie between mu and pi, and the last
    is this one's."""
    lags = [0, 1, 2, 3, 0, 7]
    batch = microbatch(lag_T=torch.tensor(lags))
    policy = Policy(6)
    objective = build(AlgorithmConfig(proximal="log_linear", correction=Choice(name="truncate", cap=1e9)))
    sums, _ = evaluate(objective, batch, policy)
    mu, pi = batch.tokens.behaviour_logprobs_T.tolist(), policy.logprobs_T.tolist()
    proximal = [m + (d / (d + 1)) * (p - m) for m, p, d in zip(mu, pi, lags, strict=True)]
    weights = [math.exp(q - m) for q, m in zip(proximal, mu, strict=True)]
    ratios = [math.exp(p - q) for p, q in zip(pi, proximal, strict=True)]
    assert weights[0] == weights[4] == 1.0  # of lag 0: the behaviour policy is the proximal one
    assert sums.metrics["weight/mean"] == pytest.approx(sum(weights), rel=1e-5)
    assert sums.metrics["policy/ratio"] == pytest.approx(sum(ratios), rel=1e-5)


def test_bypass_compares_with_the_behaviour_policy_and_corrects_nothing():
    objective = build(AlgorithmConfig(proximal="behaviour"))
    policy = Policy(6)
    sums, _ = evaluate(objective, microbatch(), policy)
    ratios = (policy.logprobs_T.detach() - microbatch().tokens.behaviour_logprobs_T).exp()
    assert sums.metrics["policy/ratio"] == pytest.approx(float(ratios.sum()), rel=1e-5)
    assert not any(name.startswith("weight/") for name in sums.metrics)


def test_the_penalty_pulls_towards_the_reference():
    objective = build(AlgorithmConfig(policy_loss=Choice(name="reinforce"), correction=Choice(name="none")))
    policy = Policy(6)
    batch = microbatch(reference_logprobs_T=policy.reference_T)
    _, with_penalty_T = evaluate(objective, batch, policy, kl=0.5)
    _, without_T = evaluate(objective, batch, policy)
    # d/dx of k3 = exp(ref - x) - (ref - x) - 1 is 1 - exp(ref - x), weighted and averaged over 6 tokens
    expected_T = 0.5 * (1 - (policy.reference_T - policy.logprobs_T.detach()).exp()) / 6
    torch.testing.assert_close(with_penalty_T - without_T, expected_T, atol=1e-6, rtol=1e-5)


def test_a_penalty_in_the_reward_is_measured_and_has_no_gradient():
    policy = Policy(6)
    batch = microbatch(reference_logprobs_T=policy.reference_T)
    in_loss = build(AlgorithmConfig())
    in_reward = build(AlgorithmConfig(kl=KLConfig(placement="reward")))
    _, without_T = evaluate(in_loss, batch, policy)
    sums, gradient_T = evaluate(in_reward, batch, policy, kl=0.5)
    torch.testing.assert_close(gradient_T, without_T, atol=0, rtol=0)
    d_T = policy.logprobs_T.detach() - policy.reference_T
    assert sums.metrics["policy/kl_reference"] == pytest.approx(
        float(((-d_T).exp() + d_T - 1).sum()), rel=1e-4
    )


def test_the_entropy_bonus_has_a_gradient():
    objective = build(AlgorithmConfig())
    entropy_T = torch.ones(6, requires_grad=True)
    loss = objective.loss(Counts(tokens=6, sequences=2), kl_coefficient=0.0, entropy_coefficient=0.3)
    loss(microbatch(), Policy(6).logprobs_T, entropy_T).loss.backward()
    torch.testing.assert_close(entropy_T.grad, torch.full((6,), -0.3 / 6))


def test_good_answers_are_imitated_by_the_mean_over_their_tokens_whatever_the_weights():
    config = AlgorithmConfig(imitation=ImitationConfig(coefficient=0.3), correction=Choice(name="mask"))
    solved_T = torch.tensor([0.0, 0, 0, 1, 1, 1])
    policy, counts = Policy(6), Counts(tokens=60, sequences=20, solved=12)
    gradients: list[torch.Tensor] = []
    for columns in ({"solved_T": solved_T}, {}):
        policy.logprobs_T.grad = None
        loss_of = build(config).loss(counts, kl_coefficient=0.0, entropy_coefficient=0.0)
        sums = loss_of(microbatch(**columns), policy.logprobs_T, torch.zeros(6))
        sums.loss.backward()
        gradients.append(policy.logprobs_T.grad.clone())
        if columns:
            published = finish(merge([sums.metrics]))
    torch.testing.assert_close(gradients[0] - gradients[1], -0.3 * solved_T / 12)
    assert published["tokens/solved"] == 3
    assert published["policy/nll/solved"] == pytest.approx(-policy.logprobs_T[3:].mean().item())
    none = finish({**merge([sums.metrics]), "tokens/solved": 0.0, "policy/nll/solved": 0.0})
    assert "policy/nll/solved" not in none and none["tokens/solved"] == 0, "there is no mean of nothing"


def test_tokens_that_the_loss_leaves_out_are_counted_by_the_length_of_their_response():
    loss = Choice(name="ppo_clip", top_entropy=0.5)
    objective = build(AlgorithmConfig(policy_loss=loss))
    entropy_T = torch.tensor([0.9, 0.1, 0.8, 0.2, 0.7, 0.6])
    loss_of = objective.loss(Counts(tokens=6, sequences=2), kl_coefficient=0.0, entropy_coefficient=0.0)
    metrics = loss_of(microbatch(), Policy(6).logprobs_T, entropy_T).metrics
    # 3 of 9 tokens is the first third.
    assert metrics["policy/left_out"] == metrics["policy/left_out/short"] > 0
    assert (metrics["tokens/short"], metrics["tokens/medium"]) == (6, 0)


def test_the_critic_is_pulled_to_its_returns_by_the_mean_over_all_ranks():
    values_T = torch.tensor([0.0, 1.0, 2.0, 0.0, -1.0, 3.0], requires_grad=True)
    old_T = torch.tensor([0.0, 0.0, 2.0, 1.0, -1.0, 3.0])
    returns_T = torch.tensor([1.0, 2.0, 0.0, 0.0, -1.0, 2.0])
    sums = critic_loss(Counts(tokens=60, sequences=2), clip=0.5)(
        microbatch(values_T=old_T, returns_T=returns_T), values_T
    )
    # Clipped to within 0.5 of the old value the second is 0.5 and the fourth 0.5: further from their returns,
    # so they count.
    expected = [0.5 * e * e for e in (1.0, 1.5, 2.0, 0.5, 0.0, 1.0)]
    assert sums.loss.item() == pytest.approx(sum(expected) / 60)
    assert sums.metrics == pytest.approx({LOSS: sum(expected) / 60, "tokens": 6, "critic/value_clipped": 2})


@pytest.mark.parametrize("loss", ["ppo_clip", "reinforce", "gspo", "cispo"])
def test_on_policy_the_decoupled_objective_is_the_synchronous_one(loss):
    policy = Policy(6)
    (batch,) = (microbatch(),)
    on_policy = replace(batch, tokens=replace(batch.tokens, behaviour_logprobs_T=policy.logprobs_T.detach()))
    results: list[tuple[float, torch.Tensor]] = []
    for proximal in ("recompute", "behaviour"):
        config = AlgorithmConfig(policy_loss=Choice(name=loss), proximal=proximal)
        sums, gradient_T = evaluate(build(config), on_policy, policy)
        results.append((sums.metrics[LOSS], gradient_T))
    (decoupled, decoupled_T), (synchronous, synchronous_T) = results
    assert decoupled == pytest.approx(synchronous, abs=1e-6)
    torch.testing.assert_close(decoupled_T, synchronous_T, atol=1e-6, rtol=0)
    if loss != "gspo":
        torch.testing.assert_close(decoupled_T, -batch.tokens.advantages_T / 6, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["entropy", "kl_reference"])
def test_a_metric_of_a_loss_never_replaces_one_of_every_run(name):
    objective = build(AlgorithmConfig(correction=Choice(name="none")))
    policy = Policy(6)

    def own(batch: TokenBatch, logprobs_T: torch.Tensor) -> TokenLoss:
        return TokenLoss(logprobs_T, {name: 1.0})

    batch = microbatch(reference_logprobs_T=policy.reference_T)
    with pytest.raises(ConfigError, match=f"returns a metric that is policy/{name} here, .* another name"):
        evaluate(replace(objective, policy_loss=own), batch, policy)
