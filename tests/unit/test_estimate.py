"""Rewards to advantages: with a critic, a KL in the reward, a greedy baseline; and what masks leave alone."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from asyncrl.algo.group_rewards import GroupRewards
from asyncrl.algo.preferences import preference_metrics
from asyncrl.algo.token_advantages import gae, optimal_token_baseline, value_targets
from asyncrl.algo.turn_advantages import turn_gae, turn_value_targets
from asyncrl.batch.plan import Plan
from asyncrl.batch.turn_columns import in_time, turn_columns, turn_parts
from asyncrl.config.algorithm import KLConfig
from asyncrl.config.base import Choice
from asyncrl.errors import ConfigError, ShapeError
from asyncrl.types import Turns
from tests.support.fake_learner import Batch, known, mixed_batch, planned


def flat(batch: Batch, **columns: torch.Tensor) -> GroupRewards:
    """Written out on its own, from the groups."""
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    lengths_S = torch.tensor([int(rollout.action_mask.sum()) for rollout in rollouts])
    return GroupRewards(
        rewards_S=torch.tensor([rollout.reward for rollout in rollouts]),
        group_S=torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]),
        num_groups=4,
        lengths_S=lengths_S,
        sequence_T=torch.repeat_interleave(torch.arange(8), lengths_S),
        **columns,
    )


def response_column(plan: Plan, read: Callable) -> torch.Tensor:
    """A column of the planned sequences, over all action tokens in order: also of masked ones."""
    batch = mixed_batch()
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    parts = [
        read(sequence)[rollout.action_mask]
        for sequence, rollout in zip(plan.sequences, rollouts, strict=True)
    ]
    return torch.from_numpy(np.concatenate(parts))


def trained(plan: Plan) -> dict[int, dict[str, float]]:
    """Token id -> its columns, for tokens in the loss."""
    found = {}
    for minibatch in plan.minibatches:
        for one in minibatch.microbatches:
            names = ("advantages_T", "proximal_logprobs_T", "reference_logprobs_T", "values_T", "returns_T")
            columns = {
                name: getattr(one.tokens, name) for name in names if getattr(one.tokens, name) is not None
            }
            for t, token in enumerate(one.target_T.tolist()):
                found[token] = {name: float(column[t]) for name, column in columns.items()}
    return found


@pytest.mark.parametrize(
    "params", [{}, {"gamma": 0.9, "gae_lambda": 0.8}, {"gae_lambda": 0.5, "whitened": False}]
)
def test_gae_is_that_of_the_whole_flat_batch(params):
    batch = mixed_batch()
    plan = planned(batch, advantage=Choice(name="gae", **params))
    rewards = flat(batch, values_T=batch.column("values_T"))
    torch.testing.assert_close(response_column(plan, lambda one: one.advantages), gae(rewards, **params))
    targets_T = value_targets(
        rewards, **{name: value for name, value in params.items() if name != "whitened"}
    )
    assert plan.returns_T is not None
    torch.testing.assert_close(plan.returns_T, targets_T)
    torch.testing.assert_close(response_column(plan, lambda one: one.columns["returns_T"]), targets_T)


def test_the_loss_sees_each_tokens_own_columns():
    batch = mixed_batch()
    plan = planned(batch, advantage=Choice(name="gae"), kl=KLConfig(coefficient=0.1))
    assert plan.returns_T is not None
    returns = dict(zip(batch.actions, plan.returns_T.tolist(), strict=True))
    found = trained(plan)
    assert len(found) == plan.minibatches[0].counts.tokens > 20
    for token, columns in found.items():
        assert columns["values_T"] == pytest.approx(known("values_T", token))
        assert columns["returns_T"] == pytest.approx(returns[token])
        assert columns["proximal_logprobs_T"] == pytest.approx(known("logprobs_T", token))
        assert columns["reference_logprobs_T"] == pytest.approx(known("reference_logprobs_T", token))


def test_a_masked_token_takes_part_in_returns_and_not_in_the_loss():
    batch = mixed_batch()
    choice = Choice(name="gae", gae_lambda=0.5)
    strict, free = planned(batch, advantage=choice), planned(batch, version=3, advantage=choice)
    stale = batch.actions[3]
    assert stale in trained(free) and stale not in trained(strict)
    assert strict.returns_T is not None and free.returns_T is not None
    torch.testing.assert_close(strict.returns_T, free.returns_T, atol=0, rtol=0)
    assert trained(strict).items() <= trained(free).items()


@pytest.mark.parametrize("estimator", ["k1", "k2"])
def test_a_kl_in_the_reward_is_paid_token_by_token(estimator):
    batch, beta = mixed_batch(), 0.25
    kl = KLConfig(coefficient=beta, placement="reward", estimator=Choice(name=estimator))
    plan = planned(batch, advantage=Choice(name="reinforce_plus_plus"), kl=kl)
    differences = [
        known("logprobs_T", token) - known("reference_logprobs_T", token) for token in batch.actions
    ]
    paid = [-beta * (d if estimator == "k1" else d * d / 2) for d in differences]
    assert plan.rewards.token_rewards_T is not None
    assert plan.rewards.token_rewards_T.tolist() == pytest.approx(paid, abs=1e-6)
    totals, tokens = [], iter(paid)
    for group in batch.groups:
        for rollout in group.rollouts:
            totals.append(rollout.reward + sum(next(tokens) for _ in range(int(rollout.action_mask.sum()))))
    assert plan.rewards.totals_S.tolist() == pytest.approx(totals, abs=1e-5)


@pytest.mark.parametrize(("advantage", "is_told"), [("kto", True), ("reinforce_plus_plus", False)])
def test_pairs_are_told_only_if_the_advantage_compares_with_the_reference(advantage, is_told):
    """Here both of its columns are measured for the KL and for the proximal policy, too."""
    plan = planned(mixed_batch(), advantage=Choice(name=advantage), kl=KLConfig(coefficient=0.1))
    assert ("preference/pairs" in preference_metrics(plan.rewards)) == is_told


def test_the_greedy_baseline_is_not_shaped():
    batch = mixed_batch()
    shaping = (Choice(name="soft_overlong", buffer_tokens=8, penalty=1.0),)
    plan = planned(batch, advantage=Choice(name="remax"), shaping=shaping)
    assert plan.rewards.greedy_rewards_group is not None
    assert plan.rewards.greedy_rewards_group.tolist() == [0.25, 1.0, 0.0, 2.0]
    assert plan.sequences[0].advantages.tolist() == pytest.approx([1.0 - 3 / 8 - 0.25] * 3)


def test_a_missing_greedy_reward_is_said_and_not_guessed():
    batch = mixed_batch()
    batch.group(batch.rollout(1.0, [5]), batch.rollout(1.0, [5]))
    with pytest.raises(ShapeError, match="greedy_rewards_group"):
        planned(batch, advantage=Choice(name="remax"))


@pytest.mark.parametrize("wrong", [lambda rewards: rewards.totals_S, lambda rewards: rewards.totals_S[:1]])
def test_an_advantage_that_is_not_of_tokens_is_refused(wrong):
    batch = mixed_batch()
    with pytest.raises(
        ConfigError, match=r"returned shape \[\d+\]; needed is a number for each action token"
    ):
        in_time(wrong, flat(batch))
    with pytest.raises(ConfigError, match="spreads one for each episode"):
        in_time(wrong, flat(batch, turn_T=torch.zeros(len(flat(batch).sequence_T))))


def test_the_token_baseline_gets_probabilities_of_the_policy():
    batch = mixed_batch()
    plan = planned(batch, advantage=Choice(name="optimal_token_baseline"))
    columns = {name: batch.column(name) for name in ("logprobs_T", "sum_squared_probs_T")}
    expected_T = optimal_token_baseline(flat(batch, **columns))
    torch.testing.assert_close(response_column(plan, lambda one: one.advantages), expected_T)


TURNS = {1: ([2, 5], [0.5, 0.25]), 6: ([1, 3, 8], [0.0, 2.0, 0.0])}
"""Rollout of the batch -> offsets behind its turns, and their rewards; every other rollout is one turn."""


def batch_with_turns() -> Batch:
    batch = mixed_batch()
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    for r, (ends, rewards) in TURNS.items():
        ends = [min(end, len(rollouts[r].response_ids)) for end in ends]
        states = np.arange(1, len(ends) + 1, dtype=np.uint64)
        turns = Turns(ends=np.array(ends, np.int32), rewards=np.array(rewards, np.float32), states=states)
        rollouts[r] = replace(rollouts[r], turns=turns)
    pairs = zip(rollouts[::2], rollouts[1::2], strict=True)
    batch.groups = [replace(group, rollouts=pair) for group, pair in zip(batch.groups, pairs, strict=True)]
    return batch


def test_an_advantage_of_turns_gets_the_turns_of_the_rollouts():
    """turn_rloo in groups of two, written out: an action has what its episode still gets, minus the other's."""
    batch = batch_with_turns()
    expected = []
    for group in batch.groups:
        to_come = []
        for rollout in group.rollouts:
            if not rollout.actions:  # no turn
                to_come.append([])
                continue
            turns = rollout.turns or Turns(ends=np.array([len(rollout.response_ids)], np.int32))
            rewards = [0.0] * len(turns.ends) if turns.rewards is None else turns.rewards.tolist()
            rewards[-1] += rollout.reward - sum(rewards)
            to_come.append([sum(rewards[k:]) for k in range(len(rewards))])
        for own, (rollout, ours) in enumerate(zip(group.rollouts, to_come, strict=True)):
            theirs = to_come[1 - own]
            for offset in np.flatnonzero(rollout.action_mask):
                ends = [] if rollout.turns is None else rollout.turns.ends
                k = int(np.searchsorted(ends, offset, side="right")) if len(ends) else 0
                expected.append(ours[k] - (theirs[k] if k < len(theirs) else 0.0))
    plan = planned(batch, advantage=Choice(name="turn_rloo"))
    torch.testing.assert_close(response_column(plan, lambda one: one.advantages), torch.tensor(expected))


def test_a_batch_without_turns_is_one_turn_each():
    """Nothing else may happen in a run whose episodes all end after one turn by chance."""
    batch = Batch()
    batch.group(batch.rollout(1.0, [5, 5]), batch.rollout(0.0, [5, 5, 5], tools=[1]), batch.rollout(0.5, [5]))
    found, same, expected = (
        [one.advantages.tolist() for one in planned(batch, advantage=Choice(name=name)).sequences]
        for name in ("turn_rloo", "gigpo", "rloo")
    )
    assert found == same == expected, "no turn has a state either"


@pytest.mark.parametrize("whitened", [True, False])
def test_the_critic_of_turns_has_targets_of_turns(whitened):
    batch = batch_with_turns()
    params = {"gamma": 0.9, "token_lambda": 0.8}
    plan = planned(batch, advantage=Choice(name="turn_gae", whitened=whitened, **params))
    episodes = [(rollout,) for group in batch.groups for rollout in group.rollouts]
    rewards = flat(batch, values_T=batch.column("values_T"), **turn_columns(episodes))
    torch.testing.assert_close(plan.returns_T, turn_value_targets(rewards, **params))
    expected_T = turn_gae(rewards, whitened=whitened, **params)
    torch.testing.assert_close(response_column(plan, lambda one: one.advantages), expected_T)


def test_a_users_advantage_names_what_it_needs(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def values(rewards):\n    return rewards.column('values_T')\nvalues.needs = ('values_T',)\n"
        "def wrong(rewards):\n    return rewards.rewards_S\nwrong.needs = ('entropy_T',)\n"
    )
    batch = mixed_batch()
    plan = planned(batch, advantage=Choice(name=f"{file}:values"))
    torch.testing.assert_close(response_column(plan, lambda one: one.advantages), batch.column("values_T"))
    torch.testing.assert_close(plan.returns_T, value_targets(flat(batch, values_T=batch.column("values_T"))))
    with pytest.raises(ConfigError, match=r"needs \['entropy_T'\]; it may need"):
        planned(batch, advantage=Choice(name=f"{file}:wrong"))


def test_a_users_advantage_may_need_the_reference_alone(tmp_path):
    """Without any KL of ours: the model is loaded and measured because the advantage asks, and nothing is
    added to the loss."""
    file = tmp_path / "mine.py"
    file.write_text(
        "def log_reference(rewards):\n    return rewards.column('reference_logprobs_T')\n"
        "log_reference.needs = {'reference_logprobs_T'}\n"
    )
    batch = mixed_batch()
    plan = planned(batch, advantage=Choice(name=f"{file}:log_reference"))
    torch.testing.assert_close(
        response_column(plan, lambda one: one.advantages), batch.column("reference_logprobs_T")
    )


def test_the_parts_of_a_reward_are_those_of_the_config_whatever_groups_bring():
    batch = mixed_batch()
    strangers = [{"good": 1.0, "x": 9.0}, {"y": 9.0}, {}, {"good": 3.0}]
    for index, group in enumerate(batch.groups):
        rollouts = tuple(replace(rollout, reward_parts=strangers[index]) for rollout in group.rollouts)
        batch.groups[index] = replace(group, rollouts=rollouts)
    plan = planned(batch, parts=("good", "brief"), advantage=Choice(name="gdpo", weights={"brief": 1.0}))
    found = {name: part_S.nan_to_num(nan=-9.0).tolist() for name, part_S in plan.rewards.parts.items()}
    assert found == {"good": [1.0, 1.0, -9.0, -9.0, -9.0, -9.0, 3.0, 3.0], "brief": [-9.0] * 8}
    assert all(not sequence.advantages.any() for sequence in plan.sequences), (
        "a part that nobody brings teaches nothing"
    )


def test_the_first_and_the_last_turn_of_each_episode_are_told_from_those_between():
    episodes, turns = [0, 0, 0, 0, 1, 2, 2], [0, 1, 1, 2, 3, 4, 5, 6]
    rewards = SimpleNamespace(episode_K=torch.tensor(episodes), turn_T=torch.tensor(turns))
    assert turn_parts(rewards).tolist() == [0, 1, 1, 1, 2, 0, 0, 2]
    assert turn_parts(SimpleNamespace(episode_K=None, turn_T=None)) is None
