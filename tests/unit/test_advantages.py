"""Every advantage estimator against its formula written out in plain floats, and against its invariants."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algo.corrections import log_linear
from asyncrl.algo.group_rewards import GroupRewards
from asyncrl.algo.token_advantages import value_targets
from asyncrl.algo.tokens import log_ratio
from asyncrl.config import registry
from asyncrl.errors import ConfigError, ShapeError
from tests.support.algo_cases import make_rewards


class Rollout(NamedTuple):
    """One sequence as floats."""

    reward: float
    token_rewards: list[float]
    parts: Mapping[str, float]
    values: list[float]
    probs: list[float]
    squares: list[float]
    greedy: float
    behaviour: list[float]
    truncated: bool
    expected: float

    @property
    def total(self) -> float:
        return self.reward + sum(self.token_rewards)

    @property
    def length(self) -> int:
        return len(self.values)

    @property
    def rewards(self) -> list[float]:
        """Per token, the sequence's own at the last one."""
        return [r + (self.reward if t == self.length - 1 else 0.0) for t, r in enumerate(self.token_rewards)]


Groups = list[list[Rollout]]
Advantages = list[list[list[float]]]
"""[group][sequence][token]"""


def unpack(rewards: GroupRewards) -> Groups:
    groups: Groups = [[] for _ in range(rewards.num_groups)]
    for s, (group, reward) in enumerate(
        zip(rewards.group_S.tolist(), rewards.rewards_S.tolist(), strict=True)
    ):
        tokens = (rewards.sequence_T == s).nonzero().flatten().tolist()

        def column(column_T: torch.Tensor | None, tokens: list[int] = tokens) -> list[float]:
            return [0.0 if column_T is None else column_T[t].item() for t in tokens]

        groups[group].append(
            Rollout(
                reward,
                column(rewards.token_rewards_T),
                {name: part[s].item() for name, part in rewards.parts.items()},
                column(rewards.values_T),
                [math.exp(x) for x in column(rewards.logprobs_T)],
                column(rewards.sum_squared_probs_T),
                rewards.greedy_rewards_group[group].item(),
                column(rewards.behaviour_logprobs_T),
                rewards.truncated_S is not None and bool(rewards.truncated_S[s]),
                rewards.expected_S[s].item(),
            )
        )
    return groups


def per_sequence(groups: Groups, scalar: Callable[[list[Rollout], Rollout], float]) -> Advantages:
    return [[[scalar(group, rollout)] * rollout.length for rollout in group] for group in groups]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def std(values: list[float], ddof: int = 1) -> float:
    if len(values) == 1:
        return 0.0
    return statistics.stdev(values) if ddof == 1 else statistics.pstdev(values)


def totals(group: list[Rollout]) -> list[float]:
    return [rollout.total for rollout in group]


def whitened(advantages: Advantages, counted: Callable[[int], bool] = lambda group: True) -> Advantages:
    flat = [x for g, group in enumerate(advantages) if counted(g) for row in group for x in row]
    if not flat:
        return [[[0.0] * len(row) for row in group] for group in advantages]
    scale = math.sqrt(std(flat) ** 2 + 1e-8)
    return [
        [[(x - mean(flat)) / scale if counted(g) else 0.0 for x in row] for row in group]
        for g, group in enumerate(advantages)
    ]


def reinforce(groups: Groups) -> Advantages:
    return per_sequence(groups, lambda group, r: r.total)


def grpo(groups: Groups, scale: str = "group", std_eps: float = 1e-6, ddof: int = 1) -> Advantages:
    everything = [rollout.total for group in groups for rollout in group]

    def scalar(group: list[Rollout], r: Rollout) -> float:
        centred = r.total - mean(totals(group))
        if scale == "none":
            return centred
        spread = std(totals(group), ddof) if scale == "group" else std(everything, ddof)
        return 0.0 if len(group) == 1 else centred / (spread + std_eps)

    return per_sequence(groups, scalar)


def dr_grpo(groups: Groups) -> Advantages:
    return grpo(groups, "none")


def lite_ppo(groups: Groups, std_eps: float = 1e-6) -> Advantages:
    return grpo(groups, "batch", std_eps)


def rloo(groups: Groups, normalise: bool = False, std_eps: float = 1e-4) -> Advantages:
    def scalar(group: list[Rollout], r: Rollout) -> float:
        others = [other.total for other in group if other is not r]
        return r.total - mean(others) if others else 0.0

    everything = [scalar(group, r) for group in groups for r in group]
    scale = std(everything) + std_eps if normalise else 1.0
    return per_sequence(
        groups, lambda group, r: (scalar(group, r) - (mean(everything) if normalise else 0.0)) / scale
    )


def spo(groups: Groups, decay: float = 0.9) -> Advantages:
    """The tracker alone reads `decay`."""
    gains = [rollout.total - rollout.expected for group in groups for rollout in group]
    scale = math.sqrt(std(gains) ** 2 + 1e-8)
    return per_sequence(groups, lambda group, r: (r.total - r.expected - mean(gains)) / scale)


def opo(groups: Groups) -> Advantages:
    def scalar(group: list[Rollout], r: Rollout) -> float:
        return r.total - sum(o.length * o.total for o in group) / sum(o.length for o in group)

    return per_sequence(groups, lambda group, r: scalar(group, r) if r.length else 0.0)


def gpg(groups: Groups) -> Advantages:
    sequences = sum(len(group) for group in groups)
    informative = sum(len(group) for group in groups if len(set(totals(group))) > 1)
    return per_sequence(
        groups, lambda group, r: sequences / max(informative, 1) * (r.total - mean(totals(group)))
    )


def grpo_passk(groups: Groups, scale: str = "group", std_eps: float = 1e-6) -> Advantages:
    def scalar(group: list[Rollout], r: Rollout) -> float:
        ranked = sorted(totals(group), reverse=True)
        if len(ranked) == 1 or r.total != ranked[0]:
            return 0.0
        gain = ranked[0] - ranked[1]
        return gain / (std(ranked) + std_eps) if scale == "group" else gain

    return per_sequence(groups, scalar)


def maxrl(groups: Groups, mean_eps: float = 1e-6) -> Advantages:
    def scalar(group: list[Rollout], r: Rollout) -> float:
        centre = mean(totals(group))
        return (r.total - centre) / (centre + mean_eps) if centre > 0 else 0.0

    return per_sequence(groups, scalar)


def gdpo(groups: Groups, weights: Mapping[str, float] | None = None, std_eps: float = 1e-6) -> Advantages:
    weights = weights or {"right": 1.0, "short": 1.0}

    def scalar(group: list[Rollout], r: Rollout) -> float:
        total = 0.0
        for name, weight in weights.items():
            part = [other.parts[name] for other in group]
            total += weight * (r.parts[name] - mean(part)) / (std(part) + std_eps)
        return total

    return whitened(per_sequence(groups, scalar), lambda g: len(groups[g]) > 1)


def reinforce_plus_plus_baseline(groups: Groups) -> Advantages:
    return whitened(dr_grpo(groups), lambda g: len(groups[g]) > 1)


def returns(rollout: Rollout, gamma: float) -> list[float]:
    return [
        sum(gamma ** (k - t) * rollout.rewards[k] for k in range(t, rollout.length))
        for t in range(rollout.length)
    ]


def reinforce_plus_plus(groups: Groups, gamma: float = 1.0) -> Advantages:
    return whitened([[returns(rollout, gamma) for rollout in group] for group in groups])


def remax(groups: Groups) -> Advantages:
    return [[[g - rollout.greedy for g in returns(rollout, 1.0)] for rollout in group] for group in groups]


def gae(
    groups: Groups,
    gamma: float = 1.0,
    gae_lambda: float = 1.0,
    whitened_: bool = True,
    length_alpha: float | None = None,
    bootstrap: bool = False,
    critic_lambda: float | None = None,
) -> Advantages:
    def row(r: Rollout) -> list[float]:
        decay = (
            gae_lambda
            if length_alpha is None
            else max(0.0, 1 - 1 / (length_alpha * r.length))
            if r.length
            else 0.0
        )
        following = [*r.values[1:], r.values[-1] if bootstrap and r.truncated and r.values else 0.0]
        deltas = [r.rewards[t] + gamma * following[t] - r.values[t] for t in range(r.length)]
        return [
            sum((gamma * decay) ** (k - t) * deltas[k] for k in range(t, r.length)) for t in range(r.length)
        ]

    found = [[row(rollout) for rollout in group] for group in groups]
    return whitened(found) if whitened_ else found


def optimal_token_baseline(
    groups: Groups, zero_tail: bool = True, weight_cap: float | None = None
) -> Advantages:
    def norm(r: Rollout, k: int) -> float:
        weight = 1.0 if weight_cap is None else min(r.probs[k] / math.exp(r.behaviour[k]), weight_cap)
        return weight**2 * (1 - 2 * r.probs[k] + r.squares[k])

    found: Advantages = []
    for group in groups:
        norms = [[sum(norm(r, k) for k in range(t + 1)) for t in range(r.length)] for r in group]
        gains = [returns(r, 1.0) for r in group]
        found.append([])
        for i, r in enumerate(group):
            row = []
            for t in range(r.length):
                alive = [j for j, other in enumerate(group) if other.length > t]
                baseline = sum(norms[j][t] * gains[j][t] for j in alive) / (
                    sum(norms[j][t] for j in alive) + 1e-8
                )
                if zero_tail and len(alive) == 1:
                    baseline = 0.0
                row.append(gains[i][t] - baseline if len(group) > 1 else 0.0)
            found[-1].append(row)
    return found


CASES: list[tuple[str, Callable[..., Advantages], dict[str, Any]]] = [
    ("reinforce", reinforce, {}),
    ("grpo", grpo, {}),
    ("grpo", grpo, {"ddof": 0, "std_eps": 0.1}),
    ("grpo", grpo, {"scale": "batch", "std_eps": 0.1}),
    ("grpo", grpo, {"scale": "batch", "ddof": 0}),
    ("grpo", grpo, {"scale": "none"}),
    ("dr_grpo", dr_grpo, {}),
    ("lite_ppo", lite_ppo, {"std_eps": 1e-4}),
    ("rloo", rloo, {}),
    ("opo", opo, {}),
    ("spo", spo, {}),
    ("spo", spo, {"decay": 0.5}),
    ("gpg", gpg, {}),
    ("grpo_passk", grpo_passk, {}),
    ("grpo_passk", grpo_passk, {"scale": "none"}),
    ("maxrl", maxrl, {}),
    ("gdpo", gdpo, {}),
    ("gdpo", gdpo, {"weights": {"right": 2.0}}),
    ("gdpo", gdpo, {"weights": {"right": 2.0, "short": 0.5}}),
    ("reinforce_plus_plus_baseline", reinforce_plus_plus_baseline, {}),
    ("reinforce_plus_plus", reinforce_plus_plus, {}),
    ("reinforce_plus_plus", reinforce_plus_plus, {"gamma": 0.7}),
    ("remax", remax, {}),
    ("gae", gae, {}),
    ("gae", gae, {"gamma": 0.9, "gae_lambda": 0.6}),
    ("gae", gae, {"gamma": 0.9, "gae_lambda": 0.6, "whitened": False}),
    ("optimal_token_baseline", optimal_token_baseline, {}),
    ("optimal_token_baseline", optimal_token_baseline, {"zero_tail": False}),
    ("optimal_token_baseline", optimal_token_baseline, {"weight_cap": 1.2}),
    ("rloo", rloo, {"normalise": True}),
    ("rloo", rloo, {"normalise": True, "std_eps": 0.5}),
    ("gae", gae, {"gamma": 0.9, "gae_lambda": 0.6, "bootstrap": True, "whitened": False}),
    ("gae", gae, {"gamma": 0.9, "length_alpha": 0.7, "whitened": False}),
    ("gae", gae, {"gae_lambda": 0.5, "critic_lambda": 1.0, "whitened": False}),
]
IDS = [f"{name}-{params}" for name, _, params in CASES]
NO_SINGLETON_RULE = {"reinforce", "reinforce_plus_plus", "remax", "gae", "turn_gae", "distill", "spo"}
"""Estimators that compare with something else than the group."""


def estimate(name: str, rewards: GroupRewards, params: Mapping[str, Any] | None = None) -> torch.Tensor:
    return registry.resolve("advantage", name, params or {})(rewards)


@pytest.mark.parametrize(("name", "oracle", "params"), CASES, ids=IDS)
@given(seed=st.integers(0, 10_000), token_rewards=st.booleans())
def test_advantage_is_the_formula_written_out(name, oracle, params, seed, token_rewards):
    rewards = make_rewards(seed, token_rewards=token_rewards and name != "gdpo")
    advantages_T = estimate(name, rewards, params)
    renamed = {"whitened_" if key == "whitened" else key: value for key, value in params.items()}
    expected = [x for group in oracle(unpack(rewards), **renamed) for row in group for x in row]
    assert advantages_T.dtype == torch.float32
    assert advantages_T.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("name", sorted(set(registry.names("advantage")) - NO_SINGLETON_RULE))
def test_a_group_of_one_has_advantage_exactly_zero(name):
    rewards = make_rewards(3, sizes=[1, 4, 1])
    alone_T = torch.bincount(rewards.group_S)[rewards.group_S][rewards.sequence_T] == 1
    assert alone_T.any()
    assert estimate(name, rewards)[alone_T].abs().max() == 0.0


@pytest.mark.parametrize(
    "name",
    ["grpo", "dr_grpo", "lite_ppo", "rloo", "opo", "gpg", "maxrl", "grpo_passk", *sorted(registry.ON_PAIRS)],
)
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e6, 0.7])
def test_a_group_of_equal_rewards_has_advantage_exactly_zero(name, reward):
    rewards = make_rewards(5, sizes=[3, 5, 2])
    flat = dataclasses.replace(rewards, rewards_S=torch.full_like(rewards.rewards_S, reward))
    assert estimate(name, flat).abs().max() == 0.0


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "gpg", "lite_ppo", "grpo_passk"])
def test_a_constant_added_to_all_rewards_changes_nothing(name):
    rewards = make_rewards(11, sizes=[4, 3])
    shifted = dataclasses.replace(rewards, rewards_S=rewards.rewards_S + 256.0)
    torch.testing.assert_close(estimate(name, shifted), estimate(name, rewards), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", registry.names("advantage"))
def test_permuting_the_sequences_of_a_group_permutes_the_advantages(name):
    rewards = make_rewards(12, sizes=[3, 4])
    order_S = torch.tensor([2, 0, 1, 6, 4, 3, 5])
    order_T = torch.cat([torch.where(rewards.sequence_T == s)[0] for s in order_S])
    columns = {
        field.name: column[order_S if field.name.endswith("_S") else order_T]
        for field in dataclasses.fields(rewards)
        if field.name[-2:] in ("_S", "_T") and (column := getattr(rewards, field.name)) is not None
    }
    columns["sequence_T"] = torch.repeat_interleave(torch.arange(7), rewards.lengths_S[order_S])
    order_K = torch.cat([torch.where(rewards.episode_K == s)[0] for s in order_S])
    columns["episode_K"] = order_S.argsort()[rewards.episode_K[order_K]]
    columns["turn_T"] = order_K.argsort()[rewards.turn_T[order_T]]
    columns |= {name: getattr(rewards, name)[order_K] for name in ("turn_rewards_K", "turn_states_K")}
    parts = {key: part[order_S] for key, part in rewards.parts.items()}
    permuted = dataclasses.replace(rewards, **columns, parts=parts)
    torch.testing.assert_close(
        estimate(name, permuted), estimate(name, rewards)[order_T], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("name", registry.names("advantage"))
def test_a_batch_without_tokens_has_no_advantages(name):
    rewards = make_rewards(1, sizes=[2, 1])
    empty = {
        field.name: getattr(rewards, field.name)[:0]
        for field in dataclasses.fields(rewards)
        if field.name.endswith("_T") and getattr(rewards, field.name) is not None
    }
    rewards = dataclasses.replace(rewards, lengths_S=torch.zeros(3, dtype=torch.int64), **empty)
    assert estimate(name, rewards).shape == (0,)


def test_a_response_without_tokens_still_counts_for_the_baseline():
    rewards = GroupRewards(
        rewards_S=torch.tensor([1.0, 0.0]),
        group_S=torch.tensor([0, 0]),
        num_groups=1,
        lengths_S=torch.tensor([1, 0]),
        sequence_T=torch.tensor([0]),
    )
    assert estimate("dr_grpo", rewards).tolist() == [0.5]


def test_small_differences_of_large_rewards_survive():
    rewards = dataclasses.replace(
        make_rewards(2, sizes=[4]),
        rewards_S=torch.tensor([4096.0, 4096.5, 4096.0, 4096.5]),
        lengths_S=torch.ones(4, dtype=torch.int64),
        sequence_T=torch.arange(4),
        **dict.fromkeys(["values_T", "logprobs_T", "behaviour_logprobs_T", "reference_logprobs_T"]),
        **dict.fromkeys(["sum_squared_probs_T", "turn_T"]),
    )
    s = math.sqrt(0.75)
    assert estimate("grpo", rewards).tolist() == pytest.approx([-s, s, -s, s], rel=1e-4)


def test_value_targets_are_advantage_plus_value():
    rewards = make_rewards(21, sizes=[3, 2], token_rewards=True)
    raw_T = estimate("gae", rewards, {"gamma": 0.9, "gae_lambda": 0.5, "whitened": False})
    targets_T = value_targets(rewards, gamma=0.9, gae_lambda=0.5)
    torch.testing.assert_close(targets_T, raw_T + rewards.values_T)


@pytest.mark.parametrize(
    "params", [{"length_alpha": 0.7}, {"length_alpha": 0.7, "critic_lambda": 0.9}, {"critic_lambda": 0.3}]
)
@pytest.mark.parametrize("bootstrap", [True, False])
def test_value_targets_have_the_lambda_of_the_critic(params, bootstrap):
    """The critic's own lambda: its returns are a plain GAE's with it; without one, the advantages'."""
    rewards = make_rewards(23, sizes=[3, 2, 4])
    targets_T = value_targets(rewards, gamma=0.9, gae_lambda=0.5, bootstrap=bootstrap, **params)
    own = (
        {"gae_lambda": params["critic_lambda"]}
        if "critic_lambda" in params
        else {"gae_lambda": 0.5, **params}
    )
    raw_T = estimate("gae", rewards, {"gamma": 0.9, **own, "bootstrap": bootstrap, "whitened": False})
    torch.testing.assert_close(targets_T, raw_T + rewards.values_T)


def test_a_short_answer_has_lambda_zero_and_a_long_one_nearly_one():
    """VAPO's alpha of 0.05: up to 20 tokens one step ahead, at 2,000 lambda is 0.99."""
    lengths = torch.tensor([15, 2000])
    rewards = GroupRewards(
        rewards_S=torch.tensor([1.0, 1.0]),
        group_S=torch.tensor([0, 1]),
        num_groups=2,
        lengths_S=lengths,
        sequence_T=torch.repeat_interleave(torch.arange(2), lengths),
        values_T=torch.zeros(2015),
    )
    raw_T = estimate("gae", rewards, {"length_alpha": 0.05, "whitened": False})
    assert raw_T[:15].tolist() == [0.0] * 14 + [1.0]
    assert raw_T[15:].tolist()[::-1] == pytest.approx([0.99**k for k in range(2000)], abs=1e-6)


def test_gae_with_lambda_one_is_the_return_minus_the_value():
    rewards = make_rewards(22, sizes=[3, 2])
    raw_T = estimate("gae", rewards, {"whitened": False})
    torch.testing.assert_close(raw_T, rewards.rewards_S[rewards.sequence_T] - rewards.values_T)


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("gae", "values_T"),
        ("gae", "truncated_S"),
        ("remax", "greedy_rewards_group"),
        ("spo", "expected_S"),
        ("optimal_token_baseline", "logprobs_T"),
        ("optimal_token_baseline", "sum_squared_probs_T"),
        ("turn_rloo", "turn_rewards_K"),
        ("turn_rloo", "turn_T"),
        ("gigpo", "turn_states_K"),
        ("mt_grpo", "turn_rewards_K"),
        ("turn_gae", "values_T"),
        ("turn_gae", "turn_rewards_K"),
        ("dpo_pairs", "logprobs_T"),
        ("ipo_pairs", "reference_logprobs_T"),
        ("kto", "reference_logprobs_T"),
        ("distill", "logprobs_T"),
    ],
)
def test_a_missing_column_is_named(name, column):
    with pytest.raises(ConfigError, match=column):
        params = {"bootstrap": True} if column == "truncated_S" else {}
        estimate(name, dataclasses.replace(make_rewards(1), **{column: None}), params)


def test_gdpo_gives_nothing_to_an_answer_without_the_part_and_compares_the_others():
    """Group 0: one of four abstains from `short`; group 1: all do, so that only `right` counts."""
    rewards = dataclasses.replace(
        make_rewards(1, sizes=[4, 2]),
        lengths_S=torch.ones(6, dtype=torch.int64),
        sequence_T=torch.arange(6),
        parts={
            "right": torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 1.0]),
            "short": torch.tensor([8.0, 9.0, 10.0, math.nan, math.nan, math.nan]),
        },
        **dict.fromkeys(
            (
                one.name
                for one in dataclasses.fields(GroupRewards)
                if one.name[-2:] in ("_T", "_K") and one.name != "sequence_T"
            ),
            None,
        ),
    )
    half = math.sqrt(0.5)
    expected = torch.tensor([-1.0, 0.0, 1.0, 0.0, -half, half])
    found = estimate("gdpo", rewards)
    torch.testing.assert_close(found / found[2], expected, rtol=1e-4, atol=1e-6)


def test_gdpo_names_parts_that_do_not_exist_and_refuses_token_rewards():
    with pytest.raises(ConfigError, match=r"'wrong'.*'right', 'short'"):
        estimate("gdpo", make_rewards(1), {"weights": {"wrong": 1.0}})
    with pytest.raises(ConfigError, match=r"\[\]"):
        estimate("gdpo", dataclasses.replace(make_rewards(1), parts={}))
    with pytest.raises(ConfigError, match="placement to loss"):
        estimate("gdpo", make_rewards(1, token_rewards=True))


@pytest.mark.parametrize(
    "column",
    [
        "group_S",
        "lengths_S",
        "values_T",
        "greedy_rewards_group",
        "parts",
        "turn_T",
        "turn_rewards_K",
        "turn_states_K",
    ],
)
def test_columns_of_the_wrong_shape_are_named(column):
    rewards = make_rewards(4, sizes=[2, 3])
    wrong = {"right": torch.zeros(9)} if column == "parts" else torch.zeros(99)
    with pytest.raises(ShapeError, match=column):
        dataclasses.replace(rewards, **{column: wrong})


def test_log_linear_proximal_lies_one_version_behind():
    behaviour_T = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    logprobs_T = torch.tensor([-3.0, -3.0, -3.0, -3.0], requires_grad=True)
    proximal_T = log_linear(behaviour_T, logprobs_T, torch.tensor([0, 1, 2, 4]))
    assert proximal_T.tolist() == pytest.approx([-1.0, -1.0, -2.0, -2.5])
    assert not proximal_T.requires_grad


@pytest.mark.parametrize("behaviour", [math.inf, -math.inf, 100.0, -100.0])
def test_log_linear_proximal_is_finite_for_any_behaviour(behaviour):
    """Its ratios to both ends are, too, at every lag: no NaN reaches a loss."""
    behaviour_T, logprobs_T = torch.full((4,), behaviour), torch.full((4,), -3.0)
    proximal_T = log_linear(behaviour_T, logprobs_T, torch.tensor([0, 1, 2, 40]))
    far = math.copysign(20.0, behaviour)
    assert proximal_T.tolist() == pytest.approx([-3.0 + far, -3.0 + far, -3.0 + far / 2, -3.0 + far / 40])
    assert log_ratio(proximal_T, behaviour_T).isfinite().all()


def test_every_registered_advantage_is_tested_here():
    """Those of turns and of preferences have test files of their own."""
    elsewhere = {
        name
        for name, place in registry.TABLES["advantage"].items()
        if place.startswith(("turn_advantages:", "preferences:"))
    }
    assert {name for name, _, _ in CASES} == set(registry.names("advantage")) - elsewhere
