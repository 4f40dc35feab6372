"""Advantages of turns against plain loops, and against the exact gradient of a policy that decides when to stop."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algo.group_rewards import GroupRewards
from asyncrl.algo.turn_advantages import turn_value_targets
from asyncrl.config import registry
from tests.support.algo_cases import make_rewards


class Turn(NamedTuple):
    """One turn as floats; its tokens' rewards and values."""

    reward: float
    state: int
    token_rewards: list[float]
    values: list[float]

    @property
    def with_tokens(self) -> float:
        return self.reward + sum(self.token_rewards)


class Episode(NamedTuple):
    """One sequence."""

    reward: float
    turns: list[Turn]

    @property
    def rest(self) -> float:
        """What no turn was given."""
        return self.reward - sum(turn.reward for turn in self.turns)

    @property
    def total(self) -> float:
        return self.reward + sum(sum(turn.token_rewards) for turn in self.turns)

    def to_come(self, k: int, gamma: float = 1.0) -> float:
        paid = [turn.with_tokens for turn in self.turns]
        paid[-1] += self.rest
        return sum(gamma ** (j - k) * paid[j] for j in range(k, len(paid)))


Group = list[Episode]
Found = list[list[list[float]]]
"""[episode of the batch][turn][token]"""


def unpack(rewards: GroupRewards) -> list[Group]:
    groups: list[Group] = [[] for _ in range(rewards.num_groups)]
    for s, group in enumerate(rewards.group_S.tolist()):
        turns = []
        for k in (rewards.episode_K == s).nonzero().flatten().tolist():
            tokens_T = rewards.turn_T == k
            paid = [] if rewards.token_rewards_T is None else rewards.token_rewards_T[tokens_T].tolist()
            values = rewards.values_T[tokens_T].tolist()
            turns.append(
                Turn(
                    rewards.turn_rewards_K[k].item(),
                    int(rewards.turn_states_K[k]),
                    paid or [0.0] * len(values),
                    values,
                )
            )
        groups[group].append(Episode(rewards.rewards_S[s].item(), turns))
    return groups


def per_turn(groups: list[Group], scalar: Callable[[Group, Episode, int], float]) -> Found:
    return [
        [
            [scalar(group, one, k) if len(group) > 1 else 0.0] * len(turn.values)
            for k, turn in enumerate(one.turns)
        ]
        for group in groups
        for one in group
    ]


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def z_score(value: float, among: list[float], std_eps: float = 1e-6) -> float:
    if len(among) == 1:
        return 0.0
    std = math.sqrt(sum((x - mean(among)) ** 2 for x in among) / (len(among) - 1))
    return (value - mean(among)) / (std + std_eps)


def turn_rloo(groups: list[Group]) -> Found:
    def scalar(group: Group, own: Episode, k: int) -> float:
        others = [one.to_come(k) for one in group if one is not own and len(one.turns) > k]
        return own.to_come(k) - mean(others)

    return per_turn(groups, scalar)


def gigpo(
    groups: list[Group], omega: float = 1.0, gamma: float = 0.95, norm: str = "none", std_eps: float = 1e-6
) -> Found:
    def scalar(group: Group, own: Episode, k: int) -> float:
        same = [
            (one, j)
            for one in group
            for j, turn in enumerate(one.turns)
            if turn.state == own.turns[k].state and (turn.state or (one is own and j == k))
        ]
        if norm == "std":
            episode = z_score(own.total, [one.total for one in group], std_eps)
            met = any(one is not own for one, _ in same)
            found = [one.to_come(j, gamma) for one, j in same]
            turn = z_score(own.to_come(k, gamma), found, std_eps) if met else 0.0
        else:
            others = [one.to_come(j, gamma) for one, j in same if one is not own]
            episode = own.total - mean([one.total for one in group if one is not own])
            turn = own.to_come(k, gamma) - mean(others) if others else 0.0
        return episode + omega * turn

    return per_turn(groups, scalar)


def mt_grpo(groups: list[Group], outcome_weight: float = 1.0, std_eps: float = 1e-6) -> Found:
    def scalar(group: Group, own: Episode, k: int) -> float:
        paid = [one.turns[k].reward for one in group if len(one.turns) > k]
        outcomes = [one.rest + one.total - one.reward for one in group]
        outcome = own.rest + own.total - own.reward
        return z_score(own.turns[k].reward, paid, std_eps) + outcome_weight * z_score(
            outcome, outcomes, std_eps
        )

    return per_turn(groups, scalar)


def turn_gae(
    groups: list[Group],
    gamma: float = 1.0,
    gae_lambda: float = 1.0,
    token_gamma: float = 1.0,
    token_lambda: float = 1.0,
    whitened: bool = False,
) -> Found:
    assert not whitened

    def rows(one: Episode) -> list[list[float]]:
        later, following, found = 0.0, None, []
        for k in reversed(range(len(one.turns))):
            turn = one.turns[k]
            reward = turn.reward + turn.token_rewards[-1]
            if following is None:
                delta = reward + one.rest - turn.values[-1]
            else:
                delta = reward + sum(following.token_rewards[:-1]) + gamma * following.values[-1]
                delta -= turn.values[-1]
            later = delta + gamma * gae_lambda * later
            row = [later]
            for t in reversed(range(len(turn.values) - 1)):
                inside = turn.token_rewards[t] + token_gamma * turn.values[t + 1] - turn.values[t]
                row.insert(0, inside + token_gamma * token_lambda * row[0])
            found.insert(0, row)
            following = turn
        return found

    return [rows(one) for group in groups for one in group]


CASES: list[tuple[str, Callable[..., Found], dict[str, Any]]] = [
    ("turn_rloo", turn_rloo, {}),
    ("gigpo", gigpo, {}),
    ("gigpo", gigpo, {"omega": 0.5, "gamma": 0.5}),
    ("gigpo", gigpo, {"norm": "std", "std_eps": 0.1, "gamma": 1.0}),
    ("mt_grpo", mt_grpo, {"std_eps": 0.1}),
    ("mt_grpo", mt_grpo, {"outcome_weight": 0.3, "std_eps": 0.05}),
    ("turn_gae", turn_gae, {"whitened": False}),
    (
        "turn_gae",
        turn_gae,
        {"gamma": 0.9, "gae_lambda": 0.6, "token_gamma": 0.8, "token_lambda": 0.7, "whitened": False},
    ),
]


def estimate(name: str, rewards: GroupRewards, params: Mapping[str, Any] | None = None) -> torch.Tensor:
    return registry.resolve("advantage", name, params or {})(rewards)


@pytest.mark.parametrize(
    ("name", "oracle", "params"), CASES, ids=[f"{name}-{params}" for name, _, params in CASES]
)
@given(seed=st.integers(0, 10_000), token_rewards=st.booleans())
def test_advantage_is_the_formula_written_out(name, oracle, params, seed, token_rewards):
    rewards = make_rewards(seed, token_rewards=token_rewards)
    expected = [
        x
        for episode in oracle(unpack(rewards), **params)
        for turn in episode
        for token in [turn]
        for x in token
    ]
    assert estimate(name, rewards, params).tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_every_advantage_of_turns_is_tested_here():
    places = registry.TABLES["advantage"]
    assert {name for name, _, _ in CASES} == {name for name in places if "turn_adv" in places[name]}


@pytest.mark.parametrize("name", ["turn_rloo", "gigpo", "mt_grpo"])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e6, 0.7])
def test_equal_episodes_have_advantage_exactly_zero(name, reward):
    """With rewards of turns that no float holds exactly, three equal episodes of two turns."""
    rewards = GroupRewards(
        rewards_S=torch.full((3,), reward),
        group_S=torch.zeros(3, dtype=torch.int64),
        num_groups=1,
        lengths_S=torch.full((3,), 2),
        sequence_T=torch.tensor([0, 0, 1, 1, 2, 2]),
        episode_K=torch.tensor([0, 0, 1, 1, 2, 2]),
        turn_T=torch.arange(6),
        turn_rewards_K=torch.tensor([reward / 3, 0.3] * 3),
        turn_states_K=torch.tensor([1, 2] * 3),
    )
    assert estimate(name, rewards).tolist() == [0.0] * 6


def one_turn(seed: int, **kwargs: Any) -> GroupRewards:
    """Every sequence is one turn without a reward of its own."""
    rewards = make_rewards(seed, **kwargs)
    episode_K = rewards.lengths_S.nonzero().flatten()
    return dataclasses.replace(
        rewards,
        episode_K=episode_K,
        turn_T=torch.searchsorted(episode_K, rewards.sequence_T),
        turn_rewards_K=torch.zeros(len(episode_K)),
        turn_states_K=torch.arange(len(episode_K)),
    )


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("token_rewards", [False, True])
def test_episodes_of_one_turn_have_the_advantages_of_sequences(seed, token_rewards):
    rewards = one_turn(seed, token_rewards=token_rewards)
    no_empty = bool(rewards.lengths_S.min())  # an empty sequence has no turn, so it is in no turn's baseline
    if no_empty:
        torch.testing.assert_close(estimate("turn_rloo", rewards), estimate("rloo", rewards))
    torch.testing.assert_close(estimate("gigpo", rewards), estimate("rloo", rewards))
    torch.testing.assert_close(
        estimate("gigpo", rewards, {"norm": "std"}), estimate("grpo", rewards), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(estimate("mt_grpo", rewards), estimate("grpo", rewards), rtol=1e-4, atol=1e-5)
    of_tokens = {"token_gamma": 0.9, "token_lambda": 0.7}
    torch.testing.assert_close(
        estimate("turn_gae", rewards, of_tokens), estimate("gae", rewards, {"gamma": 0.9, "gae_lambda": 0.7})
    )


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("token_rewards", [False, True])
def test_turn_gae_without_any_discount_is_the_return_minus_the_value(seed, token_rewards):
    """Both levels telescope; a reward of a turn is there for the tokens up to its turn, and later for none."""
    rewards = make_rewards(seed, token_rewards=token_rewards)
    expected = [
        one.to_come(k) - sum(turn.token_rewards[:t]) - value
        for group in unpack(rewards)
        for one in group
        for k, turn in enumerate(one.turns)
        for t, value in enumerate(turn.values)
    ]
    raw_T = estimate("turn_gae", rewards, {"whitened": False})
    assert raw_T.tolist() == pytest.approx(expected, abs=1e-5)


def test_targets_of_the_critic_are_advantage_plus_value():
    rewards = make_rewards(21, sizes=[3, 2], token_rewards=True)
    params = {"gamma": 0.9, "gae_lambda": 0.5, "token_gamma": 0.8, "token_lambda": 0.7}
    raw_T = estimate("turn_gae", rewards, {**params, "whitened": False})
    torch.testing.assert_close(turn_value_targets(rewards, **params), raw_T + rewards.values_T)
    assert estimate("turn_gae", rewards, params).mean().abs() < 1e-6


# A tree of three turns. At the first two the policy ends the episode well, ends it badly, or goes on; at the
# last it ends it in one of two ways. All numbers are sums of powers of two, so float32 advantages are exact.
POLICY = ((0.25, 0.25, 0.5), (0.125, 0.375, 0.5), (0.5, 0.5))
OF_TURN = ((0.0, 0.25, 0.5), (0.5, 0.0, 0.75), (0.25, 0.0))
REST = ((1.0, 0.0), (0.5, 0.25), (2.0, 0.0))
GOES_ON = 2

Path = tuple[int, ...]
Gradient = list[list[float]]
"""[turn][action]: derivatives by the logits."""


def paths() -> Iterator[Path]:
    yield from ((action,) for action in range(2))
    yield from ((GOES_ON, action) for action in range(2))
    yield from ((GOES_ON, GOES_ON, action) for action in range(2))


def probability(path: Path) -> float:
    return math.prod(POLICY[k][action] for k, action in enumerate(path))


def paid(path: Path) -> list[float]:
    return [OF_TURN[k][action] for k, action in enumerate(path)]


def total(path: Path) -> float:
    return sum(paid(path)) + REST[len(path) - 1][path[-1]]


def weighted_scores(weights: Sequence[tuple[Path, Sequence[float]]]) -> Gradient:
    """Sum of weight_k * gradient of ln pi(action_k) over paths and turns, by the logits of every turn."""
    found = [[0.0] * len(actions) for actions in POLICY]
    for path, of_turns in weights:
        for k, (action, weight) in enumerate(zip(path, of_turns, strict=True)):
            for other, chance in enumerate(POLICY[k]):
                found[k][other] += weight * ((other == action) - chance)
    return found


def true_gradient(of_path: Callable[[Path], float] = total) -> Gradient:
    return weighted_scores([(path, [probability(path) * of_path(path)] * len(path)) for path in paths()])


def expected_gradient(advantages: Callable[[tuple[Path, Path]], list[list[float]]]) -> Gradient:
    """Mean over all groups of two episodes; `advantages` gives one number per turn of either episode."""
    weights = []
    for group in itertools.product(paths(), paths()):
        chance = probability(group[0]) * probability(group[1])
        for path, row in zip(group, advantages(group), strict=True):
            weights.append((path, [chance * value / 2 for value in row]))
    return weighted_scores(weights)


def by_name(
    name: str, params: Mapping[str, Any], states: Sequence[int] = (1, 2, 3)
) -> Callable[[tuple[Path, Path]], list[list[float]]]:
    def advantages(group: tuple[Path, Path]) -> list[list[float]]:
        lengths = torch.tensor([len(path) for path in group])
        rewards = GroupRewards(
            rewards_S=torch.tensor([total(path) for path in group]),
            group_S=torch.zeros(2, dtype=torch.int64),
            num_groups=1,
            lengths_S=lengths,
            sequence_T=torch.repeat_interleave(torch.arange(2), lengths),
            episode_K=torch.repeat_interleave(torch.arange(2), lengths),
            turn_T=torch.arange(int(lengths.sum())),
            turn_rewards_K=torch.tensor([reward for path in group for reward in paid(path)]),
            turn_states_K=torch.tensor([state for path in group for state in states[: len(path)]]),
        )
        return [list(row) for row in estimate(name, rewards, params).split(lengths.tolist())]

    return advantages


def centred_and_summed(group: tuple[Path, Path]) -> list[list[float]]:
    """Each reward of a turn minus that of the other episode's same turn, summed over later turns."""
    rows = []
    for own, other in (group, group[::-1]):
        own_paid, other_paid = paid(own), paid(other)
        centred = [r - (other_paid[k] if k < len(other) else 0.0) for k, r in enumerate(own_paid)]
        outcome = total(own) - sum(own_paid) - (total(other) - sum(other_paid))
        rows.append([sum(centred[k:]) + outcome for k in range(len(own))])
    return rows


def minus(left: Gradient, right: Gradient, factor: float = 1.0) -> Gradient:
    return [[x * factor - y for x, y in zip(a, b, strict=True)] for a, b in zip(left, right, strict=True)]


def norm(gradient: Gradient) -> float:
    return math.sqrt(sum(x * x for row in gradient for x in row))


@pytest.mark.parametrize(
    ("name", "params", "factor"),
    [
        ("reinforce", {}, 1.0),
        ("grpo", {"scale": "none"}, 2.0),  # G / (G - 1)
        ("rloo", {}, 1.0),
        ("turn_rloo", {}, 1.0),
        ("gigpo", {"omega": 0}, 1.0),
    ],
)
def test_the_expected_gradient_is_the_true_one(name, params, factor):
    found = expected_gradient(by_name(name, params))
    assert norm(minus(found, true_gradient(), factor)) < 1e-12


@pytest.mark.parametrize(
    ("states", "ratios"),
    [((5, 5, 5), (2.0, 2.0, 2.0)), ((5, 5, 6), (2.0, 2.0, 1.25)), ((1, 2, 3), (2.0, 1.5, 1.25))],
)
def test_gigpo_only_weighs_turns_differently(states, ratios):
    """In the expectation a turn counts 1 + omega P(the other episode meets its state) times the gradient.

    A state that comes again within an episode must not compare an action with what follows from it.
    """
    found = expected_gradient(by_name("gigpo", {"gamma": 1.0}, states))
    for row, true, ratio in zip(found, true_gradient(), ratios, strict=True):
        assert norm(minus([[float(x) for x in row]], [[ratio * y for y in true]])) < 1e-6


def test_centred_rewards_of_turns_miss_the_gradient_by_their_means_times_the_chance_to_go_on():
    """The closed form: turn k + 1 subtracts its mean reward from every episode that reaches it."""

    def hidden(path: Path) -> float:
        return sum(mean_paid[k] for k in range(1, len(path)))

    reach = [sum(probability(path) for path in paths() if len(path) > k) for k in range(3)]
    mean_paid = [
        sum(probability(path) * paid(path)[k] for path in paths() if len(path) > k) for k in range(3)
    ]
    assert reach == [1.0, 0.5, 0.25]
    found, true = expected_gradient(centred_and_summed), true_gradient()
    bias = minus(found, true)
    assert norm(minus(bias, true_gradient(lambda path: -hidden(path)))) < 1e-12
    assert norm(bias) > 0.1 * norm(true)


@pytest.mark.parametrize(("name", "least"), [("mt_grpo", 0.1), ("grpo", 0.01)])
def test_division_by_a_standard_deviation_changes_the_direction(name, least):
    """No factor makes the expected gradient the true one."""
    found, true = expected_gradient(by_name(name, {})), true_gradient()
    inner = sum(x * y for a, b in zip(found, true, strict=True) for x, y in zip(a, b, strict=True))
    assert inner / (norm(found) * norm(true)) < 1 - least**2 / 2
