"""Functions of the user's own in a recipe: they get what the built-in ones of their kind get."""

import numpy as np
import pytest
import torch

from asyncrl.algo.shaping import soft_overlong
from asyncrl.batch.masks import PlanSettings
from asyncrl.batch.recipe import Recipe
from asyncrl.batch.resolve import make_recipe
from asyncrl.config.algorithm import AlgorithmConfig, CriticConfig
from asyncrl.config.sections import BatchConfig
from asyncrl.types import Group, Rollout, VersionSpan

MINE = """
from asyncrl.algo.corrections import truncate
from asyncrl.algo.losses import TokenLoss
from asyncrl.algo.token_advantages import gae

def advantage(rewards, *, gamma=0.5, gae_lambda=0.5):
    return gae(rewards, gamma=gamma, gae_lambda=gae_lambda, whitened=False)

advantage.needs = {"values_T"}

def by_default(batch, *, normalise: bool = True, step=None):
    return truncate(batch, normalise=normalise, step=step)

def required(batch, *, step):
    return truncate(batch, normalise=True, step=step)

def loss(batch, logprobs_T, *, entropy_T):
    return TokenLoss(-batch.advantages_T * logprobs_T + 0 * entropy_T)
"""


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "own_choices.py"
    path.write_text(MINE)
    return lambda name: f"{path}:{name}"


def recipe(*, tokens_per_microbatch: int = 100, **algorithm) -> Recipe:
    settings = PlanSettings(
        max_lag=4,
        mask_stale=False,
        mask_truncated=False,
        minibatches=1,
        tokens_per_microbatch=tokens_per_microbatch,
        share=0,
        shares=1,
        device=torch.device("cpu"),
    )
    return make_recipe(
        AlgorithmConfig.model_validate(algorithm),
        BatchConfig(groups=2, group_size=2),
        CriticConfig(),
        settings,
        max_response_tokens=8,
        reward_parts=(),
    )


@pytest.fixture
def groups():
    random = np.random.default_rng(0)

    def rollout(reward: float, tokens: int) -> Rollout:
        return Rollout(
            prompt_ids=np.array([1], np.int32),
            response_ids=np.arange(2, 2 + tokens, dtype=np.int32),
            action_mask=np.ones(tokens, bool),
            behaviour_logprobs=random.uniform(-2, -0.1, tokens).astype(np.float32),
            version_spans=(VersionSpan(0, tokens),),
            finish_reason="stop",
            reward=reward,
        )

    return [
        Group(ticket_id=number, rollouts=(rollout(1, 5), rollout(0, 3)), generator_id="g", finished_version=0)
        for number in (1, 2)
    ]


def test_the_critic_learns_the_targets_of_an_advantage_by_its_own_defaults(mine, groups):
    values = {"values_T": torch.zeros(16)}
    built_in = {"name": "gae", "gamma": 0.5, "gae_lambda": 0.5, "whitened": False}
    for other in (built_in, {"name": mine("advantage"), "gamma": 0.5, "gae_lambda": 0.5}):
        found, expected = (
            recipe(advantage=one).planner.estimator.estimate(groups, values, 0.0)[1:]
            for one in (mine("advantage"), other)
        )
        for one, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(one, theirs)


@pytest.mark.parametrize("name", ["by_default", "required"])
def test_a_correction_that_takes_the_step_gets_it_however_the_step_is_cut(mine, groups, name):
    def gradients(correction: object, tokens_per_microbatch: int) -> torch.Tensor:
        made = recipe(
            tokens_per_microbatch=tokens_per_microbatch,
            correction=correction,
            policy_loss={"name": mine("loss")},
        )
        samples = made.planner.assemble(groups, 1)
        measured = {column: torch.full((16,), -1.0) for column in made.planner.columns}
        (minibatch,) = made.planner.plan(groups, samples, measured, 0.0).minibatches
        loss = made.objective.loss(
            minibatch.counts, kl_coefficient=0.0, entropy_coefficient=0.0, step=minibatch.tokens
        )
        squares = []
        for one in minibatch.microbatches:
            logprobs = torch.full((len(one.target_T),), -1.0, requires_grad=True)
            loss(one, logprobs, torch.zeros_like(logprobs)).loss.backward()
            squares.append(logprobs.grad.square().sum())
        return torch.stack(squares).sum()

    whole, cut = (gradients(mine(name), tokens) for tokens in (100, 6))
    torch.testing.assert_close(whole, cut)
    torch.testing.assert_close(whole, gradients({"name": "truncate", "normalise": True}, 100))


def test_an_answer_that_is_cut_pays_the_whole_penalty_though_tools_wrote_a_part_of_it():
    """The limit counts the texts of tools, too."""
    found = [
        soft_overlong(
            0.0, response_tokens=tokens, max_response_tokens=100, finish_reason=how, buffer_tokens=20
        )
        for tokens, how in ((100, "length"), (50, "length"), (85, "stop"), (50, "stop"))
    ]
    assert found == [-1.0, -1.0, -0.25, 0.0]
