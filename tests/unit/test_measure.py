"""Measured columns: which an algorithm wants, that every rank ends with the same, and that nothing is
measured for nothing."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl.algo.advantages import grpo
from asyncrl.algo.preferences import distill
from asyncrl.batch.estimate import Estimator
from asyncrl.batch.masks import measure
from asyncrl.batch.packing import per_sample
from asyncrl.batch.plan import Planner
from asyncrl.batch.resolve import make_recipe
from asyncrl.columns import TEACHER
from asyncrl.config.algorithm import AlgorithmConfig, CriticConfig, KLConfig
from asyncrl.config.base import Choice
from asyncrl.config.sections import BatchConfig
from asyncrl.trainer.base import COLUMNS
from tests.support.fake_learner import SETTINGS, FakeTrainer, Meeting, mixed_batch

PLANNER = Planner(
    estimator=Estimator(advantage=grpo, max_response_tokens=8),
    columns=frozenset(),
    proximal=False,
    settings=SETTINGS,
)


@pytest.mark.parametrize("budget_tokens", [10, 24, 1000])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_holds_every_column_in_group_order(ranks, budget_tokens):
    batch = mixed_batch()
    sequences = PLANNER.assemble(batch.groups, 5)
    meeting = Meeting(ranks)
    trainers = [FakeTrainer(meeting, rank) for rank in range(ranks)]

    def one(trainer):
        return measure(trainer, sequences, COLUMNS, replace(SETTINGS, tokens_per_microbatch=budget_tokens))

    with ThreadPoolExecutor(ranks) as pool:
        results = list(pool.map(one, trainers))
    for columns in results:
        assert columns.keys() == COLUMNS
        for name, column_T in columns.items():
            assert column_T.dtype == torch.float32
            torch.testing.assert_close(column_T, batch.column(name), atol=0, rtol=0)
    # The same collectives on every rank.
    assert len({trainer.measured_microbatches for trainer in trainers}) == 1


def test_more_ranks_than_sequences_is_no_special_case():
    batch = mixed_batch()
    batch.groups = batch.groups[:1]
    sequences = PLANNER.assemble(batch.groups, 5)
    meeting = Meeting(3)
    with ThreadPoolExecutor(3) as pool:
        results = list(
            pool.map(
                lambda rank: measure(FakeTrainer(meeting, rank), sequences, {"values_T"}, SETTINGS), range(3)
            )
        )
    for columns in results:
        torch.testing.assert_close(columns["values_T"], batch.column("values_T"), atol=0, rtol=0)


def columns_of(algorithm: dict, batch: dict) -> frozenset[str]:
    recipe = make_recipe(
        AlgorithmConfig(**algorithm),
        BatchConfig(**batch),
        CriticConfig(),
        SETTINGS,
        max_response_tokens=8,
        reward_parts=(),
    )
    return recipe.planner.columns


def test_nothing_runs_for_nothing():
    trainer = FakeTrainer()
    sequences = PLANNER.assemble(mixed_batch().groups, 5)
    wanted = columns_of({}, {})
    assert measure(trainer, sequences, wanted, SETTINGS) == {}
    assert trainer.events == []


def test_a_batch_without_any_action_has_empty_columns():
    batch = mixed_batch()
    sequences = PLANNER.assemble(batch.groups[3:], 5)[1:]
    columns = measure(FakeTrainer(), sequences, {"values_T"}, SETTINGS)
    assert columns["values_T"].numel() == 0


def advantage(name: str) -> dict:
    return {"advantage": Choice(name=name)}


@pytest.mark.parametrize(
    ("algorithm", "batch", "columns"),
    [
        ({}, {}, ""),
        ({}, {"epochs": 2}, "logprobs_T"),
        ({}, {"minibatches": 4}, "logprobs_T"),
        ({"proximal": "log_linear"}, {"epochs": 2}, ""),
        ({"proximal": "behaviour"}, {"epochs": 2}, ""),
        ({"kl": KLConfig(coefficient=0.1)}, {}, "reference_logprobs_T"),
        ({"kl": KLConfig(coefficient=0.1, placement="reward")}, {}, "reference_logprobs_T logprobs_T"),
        ({"kl": KLConfig(placement="reward")}, {}, ""),
        (advantage("gae"), {}, "values_T"),
        (advantage("gae"), {"epochs": 2}, "values_T logprobs_T"),
        (advantage("remax"), {}, ""),
        (advantage("optimal_token_baseline"), {}, "logprobs_T sum_squared_probs_T"),
    ],
)
def test_an_algorithm_wants_what_it_uses(algorithm, batch, columns):
    assert columns_of(algorithm, batch) == frozenset(columns.split())


def test_lag_and_actions_are_those_of_the_rollouts():
    batch = mixed_batch()
    sequences = PLANNER.assemble(batch.groups, 5)
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    for rollout, sequence in zip(rollouts, sequences, strict=True):
        assert np.array_equal(sequence.lag, 5 - rollout.versions)
        assert np.array_equal(sequence.keep, rollout.action_mask)


def test_a_column_of_a_teacher_takes_the_place_of_the_reference_and_nothing_else_changes():
    """Advantages, and what the loss reads, are equal to the last bit; so the gradient is."""
    batch, wanted = mixed_batch(), frozenset({"logprobs_T", "reference_logprobs_T"})
    planner = replace(
        PLANNER,
        estimator=Estimator(advantage=distill, max_response_tokens=8, needs=wanted),
        columns=wanted,
        proximal=True,
    )
    samples = planner.assemble(batch.groups, 5)
    pieces = per_sample(batch.column("reference_logprobs_T"), samples)
    taught = [
        replace(sample, recorded={TEACHER: np.where(sample.keep, piece, 7.0).astype(np.float32)})
        for sample, piece in zip(samples, pieces, strict=True)
    ]

    class Asked(FakeTrainer):
        names: tuple[str, ...] = ()

        def measure(self, microbatches, columns):
            self.names += tuple(columns)
            return super().measure(microbatches, columns)

    trainer = Asked()
    own, theirs = planner.measure(trainer, samples), planner.measure(trainer, taught)
    assert trainer.names == ("logprobs_T", "reference_logprobs_T", "logprobs_T")
    assert own.keys() == theirs.keys() == wanted
    plans = [
        planner.plan(batch.groups, each, found, 0.0) for each, found in ((samples, own), (taught, theirs))
    ]
    for right, other in zip(*(plan.minibatches[0].microbatches for plan in plans), strict=True):
        for name in ("advantages_T", "reference_logprobs_T", "proximal_logprobs_T"):
            found = getattr(other.tokens, name)
            assert found is not None and torch.equal(getattr(right.tokens, name), found)
    assert plans[0].rewards.reference_logprobs_T is not None
    # A batch with a group that lacks it, as after a resume, is measured as a whole.
    lacking = np.full_like(taught[0].recorded[TEACHER], np.nan)
    mixed = planner.measure(trainer, [replace(taught[0], recorded={TEACHER: lacking}), *taught[1:]])
    assert torch.equal(mixed["reference_logprobs_T"], own["reference_logprobs_T"])
    # It is the column that counts: with another one, the advantages differ.
    moved = planner.measure(
        trainer, [replace(one, recorded={TEACHER: one.recorded[TEACHER] - 1}) for one in taught]
    )
    assert torch.equal(moved["reference_logprobs_T"], own["reference_logprobs_T"] - 1)
