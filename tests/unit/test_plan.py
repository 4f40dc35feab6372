"""From groups to micro-batches: nothing is lost, masks leave the loss but not the baseline, every rank sees
the same plan."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from asyncrl.algo.advantages import dr_grpo, grpo
from asyncrl.algo.ranges import is_solved
from asyncrl.algo.shaping import soft_overlong
from asyncrl.batch.estimate import Estimator
from asyncrl.batch.masks import PlanSettings
from asyncrl.batch.plan import Plan, Planner
from asyncrl.types import Group, Rollout, VersionSpan
from tests.support.fake_learner import SETTINGS


def make_plan(
    groups, version: int, *, advantage, shaping: Sequence = (), settings: PlanSettings, **more
) -> Plan:
    estimator = Estimator(advantage=advantage, shaping=shaping, max_response_tokens=8)
    planner = Planner(estimator=estimator, columns=frozenset(), proximal=False, settings=settings, **more)
    return planner.plan(groups, planner.assemble(groups, version), {}, 0.0)


def rollout(reward: float, length: int, *, version: int = 5, finish: str = "stop", tool: int = 0) -> Rollout:
    mask = np.ones(length, dtype=bool)
    mask[:tool] = False
    return Rollout(
        prompt_ids=np.array([1, 2], dtype=np.int32),
        response_ids=np.arange(3, 3 + length, dtype=np.int32),
        action_mask=mask,
        behaviour_logprobs=np.full(length, -1.0, dtype=np.float32),
        version_spans=(VersionSpan(version - 1, 1), VersionSpan(version, length - 1))
        if length > 1
        else (VersionSpan(version, 1),),
        finish_reason=finish,
        reward=reward,
    )


def group(ticket_id: int, *rollouts: Rollout) -> Group:
    return Group(ticket_id=ticket_id, rollouts=rollouts, generator_id="g", finished_version=5)


GROUPS = [
    group(1, rollout(1.0, 3), rollout(0.0, 5)),
    group(2, rollout(2.0, 8, finish="length"), rollout(0.0, 1)),
    group(3, rollout(0.5, 4, tool=2), rollout(0.5, 6, version=3)),
    group(4, rollout(3.0, 7), rollout(1.0, 2)),
]


def columns(plan) -> dict[tuple[int, int], tuple[float, int]]:
    """(advantage, lag) of every trained token, by (length of its sequence's N, target id), a unique key."""
    found: dict[tuple[int, int], tuple[float, int]] = {}
    for minibatch in plan.minibatches:
        for one in minibatch.microbatches:
            starts = torch.tensor(one.sequence_starts)
            lengths = starts[1:] - starts[:-1]
            for t in range(one.tokens.tokens):
                key = (int(lengths[one.tokens.sequence_T[t]]), int(one.target_T[t]))
                assert key not in found
                found[key] = (float(one.tokens.advantages_T[t]), int(one.tokens.lag_T[t]))
                assert one.input_ids_N[one.source_T[t] + 1] == one.target_T[t]
    return found


def test_every_action_token_is_planned_once_with_its_groups_advantage():
    plan = make_plan(GROUPS, 5, advantage=dr_grpo, settings=SETTINGS)
    found = columns(plan)
    expected = {}
    for one in GROUPS:
        mean = np.mean([r.reward for r in one.rollouts])
        for r in one.rollouts:
            for token, action, version in zip(r.response_ids, r.action_mask, r.versions, strict=True):
                if action and 5 - version <= 2:
                    expected[(2 + len(r.response_ids), int(token))] = (
                        pytest.approx(r.reward - mean),
                        5 - version,
                    )
    assert found == expected
    assert plan.minibatches[0].counts.tokens == len(found)


def test_a_stale_token_leaves_the_loss_and_its_group_keeps_its_baseline():
    strict = columns(make_plan(GROUPS, 6, advantage=dr_grpo, settings=replace(SETTINGS, max_lag=1)))
    free = columns(make_plan(GROUPS, 6, advantage=dr_grpo, settings=replace(SETTINGS, mask_stale=False)))
    assert strict.items() < free.items()
    assert {lag for _, lag in strict.values()} == {1}


def test_an_answer_whose_weighted_sum_is_1_but_for_rounding_is_imitated():
    groups = [group(1, rollout(0.7 + 0.2 + 0.1, 3), rollout(0.9, 3))] * SETTINGS.minibatches
    plan = make_plan(groups, 5, advantage=dr_grpo, settings=SETTINGS, imitates=is_solved)
    assert [set(one.columns["solved_T"].tolist()) for one in plan.sequences[:2]] == [{1.0}, {0.0}]


def test_overlong_filtering_takes_out_the_rollout_and_not_its_reward():
    plain = columns(make_plan(GROUPS, 5, advantage=grpo, settings=SETTINGS))
    filtered = columns(make_plan(GROUPS, 5, advantage=grpo, settings=replace(SETTINGS, mask_truncated=True)))
    assert filtered.items() < plain.items()
    assert {length for length, _ in plain.keys() - filtered.keys()} == {10}


def test_what_masks_take_out_is_told_by_reason_and_by_length():
    """Lengths 3, 5, 8, 1, 2 actions of 4, 6, 7, 2; the limit is 8: up to 2 is short, up to 5 medium."""
    settings = replace(SETTINGS, max_lag=2, mask_truncated=True)
    # Of version 3, and its first token of 2: too old.
    plan = make_plan(GROUPS, 6, advantage=grpo, settings=settings)
    assert plan.masked == pytest.approx(
        {
            "staleness/masked_share": 6 / 34,
            "staleness/masked_share/short": 0.0,
            "staleness/masked_share/medium": 0.0,
            "staleness/masked_share/long": 6 / 21,
            "completions/masked_share": 8 / 34,
        }
    )
    kept = sum(int(sequence.keep.sum()) for sequence in plan.sequences)
    assert kept == round(
        34 * (1 - plan.masked["staleness/masked_share"] - plan.masked["completions/masked_share"])
    )
    free = make_plan(GROUPS, 6, advantage=grpo, settings=replace(SETTINGS, mask_stale=False))
    assert set(free.masked.values()) == {0.0}


def test_a_token_that_two_masks_take_out_counts_once_as_stale():
    old = [group(1, rollout(1.0, 8, version=2, finish="length"), rollout(0.0, 8, version=2))]
    masked = make_plan(old, 5, advantage=grpo, settings=replace(SETTINGS, mask_truncated=True)).masked
    assert (masked["staleness/masked_share"], masked["completions/masked_share"]) == (1.0, 0.0)


def test_shaping_changes_the_advantage_and_not_the_recorded_reward():
    shape = partial(soft_overlong, buffer_tokens=4, penalty=1.0)
    plan = make_plan(GROUPS, 5, advantage=dr_grpo, shaping=[shape], settings=SETTINGS)
    shaped = plan.rewards.rewards_S.tolist()
    assert shaped[2] == pytest.approx(2.0 - 1.0)  # 8 of 8 tokens: the whole penalty
    assert shaped[6] == pytest.approx(3.0 - 0.75)
    assert shaped[0] == 1.0


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("minibatches", [1, 2, 4])
def test_ranks_share_the_same_tokens_out(ranks, minibatches):
    whole = columns(make_plan(GROUPS, 5, advantage=dr_grpo, settings=SETTINGS))
    merged: dict = {}
    counts = set()
    for rank in range(ranks):
        settings = replace(SETTINGS, share=rank, shares=ranks, minibatches=minibatches)
        plan = make_plan(GROUPS, 5, advantage=dr_grpo, settings=settings)
        part = columns(plan)
        assert not merged.keys() & part.keys()
        merged |= part
        counts.add(
            tuple((m.counts.tokens, m.counts.sequences, len(m.microbatches)) for m in plan.minibatches)
        )
    assert merged == whole
    assert len(counts) == 1  # the same collectives on every rank
    assert sum(tokens for tokens, _, _ in counts.pop()) == len(whole)
