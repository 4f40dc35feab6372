"""Makes the `Recipe` from the config: before the first step, the names of an algorithm become functions."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from asyncrl.algo.corrections import Correction, combined
from asyncrl.algo.ranges import is_solved
from asyncrl.algo.token_advantages import value_targets
from asyncrl.algo.tokens import TokenBatch
from asyncrl.algo.turn_advantages import turn_value_targets
from asyncrl.batch.coefficients import Coefficients, RowOf, Tracker
from asyncrl.batch.estimate import Estimator
from asyncrl.batch.masks import PlanSettings
from asyncrl.batch.objective import Objective
from asyncrl.batch.packing import SampleImages
from asyncrl.batch.plan import Planner
from asyncrl.batch.recipe import CriticSteps, Recipe
from asyncrl.config import registry
from asyncrl.config.algorithm import AlgorithmConfig, CriticConfig
from asyncrl.config.base import Choice
from asyncrl.config.schema import Config
from asyncrl.config.sections import BatchConfig
from asyncrl.errors import ConfigError
from asyncrl.trainer.base import COLUMNS

# Columns of `GroupRewards` that cost extra and are made only if the advantage needs them.
USABLE = COLUMNS | {"greedy_rewards_group", registry.EXPECTED} | registry.OF_TURNS


def make_recipe(
    config: AlgorithmConfig,
    batch: BatchConfig,
    critic: CriticConfig,
    settings: PlanSettings,
    *,
    max_response_tokens: int,
    reward_parts: Sequence[str],
    row: RowOf = int,
) -> Recipe:
    """Resolve every name. Raises ConfigError.

    `reward_parts` names the parts of the reward. `row` returns the row of a ticket, by default its own.
    """
    advantage, kl, imitation = config.advantage, config.kl, config.imitation
    needs = registry.needs("advantage", advantage.name)
    if unknown := needs - USABLE:
        raise ConfigError(
            f"advantage `{advantage.name}` needs {sorted(unknown)}; it may need {sorted(USABLE)}"
        )
    over_step = any(map(_sees_step, (config.correction, *config.rejections)))
    # The only optimizer step of a batch evaluates the proximal policy itself, but not before it begins.
    measures_proximal = config.proximal == "recompute" and (batch.epochs * batch.minibatches > 1 or over_step)
    pays_kl = kl.coefficient > 0 and kl.placement == "reward"
    reference = frozenset({"reference_logprobs_T"} if kl.coefficient else ())
    logprobs = frozenset({"logprobs_T"} if measures_proximal or pays_kl else ())
    columns = needs & COLUMNS | reference | logprobs
    has_critic = "values_T" in columns
    make_targets = turn_value_targets if advantage.name == "turn_gae" else value_targets
    known = inspect.signature(make_targets).parameters
    function = _function("advantage", advantage)
    defaults = {name: one.default for name, one in inspect.signature(function).parameters.items()}
    discounts = {name: defaults[name] for name in defaults if name in known and name != "rewards"}
    estimator = Estimator(
        advantage=function,
        max_response_tokens=max_response_tokens,
        parts=reward_parts,
        shaping=[_function("shaping", choice) for choice in config.shaping],
        penalty=_function("kl", kl.estimator) if pays_kl else None,
        targets=partial(make_targets, **discounts) if has_critic else None,
        needs=needs,
        # Without a parameter `decay` nothing is forgotten.
        tracker=Tracker(row, decay=defaults.get("decay", 1.0)) if registry.EXPECTED in needs else None,
    )
    return Recipe(
        planner=Planner(
            estimator=estimator,
            columns=columns,
            imitates=partial(is_solved, solved=imitation.solved) if imitation.coefficient else None,
            proximal=measures_proximal,
            over_step=over_step,
            settings=settings,
        ),
        objective=make_objective(config, max_response_tokens=max_response_tokens),
        coefficients=Coefficients(kl, config.entropy),
        critic=CriticSteps(clip=critic.clip, epochs=batch.epochs, warmup_steps=critic.warmup_steps)
        if has_critic
        else None,
        epochs=batch.epochs,
        reference_decay=kl.reference_decay if "reference_logprobs_T" in columns else 1.0,
    )


def recipe_of(
    config: Config, *, share: int, device: torch.device, row: RowOf, images: SampleImages | None = None
) -> Recipe:
    """Resolve what a run optimises, for one share of every batch; see `make_recipe`. Raises ConfigError."""
    settings = PlanSettings(
        max_lag=config.staleness.max_lag,
        mask_stale=config.staleness.policy == "mask",
        mask_truncated=config.algorithm.mask_truncated,
        minibatches=config.batch.minibatches,
        tokens_per_microbatch=config.learner.tokens_per_microbatch,
        share=share,
        shares=config.learner.shares,
        device=device,
        images=images,
    )
    return make_recipe(
        config.algorithm,
        config.batch,
        config.critic,
        settings,
        max_response_tokens=config.sampling.max_response_tokens,
        reward_parts=config.reward_parts,
        row=row,
    )


def make_objective(config: AlgorithmConfig, *, max_response_tokens: int) -> Objective:
    """Resolve the names in the loss. Raises ConfigError."""
    return Objective(
        policy_loss=_function("policy_loss", config.policy_loss),
        correction=_corrections((config.correction, *config.rejections)),
        aggregation=_function("aggregation", config.aggregation),
        kl=_function("kl", config.kl.estimator),
        imitation=config.imitation.coefficient,
        kl_in_loss=config.kl.placement == "loss",
        kl_bias_corrected=config.kl.bias_corrected,
        proximal=config.proximal,
        max_response_tokens=max_response_tokens,
    )


def _corrections(choices: Sequence[Choice]) -> Callable[[TokenBatch, TokenBatch | None], Correction]:
    """Resolve the correction, which comes first, and its rejections to one function."""
    functions = [(_function("correction", choice), _sees_step(choice)) for choice in choices]

    def correct(tokens: TokenBatch, step: TokenBatch | None) -> Correction:
        first, *others = (one(tokens, step=step) if sees else one(tokens) for one, sees in functions)
        return combined(first, others)

    return correct


def _sees_step(choice: Choice) -> bool:
    own = ":" in choice.name
    return registry.takes(_function("correction", choice), "step") if own else registry.sees_step(choice)


def _function(kind: str, choice: Choice) -> Callable[..., Any]:
    return registry.resolve(kind, choice.name, choice.params)
