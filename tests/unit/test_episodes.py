"""An episode counts once: how its conversation is cut into sequences changes neither advantages nor losses,
and with one sequence per episode every number is what it was without episodes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch

from asyncrl.algo.aggregation import Counts
from asyncrl.algo.group_rewards import GroupRewards
from asyncrl.algo.metrics import TURNS, finish, merge, policy_metrics
from asyncrl.algo.shaping import soft_overlong
from asyncrl.algo.token_advantages import value_targets
from asyncrl.algo.tokens import TokenBatch
from asyncrl.algo.turn_advantages import turn_value_targets
from asyncrl.batch.coefficients import Tracker
from asyncrl.batch.estimate import Estimator
from asyncrl.batch.plan import Plan, Planner
from asyncrl.batch.turn_columns import turn_columns, turn_parts
from asyncrl.buffer.intake import Collected
from asyncrl.buffer.judge import make_judge
from asyncrl.config import registry
from asyncrl.learner import Step
from asyncrl.report.reports import eval_records
from asyncrl.report.step_metrics import COLLAPSED, episode_metrics, step_metrics
from asyncrl.types import Group, Rollout, Turns
from asyncrl.wire.group_frames import decode_group, encode_group
from tests.support.fake_learner import SETTINGS, Batch, FakeTrainer, known
from tests.support.steps import beginning

NEEDS = frozenset({"logprobs_T", "values_T", "sum_squared_probs_T", "reference_logprobs_T"})
SHAPING = (partial(soft_overlong, buffer_tokens=6, penalty=1.0),)
PARAMETERS = {
    "gdpo": {"weights": {"good": 1.0}},
    "seq-mean-token-sum-norm": {"scale": 7.0},
}


def random_groups(seed: int, *, tools: bool) -> list[Group]:
    rng, batch = np.random.default_rng(seed), Batch()
    for _ in range(4):
        lengths = rng.integers(2, 9, size=3)
        batch.group(
            *(
                replace(
                    batch.rollout(
                        float(rng.choice([0.0, 0.1, 1.0])),
                        np.sort(rng.integers(2, 6, size=n)).tolist(),
                        tools=[1] if tools and n > 2 else (),
                        finish=str(rng.choice(["stop", "length"])),
                    ),
                    reward_parts={"good": float(rng.random())},
                )
                for n in lengths.tolist()
            ),
            greedy=float(rng.random()),
        )
    return batch.groups


def with_turns(groups: Sequence[Group], seed: int) -> list[Group]:
    """The same groups, with rollouts cut at random into turns."""
    rng = np.random.default_rng(seed)
    return [
        replace(group, rollouts=tuple(_with_turns(rollout, rng) for rollout in group.rollouts))
        for group in groups
    ]


def _with_turns(rollout: Rollout, rng: np.random.Generator) -> Rollout:
    actions = np.flatnonzero(rollout.action_mask).astype(np.int32) + 1
    ends = np.unique(np.append(rng.choice(actions, size=2), actions[-1:]))
    rewards = rng.random(len(ends), dtype=np.float32)
    return replace(
        rollout, turns=Turns(ends=ends, rewards=rewards, states=rng.integers(0, 3, len(ends), np.uint64))
    )


def with_episodes(groups: Sequence[Group]) -> list[Group]:
    """The same groups, which say what is meant without: each rollout is an episode."""
    return [replace(one, episode_of=np.arange(len(one.rollouts), dtype=np.int32)) for one in groups]


def branched(groups: Sequence[Group], seed: int) -> list[Group]:
    """The same episodes, each cut at some of its turns: a branch repeats what was before as context."""
    rng = np.random.default_rng(seed)
    found = []
    for group in groups:
        rollouts, episode_of = [], []
        for index, rollout in enumerate(group.rollouts):
            size = len(rollout.response_ids)
            cuts = sorted({0, size, *rng.choice(rollout.turns.ends, size=2).tolist()})
            for first, end in pairwise(cuts):
                rollouts.append(_part(rollout, first, end))
                episode_of.append(index)
        found.append(
            replace(group, rollouts=tuple(rollouts), episode_of=np.array(episode_of, dtype=np.int32))
        )
    return found


def _part(rollout: Rollout, first: int, end: int) -> Rollout:
    mask, turns = rollout.action_mask[:end] & (np.arange(end) >= first), rollout.turns
    own = (turns.ends > first) & (turns.ends <= end)
    own_turns = Turns(ends=turns.ends[own], rewards=turns.rewards[own], states=turns.states[own])
    return beginning(rollout, mask, own_turns)


def rewards_without_episodes(groups: Sequence[Group], measured: dict[str, torch.Tensor]) -> GroupRewards:
    """How rewards were put together before there were episodes."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths_S = torch.tensor([int(rollout.action_mask.sum()) for rollout in rollouts])
    shaped = [
        soft_overlong(
            rollout.reward,
            response_tokens=len(rollout.response_ids),
            max_response_tokens=8,
            finish_reason=rollout.finish_reason,
            buffer_tokens=6,
            penalty=1.0,
        )
        for rollout in rollouts
    ]
    return GroupRewards(
        rewards_S=torch.tensor(shaped, dtype=torch.float32),
        group_S=torch.tensor([index for index, group in enumerate(groups) for _ in group.rollouts]),
        num_groups=len(groups),
        lengths_S=lengths_S,
        sequence_T=torch.repeat_interleave(torch.arange(len(rollouts)), lengths_S),
        parts={"good": torch.tensor([rollout.reward_parts["good"] for rollout in rollouts])},
        greedy_rewards_group=torch.tensor([group.greedy_reward for group in groups]),
        truncated_S=torch.tensor([rollout.finish_reason == "length" for rollout in rollouts]),
        behaviour_logprobs_T=torch.from_numpy(
            np.concatenate([rollout.behaviour_logprobs[rollout.action_mask] for rollout in rollouts])
        ),
        **measured,
    )


def planned(groups: Sequence[Group], advantage: str = "grpo", **settings) -> Plan:
    estimator = Estimator(
        advantage=registry.resolve("advantage", advantage, PARAMETERS.get(advantage, {})),
        targets=partial(turn_value_targets if advantage == "turn_gae" else value_targets, gae_lambda=0.7),
        max_response_tokens=8,
        parts=("good",),
        shaping=SHAPING,
        needs=NEEDS | {"greedy_rewards_group"},
        tracker=Tracker(int, decay=0.9)
        if registry.EXPECTED in registry.needs("advantage", advantage)
        else None,
    )
    planner = Planner(
        estimator=estimator, columns=NEEDS, proximal=True, settings=replace(SETTINGS, **settings)
    )
    samples = planner.assemble(groups, 5)
    return planner.plan(groups, samples, planner.measure(FakeTrainer(), samples), 0.0)


def same(left: object, right: object) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[name], right[name]) for name in left)
    return bool(left == right)


def differing(left: object, right: object) -> list[str]:
    names = [one.name for one in fields(left)]  # type: ignore[arg-type]
    return [name for name in names if not same(getattr(left, name), getattr(right, name))]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("explicit", [False, True])
def test_one_rollout_per_episode_gives_the_numbers_of_before_bit_for_bit(seed, explicit):
    groups = random_groups(seed, tools=False)
    plan = planned(with_episodes(groups) if explicit else groups)
    measured = {name: getattr(plan.rewards, name) for name in NEEDS}
    before = rewards_without_episodes(groups, measured)
    assert differing(plan.rewards, before) == []
    [minibatch] = plan.minibatches
    kept = [int(sample.keep.sum()) for sample in plan.sequences]
    assert minibatch.counts == Counts(tokens=sum(kept), sequences=sum(count > 0 for count in kept))
    assert all(one.tokens.episode_tokens_S is None for one in minibatch.microbatches)


@pytest.mark.parametrize("advantage", registry.names("advantage"))
@pytest.mark.parametrize("seed", range(3))
def test_how_an_episode_is_cut_into_sequences_changes_no_advantage(advantage, seed):
    groups = with_turns(random_groups(seed, tools=True), seed)
    whole, cut = planned(groups, advantage), planned(branched(groups, seed), advantage)
    assert len(cut.sequences) > len(whole.sequences)
    assert trained(cut).keys() == trained(whole).keys()
    for token, numbers in trained(cut).items():
        assert numbers == trained(whole)[token], token
    assert differing(whole.rewards, cut.rewards) == []


def trained(plan: Plan) -> dict[int, tuple[float, ...]]:
    """The columns of each token in the loss, by its id, which occurs once."""
    found = {}
    for minibatch in plan.minibatches:
        for one in minibatch.microbatches:
            columns = (one.tokens.advantages_T, one.tokens.behaviour_logprobs_T, one.tokens.lag_T)
            assert one.tokens.returns_T is not None and one.tokens.values_T is not None
            columns += (one.tokens.returns_T, one.tokens.values_T)
            for token, *numbers in zip(one.target_T.tolist(), *(c.tolist() for c in columns), strict=True):
                assert token not in found, "a token is trained once"
                found[token] = tuple(numbers)
    return found


@pytest.mark.parametrize("advantage", registry.names("advantage"))
@pytest.mark.parametrize("seed", range(3))
def test_two_conversations_that_take_turns_have_the_advantages_of_one(advantage, seed):
    """An agent and its sub-agent: what matters is when a turn was, not in which sequence it lies."""
    groups = with_turns(random_groups(seed, tools=True), seed)
    mixed = [decode_group(encode_group(group)) for group in in_two_conversations(groups, seed)]
    whole, cut = planned(groups, advantage), planned(mixed, advantage)
    assert any((np.diff(one.turns.order) > 1).any() for group in mixed for one in group.rollouts)
    assert trained(cut) == trained(whole)
    parts = [Counter(turn_parts(plan.rewards).tolist()) for plan in (whole, cut)]
    assert parts[0] == parts[1], "the first and the last turn, too, are those of the time"


def in_two_conversations(groups: Sequence[Group], seed: int) -> list[Group]:
    """The same episodes, each turn in one of two sequences."""
    rng = np.random.default_rng(seed)
    found = []
    for group in groups:
        rollouts: list[Rollout] = []
        episode_of = []
        for index, rollout in enumerate(group.rollouts):
            is_first = (np.arange(len(rollout.turns.ends)) + rng.integers(2)) % 2 == 0
            parts = [_turns_of(rollout, chosen) for chosen in (is_first, ~is_first) if chosen.any()]
            rollouts += parts
            episode_of += [index] * len(parts)
        of = np.array(episode_of, dtype=np.int32)
        found.append(replace(group, rollouts=tuple(rollouts), episode_of=of))
    return found


def _turns_of(rollout: Rollout, chosen: np.ndarray) -> Rollout:
    """A sequence whose actions are those of the chosen turns."""
    turns = rollout.turns
    ends, size = turns.ends[chosen], int(turns.ends[chosen][-1])
    place = np.searchsorted(turns.ends, np.arange(size), side="right")
    mask = rollout.action_mask[:size] & chosen[place]
    chosen_turns = Turns(
        ends=ends,
        rewards=turns.rewards[chosen],
        states=turns.states[chosen],
        order=np.flatnonzero(chosen).astype(np.int32),
    )
    return beginning(rollout, mask, chosen_turns)


@pytest.mark.parametrize("name", registry.names("aggregation"))
@pytest.mark.parametrize("minibatches", [1, 2])
def test_how_an_episode_is_cut_changes_no_loss_whatever_micro_batches_hold(name, minibatches):
    """Also where a mask took tokens, and where micro-batches separate the sequences of an episode."""
    aggregate = registry.resolve("aggregation", name, PARAMETERS.get(name, {}))

    def losses(groups, **settings) -> list[float]:
        plan = planned(groups, minibatches=minibatches, **settings)
        return [
            sum(float(aggregate(_loss_T(one), one.tokens, m.counts)) for one in m.microbatches)
            for m in plan.minibatches
        ]

    for seed in range(3):
        groups = with_turns(random_groups(seed, tools=True), seed)
        for settings in ({}, {"max_lag": 1}, {"mask_truncated": True}):
            found = losses(branched(groups, seed), tokens_per_microbatch=12, **settings)
            assert found == pytest.approx(losses(groups, **settings), rel=1e-6), (seed, settings)


def _loss_T(microbatch) -> torch.Tensor:
    return torch.sin(microbatch.target_T.double())


def test_a_mean_over_episodes_is_written_out():
    """Two tokens of 1 and 2 beside one of 6 are an episode; 4 and 8 are another: 3 + 6 over 2."""
    batch = TokenBatch(
        sequence_T=torch.tensor([0, 0, 1, 2, 2]),
        num_sequences=3,
        behaviour_logprobs_T=torch.zeros(5),
        advantages_T=torch.zeros(5),
        episode_tokens_S=torch.tensor([3, 3, 2]),
    )
    losses_T, counts = torch.tensor([1.0, 2.0, 6.0, 4.0, 8.0]), Counts(tokens=5, sequences=2)
    found = {
        name: float(registry.resolve("aggregation", name, PARAMETERS.get(name, {}))(losses_T, batch, counts))
        for name in registry.names("aggregation")
    }
    assert found == pytest.approx(
        {
            "token-mean": 21 / 5,
            "token-sum": 21,
            "seq-mean-token-sum": 21 / 2,
            "seq-mean-token-mean": (3 + 6) / 2,
            "seq-mean-token-sum-norm": 21 / 2 / 7,
        }
    )


def test_turns_become_columns_in_the_order_of_the_tokens():
    batch = Batch()
    first, second, third = (batch.rollout(1.0, [5] * n, tools=[1]) for n in (4, 3, 2))
    turns = [Turns(ends=np.array(ends, np.int32)) for ends in ([1, 4], [3])]
    scored = replace(turns[1], rewards=np.array([0.5], np.float32), states=np.array([2**63 + 5], np.uint64))
    first, second = replace(first, turns=turns[0]), replace(second, turns=scored)
    context = replace(third, action_mask=np.zeros(2, np.bool_))
    found = turn_columns([[first, second], [third], [context]])
    assert {name: column.tolist() for name, column in found.items()} == {
        "episode_K": [0, 0, 0, 1],
        "turn_T": [0, 1, 1, 2, 2, 3],
        "turn_rewards_K": [0.0, 0.0, 0.5, 0.0],
        "turn_states_K": [0, 0, 5 - 2**63, 0],
    }
    assert not turn_columns([[first], [third]])["turn_states_K"].any()
    assert turn_columns([[third], [context]]) == {}
    alone = turn_columns([[third], [context]], always=True)
    assert alone["episode_K"].tolist() == alone["turn_T"].tolist() == [0]


def test_the_columns_of_turns_are_in_the_order_of_time():
    """Turns of the times 1, 4 and 9 in the first sequence, 0 and 5 in the second."""
    batch, sequences = Batch(), []
    for order in ([1, 4, 9], [0, 5]):
        rollout, ends = batch.rollout(1.0, [5] * len(order)), np.arange(1, len(order) + 1, dtype=np.int32)
        rewards, times = np.array(order, np.float32), np.array(order, np.int32)
        sequences.append(replace(rollout, turns=Turns(ends=ends, rewards=rewards, order=times)))
    found = turn_columns([[batch.rollout(1.0, [5])], sequences])
    assert found["turn_rewards_K"].tolist() == [0, 0, 1, 4, 5, 9]
    assert found["turn_T"].tolist() == [0, 2, 3, 5, 1, 4]


def test_a_filter_sees_episodes():
    seen = []
    judge = make_judge([seen.append], drop_older_than=None)
    groups = with_turns(random_groups(0, tools=True), 0)
    [whole, *_], [group, *_] = groups, branched(groups, 0)
    assert judge(group, 5) is None and judge(whole, 5) is None
    assert seen[0] == seen[1]
    assert seen[0].lengths == tuple(rollout.actions for rollout in whole.rollouts)


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "gae", "remax"])
def test_missing_episodes_change_nothing_for_those_that_are_left(advantage):
    """Baselines and denominators are over the episodes that are there, and one that is left has no baseline."""
    groups = random_groups(0, tools=True)
    short = [replace(one, rollouts=one.rollouts[: 1 + index]) for index, one in enumerate(groups[:3])]
    without = planned([*short, groups[3]], advantage)
    plan = planned(
        [*(replace(one, missing={"died": 3 - len(one.rollouts)}) for one in short), groups[3]], advantage
    )
    assert plan.rewards.sizes_S.tolist() == [1, 2, 2, 3, 3, 3, 3, 3, 3]
    assert plan.minibatches[0].counts == without.minibatches[0].counts
    for one, other in zip(plan.sequences, without.sequences, strict=True):
        np.testing.assert_array_equal(one.advantages, other.advantages)
    if advantage in ("grpo", "rloo"):
        assert not plan.sequences[0].advantages.any()


def test_missing_episodes_are_counted_by_reason_in_all_groups_that_were_taken():
    step = played(3)
    first, second, *rest = step.collected.groups
    groups = (replace(first, missing={"died": 2}), replace(second, missing={"died": 1, "hung": 4}), *rest)
    rejected = replace(first, rollouts=first.rollouts[:1], episode_of=None, missing={"hung": 3})
    collected = replace(step.collected, groups=groups, rejected=((rejected, "zero_variance"),))
    before, found = step_metrics(step), step_metrics(replace(step, collected=collected))
    assert (found["episodes/missing/died"], found["episodes/missing/hung"]) == (3, 7)
    assert not any(name.startswith("episodes/missing") for name in before)
    flat = sum(
        found[f"groups/collapsed_{where}"] - before[f"groups/collapsed_{where}"] for where in COLLAPSED
    )
    assert flat == 1, "the only episode that is left of a group has nothing to be compared with"


def test_a_filter_sees_how_many_episodes_are_missing():
    seen = []
    judge = make_judge([seen.append], drop_older_than=None)
    judge(replace(random_groups(0, tools=True)[0], missing={"died": 1, "hung": 2}), 5)
    assert seen[0].missing == 3


@pytest.mark.parametrize("reason", ["length", "turns", "time"])
def test_whatever_cut_an_episode_off_its_tokens_may_be_masked(reason):
    first = random_groups(1, tools=False)[0]
    cut_off, *rest = first.rollouts
    rest = [replace(one, finish_reason="stop") for one in rest]
    group = replace(first, rollouts=(replace(cut_off, finish_reason=reason), *rest))
    stopped = replace(group, rollouts=(replace(cut_off, finish_reason="stop"), *rest))
    kept = [
        planned([one], mask_truncated=True, mask_stale=False).minibatches[0].counts
        for one in (group, stopped)
    ]
    assert kept[1].tokens - kept[0].tokens == cut_off.actions
    assert planned([group]).rewards.truncated_S.tolist() == [True, False, False]


def played(seed: int) -> Step:
    """A step with branched episodes, trained by a fake."""
    groups = branched(with_turns(random_groups(seed, tools=True), seed), seed)
    plan = planned(groups)
    results = [FakeTrainer().step(minibatch.microbatches, None) for minibatch in plan.minibatches]
    return Step(
        version=6,
        collected=Collected(groups=[*groups], takes=1),
        plan=plan,
        results=tuple(results),
        seconds={"train": 1.0},
    )


def test_metrics_count_an_episode_once():
    step = played(3)
    groups = step.collected.groups
    whole = with_turns(random_groups(3, tools=True), 3)
    found, expected = (
        step_metrics(replace(step, collected=replace(step.collected, groups=tuple(one))))
        for one in (groups, whole)
    )
    assert {name for name in found if found[name] != expected[name]} == {
        "episodes/sequences_mean",
        "sequences/duplicate_share",
    }
    episodes = [episode for group in groups for episode in group.by_episode]
    assert found["episodes/sequences_mean"] == len(step.plan.sequences) / len(episodes) > 1
    turns = [sum(len(rollout.turns.ends) for rollout in episode) for episode in episodes]
    assert (found["episodes/turns_mean"], found["episodes/turns_max"]) == (np.mean(turns), max(turns))
    states = np.concatenate([one.turns.states for episode in episodes for one in episode])
    assert found["episodes/stateless_turn_share"] == pytest.approx(np.mean(states == 0))
    ended = [episode[0].finish_reason for episode in episodes]
    assert found["episodes/ended_share/length"] == ended.count("length") / len(ended)
    assert found["episodes/ended_share/other"] == 0.0
    assert found["completions/truncated_share"] == found["episodes/ended_share/length"]


def test_an_environments_numbers_are_means_over_the_episodes_that_have_them():
    def metric(*values: float) -> np.ndarray:
        return np.array(values, dtype=np.float32)

    first, second, *_ = with_turns(random_groups(0, tools=False), 0)
    first = replace(
        first, episode_metrics={"tools/calls": metric(1, np.nan, 3), "never": metric(*[np.nan] * 3)}
    )
    second = replace(second, episode_metrics={"tools/calls": metric(5, 5, 5)})
    found = episode_metrics([first, second])
    assert found["environment/tools/calls"] == (1 + 3 + 5 + 5 + 5) / 5
    assert "environment/never" not in found
    single = random_groups(0, tools=False)
    assert episode_metrics(single) == {}, "a run without an environment has none of them"


def test_tokens_that_sequences_repeat_are_counted():
    """A prompt of 2; a branch repeats the prompt and 3 of 4 tokens, and adds 2: 5 of 13.

    Another conversation between both changes nothing but the sum.
    """
    batch = Batch()
    first, other = batch.rollout(1.0, [5] * 4), batch.rollout(1.0, [5] * 5)
    ids = np.concatenate([first.response_ids[:3], other.response_ids[3:]])
    branch = replace(other, response_ids=ids, action_mask=np.array([False] * 3 + [True] * 2))
    else_ids = np.array([8, 9], dtype=np.int32)
    between = replace(batch.rollout(1.0, [5] * 3), prompt_ids=else_ids)
    for rollouts, share in (((first, branch), 5 / 13), ((first, between, branch), 5 / 18)):
        group = Group(
            ticket_id=1,
            rollouts=rollouts,
            generator_id="g",
            finished_version=5,
            episode_of=np.zeros(len(rollouts), np.int32),
        )
        assert episode_metrics([group])["sequences/duplicate_share"] == share


def test_metrics_by_turn_are_means_over_the_tokens_of_these_turns():
    batch = Batch()
    long, short = batch.rollout(1.0, [2, 2, 3, 5, 5, 5]), batch.rollout(0.0, [1, 5])
    long = replace(long, turns=Turns(ends=np.array([2, 3, 4, 6], np.int32)))
    groups = batch.group(long, replace(short, turns=Turns(ends=np.array([2], np.int32)))).groups
    plan = planned([replace(groups[0], greedy_reward=0.0)])
    masked = {name.rpartition("/")[2]: share for name, share in plan.masked.items() if "/turn/" in name}
    assert masked == pytest.approx({"first": 3 / 4, "middle": 0.0, "last": 0.0})
    [minibatch] = plan.minibatches
    parts = [policy_metrics(one.tokens, one.tokens.behaviour_logprobs_T) for one in minibatch.microbatches]
    found = finish(merge(parts))
    tokens = {long.response_ids[2]: "middle", long.response_ids[3]: "middle", short.response_ids[1]: "first"}
    tokens |= dict.fromkeys(long.response_ids[4:], "last")
    assert [found[f"tokens/{name}"] for name in TURNS] == [1, 2, 2]
    for name in TURNS:
        gaps = [abs(known("logprobs_T", t) + 1.0) for t, where in tokens.items() if where == name]
        assert found[f"mismatch/turn/{name}"] == pytest.approx(np.mean(gaps), rel=1e-5)


def test_a_sample_shows_where_the_environment_spoke():
    batch = Batch()
    rollout = batch.rollout(1.0, [5] * 5, tools=[1, 2])
    step = played(0)
    group = replace(step.collected.groups[0], rollouts=(rollout,), episode_of=None)
    [record] = eval_records([group], 3, lambda ids: " ".join(map(str, ids)))
    assert record.response == "[model] 1\n[environment] 2 3\n[model] 4 5"
    plain = replace(group, rollouts=(batch.rollout(1.0, [5] * 2),))
    assert eval_records([plain], 3, lambda ids: "".join(f"{one} " for one in ids))[0].response == "6 7 "
