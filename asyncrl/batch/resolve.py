"""From a config to a `Recipe`: the one place where the names of an algorithm become functions, before the
first step."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from asyncrl.algo.token_advantages import value_targets
from asyncrl.batch.coefficients import Coefficients
from asyncrl.batch.critic_steps import CriticSteps
from asyncrl.batch.estimate import Estimator
from asyncrl.batch.objective import Objective
from asyncrl.batch.plan import Planner, PlanSettings
from asyncrl.batch.recipe import Recipe
from asyncrl.config import registry
from asyncrl.config.algorithm import AlgorithmConfig, CriticConfig
from asyncrl.config.base import Choice
from asyncrl.config.sections import BatchConfig
from asyncrl.errors import ConfigError
from asyncrl.trainer.base import COLUMNS

GREEDY = "greedy_rewards_group"
# Columns of `GroupRewards` that cost extra and are made when an advantage needs them.
USABLE = frozenset({"values_T", "logprobs_T", "reference_logprobs_T", "sum_squared_probs_T", GREEDY})


def make_recipe(
    config: AlgorithmConfig,
    batch: BatchConfig,
    critic: CriticConfig,
    settings: PlanSettings,
    *,
    max_response_tokens: int,
    reward_parts: Sequence[str],
) -> Recipe:
    """Resolve every name. Raises ConfigError."""
    columns = columns_of(config, batch)
    return Recipe(
        planner=Planner(
            columns=columns,
            proximal=measures_proximal(config, batch),
            over_step=normalises(config),
            settings=settings,
            estimator=make_estimator(config, max_response_tokens=max_response_tokens, parts=reward_parts),
        ),
        objective=make_objective(config, max_response_tokens=max_response_tokens),
        coefficients=Coefficients(config.kl, config.entropy),
        critic=CriticSteps(clip=critic.clip, epochs=batch.epochs, warmup_steps=critic.warmup_steps)
        if "values_T" in columns
        else None,
        epochs=batch.epochs,
        reference_decay=config.kl.reference_decay if "reference_logprobs_T" in columns else 1.0,
    )


def make_estimator(config: AlgorithmConfig, *, max_response_tokens: int, parts: Sequence[str]) -> Estimator:
    """The advantage, with what stands between it and the rewards. `parts` names the reward's parts. Raises
    ConfigError."""
    advantage, kl = config.advantage, config.kl
    needs = registry.needs("advantage", advantage.name)
    if unknown := needs - USABLE:
        raise ConfigError(
            f"advantage `{advantage.name}` needs {sorted(unknown)}; it may need {sorted(USABLE)}"
        )
    known = inspect.signature(value_targets).parameters
    discounts = {name: value for name, value in advantage.params.items() if name in known}
    return Estimator(
        advantage=_function("advantage", advantage),
        max_response_tokens=max_response_tokens,
        parts=parts,
        shaping=[_function("shaping", choice) for choice in config.shaping],
        penalty=_function("kl", kl.estimator) if kl.coefficient and kl.placement == "reward" else None,
        targets=partial(value_targets, **discounts) if "values_T" in needs else None,
        needs_greedy=GREEDY in needs,
    )


def make_objective(config: AlgorithmConfig, *, max_response_tokens: int) -> Objective:
    """The loss with every choice resolved. Raises ConfigError."""
    return Objective(
        policy_loss=_function("policy_loss", config.policy_loss),
        correction=_function("correction", config.correction),
        rejections=tuple(_function("correction", choice) for choice in config.rejections),
        aggregation=_function("aggregation", config.aggregation),
        kl=_function("kl", config.kl.estimator),
        kl_in_loss=config.kl.placement == "loss",
        kl_bias_corrected=config.kl.bias_corrected,
        proximal=config.proximal,
        max_response_tokens=max_response_tokens,
    )


def _function(kind: str, choice: Choice) -> Callable[..., Any]:
    return registry.resolve(kind, choice.name, choice.params)


def columns_of(algorithm: AlgorithmConfig, batch: BatchConfig) -> frozenset[str]:
    """What `Trainer.measure` must measure for this algorithm; nothing for the default."""
    columns = {"logprobs_T"} if measures_proximal(algorithm, batch) else set()
    if algorithm.kl.coefficient:
        columns |= {"reference_logprobs_T"}
        if algorithm.kl.placement == "reward":
            columns |= {"logprobs_T"}
    return registry.needs("advantage", algorithm.advantage.name) & COLUMNS | columns


def measures_proximal(algorithm: AlgorithmConfig, batch: BatchConfig) -> bool:
    """With one optimizer step per batch the proximal policy is the one that the step itself evaluates.

    Weights that are divided by their mean over the step must be known before it all the same.
    """
    return algorithm.proximal == "recompute" and (
        batch.epochs * batch.minibatches > 1 or normalises(algorithm)
    )


def normalises(algorithm: AlgorithmConfig) -> bool:
    """Whether the correction's weights depend on all tokens of the optimizer step."""
    return bool(algorithm.correction.params.get("normalise"))
