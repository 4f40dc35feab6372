"""The composed loss: what it needs a pass for, and that leaving the pass out changes nothing."""

from dataclasses import replace

import pytest
import torch

from asyncrl.algo.aggregation import Counts
from asyncrl.algo.tokens import TokenBatch
from asyncrl.config.algorithm import AlgorithmConfig, EntropyConfig, KLConfig
from asyncrl.config.base import Choice
from asyncrl.config.schema import BatchConfig
from asyncrl.trainer.base import MicroBatch
from asyncrl.trainer.objective import LOSS, Objective


class Policy:
    """Log-probabilities that are parameters themselves; counts how often it was asked."""

    def __init__(self, tokens: int) -> None:
        draw = torch.Generator().manual_seed(0)
        self.logprobs_T = (-torch.rand(tokens, generator=draw)).requires_grad_()
        self.reference_T = -torch.rand(tokens, generator=draw)
        self.passes: list[str] = []

    def measure(self, microbatches, columns):
        self.passes += sorted(columns)
        known = {"logprobs_T": self.logprobs_T.detach().clone(), "reference_logprobs_T": self.reference_T}
        return [{name: known[name] for name in columns} for _ in microbatches]


def microbatch(tokens: int = 6) -> MicroBatch:
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
            lag_T=torch.zeros(tokens, dtype=torch.int64),
        ),
    )


def gradient(objective: Objective, policy: Policy) -> tuple[float, torch.Tensor]:
    (filled,) = objective.fill(policy, (microbatch(),))
    policy.logprobs_T.grad = None
    sums = objective.loss(Counts(tokens=6, sequences=2))(filled, policy.logprobs_T, torch.zeros(6))
    sums.loss.backward()
    return sums.metrics[LOSS], policy.logprobs_T.grad


@pytest.mark.parametrize("loss", ["ppo_clip", "reinforce"])
@pytest.mark.parametrize("correction", [Choice(name="truncate", cap=1.1), Choice(name="mask"), Choice(name="none")])
def test_one_step_per_batch_needs_no_pass_for_the_proximal_policy(loss, correction):
    config = AlgorithmConfig(policy_loss=Choice(name=loss), correction=correction)
    quick = Objective.build(config, BatchConfig())
    policy = Policy(6)
    value, gradient_T = gradient(quick, policy)
    assert policy.passes == []
    expected, expected_T = gradient(replace(quick, one_step=False), policy)
    assert policy.passes == ["logprobs_T"]
    assert value == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(gradient_T, expected_T)


def test_several_steps_anchor_the_ratio_at_the_start_of_the_batch():
    objective = Objective.build(AlgorithmConfig(correction=Choice(name="none")), BatchConfig(epochs=2))
    policy = Policy(6)
    (filled,) = objective.fill(policy, (microbatch(),))
    with torch.no_grad():
        policy.logprobs_T += 0.1
    sums = objective.loss(Counts(tokens=6, sequences=2))(filled, policy.logprobs_T, torch.zeros(6))
    assert sums.metrics["policy/ratio"] == pytest.approx(6 * 1.10517, rel=1e-4)


def test_bypass_compares_with_the_behaviour_policy_and_corrects_nothing():
    objective = Objective.build(AlgorithmConfig(proximal="behaviour"), BatchConfig())
    policy = Policy(6)
    (filled,) = objective.fill(policy, (microbatch(),))
    assert policy.passes == []
    assert filled.tokens.weights_T is None and filled.tokens.proximal_logprobs_T is None


def test_the_penalty_pulls_towards_the_reference():
    config = AlgorithmConfig(kl=KLConfig(coefficient=0.5), policy_loss=Choice(name="reinforce"), correction=Choice(name="none"))
    objective = Objective.build(config, BatchConfig())
    policy = Policy(6)
    _, with_penalty_T = gradient(objective, policy)
    _, without_T = gradient(replace(objective, kl_coefficient=0.0), policy)
    # d/dx of k3 = exp(ref - x) - (ref - x) - 1 is 1 - exp(ref - x), weighted and averaged over 6 tokens
    expected_T = 0.5 * (1 - (policy.reference_T - policy.logprobs_T.detach()).exp()) / 6
    torch.testing.assert_close(with_penalty_T - without_T, expected_T, atol=1e-6, rtol=1e-5)


def test_the_entropy_bonus_has_a_gradient():
    objective = Objective.build(AlgorithmConfig(entropy=EntropyConfig(coefficient=0.3)), BatchConfig())
    policy = Policy(6)
    (filled,) = objective.fill(policy, (microbatch(),))
    entropy_T = torch.ones(6, requires_grad=True)
    objective.loss(Counts(tokens=6, sequences=2))(filled, policy.logprobs_T, entropy_T).loss.backward()
    torch.testing.assert_close(entropy_T.grad, torch.full((6,), -0.3 / 6))


@pytest.mark.parametrize("loss", ["ppo_clip", "reinforce", "gspo", "cispo"])
def test_on_policy_the_decoupled_objective_is_the_synchronous_one(loss):
    policy = Policy(6)
    (batch,) = (microbatch(),)
    on_policy = replace(batch, tokens=replace(batch.tokens, behaviour_logprobs_T=policy.logprobs_T.detach()))
    results = []
    for proximal in ("recompute", "behaviour"):
        config = AlgorithmConfig(policy_loss=Choice(name=loss), proximal=proximal)
        objective = Objective.build(config, BatchConfig())
        (filled,) = objective.fill(policy, (on_policy,))
        policy.logprobs_T.grad = None
        sums = objective.loss(Counts(tokens=6, sequences=2))(filled, policy.logprobs_T, torch.zeros(6))
        sums.loss.backward()
        results.append((sums.metrics[LOSS], policy.logprobs_T.grad))
    (decoupled, decoupled_T), (synchronous, synchronous_T) = results
    assert decoupled == pytest.approx(synchronous, abs=1e-6)
    torch.testing.assert_close(decoupled_T, synchronous_T, atol=1e-6, rtol=0)
    if loss != "gspo":
        torch.testing.assert_close(decoupled_T, -batch.tokens.advantages_T / 6, atol=1e-6, rtol=0)
