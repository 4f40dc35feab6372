"""The published metrics of what only some algorithms have: a critic, steered coefficients; and those of a user's hooks."""

import logging

import numpy as np
import torch

from asyncrl.algo.metrics import finish, merge
from asyncrl.algo.value import explained_variance
from asyncrl.learner import Step
from asyncrl.trainer.base import LOSS

log = logging.getLogger(__name__)


def algorithm_metrics(step: Step) -> dict[str, float]:
    """By name; nothing where there is none of it."""
    return {**_critic_metrics(step), **step.coefficients, **step.hook_metrics}


def _critic_metrics(step: Step) -> dict[str, float]:
    values_T, returns_T, results = step.plan.rewards.values_T, step.plan.returns_T, step.critic_results
    if not results or values_T is None or returns_T is None:
        return {}
    sums = merge(result.metrics for result in results)
    loss, skipped = sums.pop(LOSS, 0.0), sums.pop("skipped_steps", 0.0)
    if skipped:
        log.warning(
            "step %d: %d of %d optimizer steps of the critic were left out, as a loss or gradient was not finite; if it goes "
            "on, look at critic/grad_norm, and lower critic.optimizer.lr",
            *(step.version, skipped, len(results)),
        )
    return {
        **{name: value for name, value in finish(sums).items() if name.startswith("critic/")},
        "critic/loss": loss / len(results),
        "critic/grad_norm": float(np.max([result.grad_norm for result in results])),
        "critic/lr": results[-1].lr,
        "critic/skipped_steps": skipped,
        "critic/explained_variance": explained_variance(values_T, returns_T),
        **{
            f"critic/{name}_{last}": float(reduce(column_T))
            for name, column_T in (("value", values_T), ("return", returns_T))
            for last, reduce in (("mean", torch.mean), ("min", torch.min), ("max", torch.max))
        },
    }
