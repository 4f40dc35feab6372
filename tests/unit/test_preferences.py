"""The advantages of preferences: the gradient of the step is that of the objective, written out and
differentiated by torch, for every packing, any number of ranks and episodes of several rollouts."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import logsigmoid

from asyncrl.algo.aggregation import Counts
from asyncrl.algo.group_rewards import GroupRewards
from asyncrl.algo.preferences import preference_metrics
from asyncrl.algo.tokens import TokenBatch
from asyncrl.batch.resolve import make_recipe
from asyncrl.columns import KEPT_COUNTS, KEPT_IDS
from asyncrl.config import registry
from asyncrl.config.algorithm import AlgorithmConfig, CriticConfig
from asyncrl.config.sections import BatchConfig
from asyncrl.trainer.base import MicroBatch
from asyncrl.types import Group, Rollout
from tests.support.algo_cases import make_rewards
from tests.support.fake_learner import SETTINGS, Batch, known

OBJECTIVES: list[tuple[str, dict[str, Any]]] = [
    ("dpo_pairs", {}),
    ("dpo_pairs", {"beta": 0.7, "pairs": "all"}),
    ("dpo_pairs", {"pairs": "all", "margin": 0.4}),
    ("dpo_pairs", {"margin": 0.4}),
    ("ipo_pairs", {"beta": 0.3}),
    ("kto", {"beta": 0.5}),
    ("kto", {"threshold": 0.4, "undesirable": 1.7}),
    ("best_of_n", {}),
]
IDS = [f"{name}-{params}" for name, params in OBJECTIVES]


class Episode:
    """An episode of a group: its reward, and its log-probabilities as sums that torch differentiates."""

    def __init__(self, reward: float, tokens: int, logprob: Tensor, reference: float) -> None:
        self.reward, self.tokens, self.logprob, self.h = reward, tokens, logprob, logprob - reference


def pairs(
    group: Sequence[Episode], kind: str = "best_worst", margin: float = 0.0
) -> list[tuple[Episode, Episode]]:
    group = [one for one in group if one.tokens]
    rewards = [one.reward for one in group]
    return [
        (one, other)
        for one in group
        for other in group
        if one.reward - other.reward > margin
        and (kind == "all" or (one.reward == max(rewards) and other.reward == min(rewards)))
    ]


def objective(name: str, params: dict[str, Any], groups: Sequence[Sequence[Episode]]) -> Tensor:
    """What the step minimises, in words of the papers."""
    beta = params.get("beta", 0.1)
    if name == "kto":
        everyone = [one for group in groups for one in group if one.tokens]
        z = beta * max(0.0, sum(float(one.h.detach()) for one in everyone) / max(1, len(everyone)))
        losses = []
        for group in groups:
            mean = sum(one.reward for one in group) / len(group)
            limit = params.get("threshold", mean)
            for one in group:
                if one.tokens and one.reward > limit:
                    losses.append(1 - torch.sigmoid(beta * one.h - z))
                elif one.tokens and ("threshold" in params or one.reward < limit):
                    losses.append(params.get("undesirable", 1.0) * (1 - torch.sigmoid(z - beta * one.h)))
        return sum(losses, torch.tensor(0.0)) / max(1, len(losses))
    means = []
    for group in groups:
        found = pairs(group, params.get("pairs", "best_worst"), params.get("margin", 0.0))
        if name == "dpo_pairs":
            losses = [-logsigmoid(beta * (one.h - other.h)) for one, other in found]
        elif name == "ipo_pairs":
            losses = [(one.h - other.h - 1 / (2 * beta)) ** 2 for one, other in found]
        else:
            losses = [-one.logprob for one, _ in found]
        if losses:
            means.append(sum(losses, torch.tensor(0.0)) / len(losses))
    return sum(means, torch.tensor(0.0)) / max(1, len(means))


class Exact(GroupRewards):
    """Advantages in float64: the identity without the rounding of the column that carries them."""

    def per_token(self, values_S: Tensor) -> Tensor:
        return values_S[self.sequence_T]


@pytest.mark.parametrize(("name", "params"), OBJECTIVES, ids=IDS)
@given(seed=st.integers(0, 10_000))
def test_the_gradient_is_that_of_the_objective_to_the_last_digit(name, params, seed):
    made = make_rewards(seed)
    assert made.logprobs_T is not None and made.reference_logprobs_T is not None
    logprobs_T = made.logprobs_T.double().requires_grad_()
    columns = {one.name: getattr(made, one.name) for one in dataclasses.fields(made)}
    rewards = Exact(**columns | {"logprobs_T": logprobs_T.detach()})
    batch = TokenBatch(
        sequence_T=made.sequence_T,
        num_sequences=made.num_sequences,
        behaviour_logprobs_T=logprobs_T.detach(),
        advantages_T=registry.resolve("advantage", name, params)(rewards),
    )
    losses_T = registry.resolve("policy_loss", "reinforce", {})(batch, logprobs_T).losses_T
    loss = registry.resolve("aggregation", "seq-mean-token-sum", {})(losses_T, batch, Counts.of(batch))
    (gradient,) = torch.autograd.grad(loss, logprobs_T)

    groups: list[list[Episode]] = [[] for _ in range(made.num_groups)]
    for s, (g, reward) in enumerate(zip(made.group_S.tolist(), made.rewards_S.tolist(), strict=True)):
        own_T = made.sequence_T == s
        reference = made.reference_logprobs_T.double()[own_T].sum()
        groups[g].append(Episode(reward, int(own_T.sum()), logprobs_T[own_T].sum(), float(reference)))
    wanted = objective(name, params, groups)
    expected = (
        torch.autograd.grad(wanted, logprobs_T)[0] if wanted.requires_grad else torch.zeros_like(gradient)
    )
    torch.testing.assert_close(gradient, expected, rtol=1e-14, atol=1e-14)


def ragged() -> list[Group]:
    """Ties, an equal group, a group of one, tool tokens, episodes of two rollouts, one without an action."""
    batch = Batch()

    def episodes(*found: tuple[float, Sequence[int]], tools: Sequence[int] = ()) -> None:
        rollouts = [
            batch.rollout(reward, [5] * tokens, tools=tools if tokens > 4 else ())
            for reward, lengths in found
            for tokens in lengths
        ]
        batch.group(*rollouts)
        of = np.repeat(np.arange(len(found)), [len(lengths) for _, lengths in found]).astype(np.int32)
        batch.groups[-1] = dataclasses.replace(batch.groups[-1], episode_of=of)

    episodes((1.0, [3, 2]), (0.0, [5]), (1.0, [2]), (0.25, [4, 1, 3]), tools=[0, 2])
    episodes((0.5, [3]), (0.5, [1, 1]))
    episodes((0.7, [6]), tools=[1])
    episodes((0.1, [2]), (0.9, [4]), (0.3, [3]), (0.1, [1]), (0.6, [2, 2]))
    silent = batch.rollout(2.0, [5, 5], tools=[0, 1])
    batch.group(silent, batch.rollout(1.0, [5, 1]), batch.rollout(0.0, [0, 5, 5]))
    return batch.groups


@pytest.mark.parametrize(("name", "params"), OBJECTIVES, ids=IDS)
@pytest.mark.parametrize(("ranks", "budget_tokens"), [(1, 1000), (1, 10), (2, 24), (3, 10)])
def test_the_gradient_is_the_same_for_any_ranks_and_packing(name, params, ranks, budget_tokens):
    groups = ragged()
    everything = [rollout for group in groups for rollout in group.rollouts]
    size = max(int(rollout.response_ids.max()) for rollout in everything) + 1
    policy = torch.tensor([known("logprobs_T", token) for token in range(size)]).double().requires_grad_()
    total = torch.zeros(size, dtype=torch.float64)
    for rank in range(ranks):
        recipe = make_recipe(
            AlgorithmConfig(
                advantage={"name": name, **params},
                policy_loss="reinforce",
                correction="none",
                aggregation="seq-mean-token-sum",
            ),
            BatchConfig(groups=len(groups)),
            CriticConfig(),
            dataclasses.replace(
                SETTINGS, mask_stale=False, tokens_per_microbatch=budget_tokens, share=rank, shares=ranks
            ),
            max_response_tokens=8,
            reward_parts=(),
        )
        samples = recipe.planner.assemble(groups, 5)
        tokens = [int(token) for one in everything for token in one.response_ids[one.action_mask]]
        measured = {
            column: torch.tensor([known(column, token) for token in tokens])
            for column in recipe.planner.columns
        }
        (minibatch,) = recipe.planner.plan(groups, samples, measured, 0.0).minibatches
        loss_of = recipe.objective.loss(minibatch.counts, kl_coefficient=0.0, entropy_coefficient=0.0)
        for microbatch in minibatch.microbatches:
            logprobs_T = policy[microbatch.target_T]
            if logprobs_T.numel():
                loss = loss_of(microbatch, logprobs_T, torch.zeros_like(logprobs_T)).loss
                total += torch.autograd.grad(loss, policy)[0]

    def episode(rollouts: Sequence[Rollout]) -> Episode:
        ids = [int(token) for one in rollouts for token in one.response_ids[one.action_mask]]
        reference = math.fsum(torch.tensor([known("reference_logprobs_T", token) for token in ids]).tolist())
        return Episode(rollouts[0].reward, len(ids), policy[ids].sum(), reference)

    wanted = objective(name, params, [[episode(one) for one in group.by_episode] for group in groups])
    (expected,) = torch.autograd.grad(wanted, policy)
    assert float(expected.abs().max()) > 1e-3
    assert float((total - expected).abs().max()) <= 1e-6


class Tables:
    """A trainer whose models give each token a logit, and log-probabilities among the kept ones."""

    rank = share = 0
    shares = 1

    def __init__(self, size: int) -> None:
        draw = torch.Generator().manual_seed(3)
        policy, reference = torch.randn(2, size, generator=draw, dtype=torch.float64) * 2
        self.logits = {"logprobs_T": policy.requires_grad_(), "reference_logprobs_T": reference}

    def logprob(self, column: str, token: int, kept: Sequence[int]) -> Tensor:
        logits = self.logits[column]
        return logits[token] - logits[list(kept)].logsumexp(0)

    def of(self, column: str, microbatch: MicroBatch) -> Tensor:
        assert microbatch.kept_TK is not None
        sets = [[one for one in kept if one >= 0] for kept in microbatch.kept_TK.tolist()]
        each = zip(microbatch.target_T.tolist(), sets, strict=True)
        return torch.stack([self.logprob(column, token, kept) for token, kept in each])

    def measure(self, microbatches, columns):
        return [{name: self.of(name, one).detach() for name in columns} for one in microbatches]

    def gather(self, value):
        return [value]


def kept_of(token: int, size: int) -> list[int]:
    """The tokens among which one was sampled: another number of them for each."""
    return sorted({token, *((7 * token + step) % size for step in range(token % 4))})


@pytest.mark.parametrize(("name", "params"), OBJECTIVES, ids=IDS)
@pytest.mark.parametrize("budget_tokens", [10, 1000])
def test_sampled_among_a_few_tokens_the_objective_is_of_probabilities_among_these(
    name, params, budget_tokens
):
    """With `sampling.top_k`, `top_p` or `min_p`: in pairs, in the baseline of KTO, and in the gradient."""
    groups = ragged()
    everything = [rollout for group in groups for rollout in group.rollouts]
    size = max(int(rollout.response_ids.max()) for rollout in everything) + 1
    models: Any = Tables(size)

    def with_sets(rollout: Rollout) -> Rollout:
        each = zip(rollout.response_ids.tolist(), rollout.action_mask.tolist(), strict=True)
        sets = [kept_of(token, size) * bool(sampled) for token, sampled in each]
        ids = np.array([one for kept in sets for one in kept], np.int32)
        counts = np.array([len(kept) for kept in sets], np.int32)
        return dataclasses.replace(rollout, recorded={KEPT_COUNTS: counts, KEPT_IDS: ids})

    groups = [dataclasses.replace(group, rollouts=tuple(map(with_sets, group.rollouts))) for group in groups]
    algorithm = {"policy_loss": "reinforce", "correction": "none", "aggregation": "seq-mean-token-sum"}
    recipe = make_recipe(
        AlgorithmConfig(advantage={"name": name, **params}, **algorithm),
        BatchConfig(groups=len(groups)),
        CriticConfig(),
        dataclasses.replace(SETTINGS, mask_stale=False, tokens_per_microbatch=budget_tokens),
        max_response_tokens=8,
        reward_parts=(),
    )
    samples = recipe.planner.assemble(groups, 5)
    measured = recipe.planner.measure(models, samples)
    (minibatch,) = recipe.planner.plan(groups, samples, measured, 0.0).minibatches
    loss_of = recipe.objective.loss(minibatch.counts, kl_coefficient=0.0, entropy_coefficient=0.0)
    policy = models.logits["logprobs_T"]
    total = torch.zeros_like(policy)
    for microbatch in minibatch.microbatches:
        if microbatch.target_T.numel():
            logprobs_T = models.of("logprobs_T", microbatch)
            loss = loss_of(microbatch, logprobs_T, torch.zeros_like(logprobs_T)).loss
            total += torch.autograd.grad(loss, policy)[0]

    def wanted(sets: Callable[[int], list[int]]) -> Tensor:
        def episode(rollouts: Sequence[Rollout]) -> Episode:
            ids = [int(token) for one in rollouts for token in one.response_ids[one.action_mask]]
            logprobs, references = (
                sum((models.logprob(column, token, sets(token)) for token in ids), torch.tensor(0.0))
                for column in models.logits
            )
            return Episode(rollouts[0].reward, len(ids), logprobs, float(references))

        every = [[episode(one) for one in group.by_episode] for group in groups]
        return torch.autograd.grad(objective(name, params, every), policy)[0]

    assert float((total - wanted(lambda token: kept_of(token, size))).abs().max()) <= 1e-5
    assert float((total - wanted(lambda token: list(range(size)))).abs().max()) > 1e-3, "not among all tokens"


def test_distillation_pays_each_token_what_the_teacher_would_give_it_more():
    rewards = make_rewards(7, sizes=[3, 2])
    assert rewards.logprobs_T is not None and rewards.reference_logprobs_T is not None
    expected = []
    for t, s in enumerate(rewards.sequence_T.tolist()):
        group = rewards.rewards_S[rewards.group_S == rewards.group_S[s]].tolist()
        gap = float(rewards.reference_logprobs_T[t]) - float(rewards.logprobs_T[t])
        centred = float(rewards.rewards_S[s]) - sum(group) / len(group)
        expected.append(min(max(gap, -1.0), 1.0) + 0.5 * centred)
    found_T = registry.resolve("advantage", "distill", {"clip": 1.0, "reward": 0.5})(rewards)
    assert found_T.tolist() == pytest.approx(expected, abs=1e-6)


def test_distillation_follows_the_gradient_of_the_reverse_divergence():
    """Over all tokens of a vocabulary, weighted by the policy: minus the gradient of KL(pi || teacher)."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(7, generator=draw, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(7, generator=draw, dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    rewards = dataclasses.replace(
        make_rewards(1, sizes=[7]),
        rewards_S=torch.zeros(7), lengths_S=torch.ones(7, dtype=torch.int64), sequence_T=torch.arange(7),
        logprobs_T=logprobs.detach(), reference_logprobs_T=teacher,
        **dict.fromkeys(["values_T", "behaviour_logprobs_T", "sum_squared_probs_T", "turn_T"]),
    )  # fmt: skip
    advantages = registry.resolve("advantage", "distill", {"clip": 50.0})(rewards)
    (found,) = torch.autograd.grad((logprobs.exp().detach() * advantages * logprobs).sum(), logits)
    kl = (logits.log_softmax(0).exp() * (logits.log_softmax(0) - teacher)).sum()
    (expected,) = torch.autograd.grad(kl, logits)
    torch.testing.assert_close(found, -expected, rtol=1e-5, atol=1e-6)


@given(seed=st.integers(0, 10_000))
def test_metrics_are_means_over_groups_with_a_pair(seed):
    made = make_rewards(seed)
    assert made.logprobs_T is not None and made.reference_logprobs_T is not None
    groups: list[list[Episode]] = [[] for _ in range(made.num_groups)]
    for s, (g, reward) in enumerate(zip(made.group_S.tolist(), made.rewards_S.tolist(), strict=True)):
        own_T = made.sequence_T == s
        logprob, reference = (
            column[own_T].double().sum() for column in (made.logprobs_T, made.reference_logprobs_T)
        )
        groups[g].append(Episode(reward, int(own_T.sum()), logprob, float(reference)))
    found = [paired for group in groups if (paired := pairs(group))]
    metrics = preference_metrics(made)
    assert metrics.pop("preference/pairs") == len(found)

    def mean(value: Any) -> float:
        per_group = [sum(float(value(*pair)) for pair in paired) / len(paired) for paired in found]
        return sum(per_group) / len(per_group)

    assert metrics == pytest.approx(
        {
            "preference/margin": mean(lambda one, other: one.h - other.h),
            "preference/accuracy": mean(lambda one, other: one.h > other.h),
            "preference/chosen_logprob": mean(lambda one, other: one.logprob),
            "preference/rejected_logprob": mean(lambda one, other: other.logprob),
        }
        if found
        else {},
        abs=1e-9,
    )
    assert preference_metrics(dataclasses.replace(made, reference_logprobs_T=None)) == {}


def compared(name: str, rewards: Sequence[float], **params: Any) -> list[float]:
    """The advantages of answers of one token, with log-probabilities equal to those of the reference."""
    count = len(rewards)
    column = torch.full((count,), -1.0)
    given = GroupRewards(
        rewards_S=torch.tensor(rewards),
        group_S=torch.zeros(count, dtype=torch.int64),
        num_groups=1,
        lengths_S=torch.ones(count, dtype=torch.int64),
        sequence_T=torch.arange(count),
        logprobs_T=column,
        reference_logprobs_T=column,
    )
    return registry.resolve("advantage", name, params)(given).tolist()


@pytest.mark.parametrize("rewards", [(0.1, 0.2, 0.3), (0.4, 0.5, 0.6), (0.6, 0.7, 0.8), (1 / 3, 2 / 3, 1.0)])
def test_an_answer_at_the_mean_but_for_rounding_has_no_sign(rewards):
    assert compared("kto", rewards) == pytest.approx([-0.0375, 0.0, 0.0375])


@pytest.mark.parametrize("rewards", [(0.3, 0.2), (1.0, 0.9), (0.6, 0.5), (0.5, 0.4), (0.9, 0.8)])
def test_a_gap_of_the_margin_but_for_rounding_is_no_pair(rewards):
    assert compared("dpo_pairs", rewards, pairs="all", margin=0.1) == [0.0, 0.0]
    assert compared("dpo_pairs", rewards, pairs="all", margin=0.09) != [0.0, 0.0]
