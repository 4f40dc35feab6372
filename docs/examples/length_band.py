"""Keep responses between 30 and 80 tokens, by a shaping function and a hook; docs/hooks.md explains them."""

import logging
from collections.abc import Sequence
from typing import Any

log = logging.getLogger(__name__)


def shape(
    reward: float,
    *,
    response_tokens: int,
    max_response_tokens: int,
    finish_reason: str,
    low: int = 30,
    high: int = 80,
    weight: float = 0.1,
    magnitude: float = 1.0,
) -> float:
    """Return reward - weight * magnitude * distance; distance is 0 inside [low, high] and grows to 1 outside.

    The distance is 1 for an empty response and from 2 * high tokens on. So length alone never costs more than
    the share `weight` of the difference between a good and a bad answer.

    Args:
        reward: reward of the rollout before shaping.
        response_tokens: length of the response.
        max_response_tokens: the longest response allowed; unused here.
        finish_reason: `stop` or `length`; unused here.
        low: shortest response without a penalty, in tokens.
        high: longest response without a penalty, in tokens.
        weight: the largest penalty, as a share of `magnitude`.
        magnitude: difference between the rewards of a good and a bad answer.
    """
    below, above = max(low - response_tokens, 0) / max(low, 1), max(response_tokens - high, 0) / high
    return reward - weight * magnitude * min(below + above, 1.0)


class LengthDrift:
    """Publish the trend of response lengths, and warn when it becomes large."""

    def __init__(
        self, *, low: int = 30, high: int = 80, decay: float = 0.9, largest_drift_tokens: float = 5.0
    ) -> None:
        """Take the band in tokens, the decay of the mean per step, and the largest drift per step."""
        self._low, self._high = low, high
        self._decay = decay
        self._largest_drift_tokens = largest_drift_tokens
        self._mean_tokens: float | None = None
        self._was_outside = False

    def before_step(self, plan: Any) -> dict[str, float]:
        """Return the pull of this step on the length; above 0 it teaches longer responses."""
        lengths = [len(sequence.response_ids) for sequence in plan.sequences]
        advantages = [
            float(sequence.advantages[sequence.keep].mean()) if sequence.keep.any() else 0.0
            for sequence in plan.sequences
        ]
        middle = mean(lengths)
        pull = mean([a * (length - middle) for a, length in zip(advantages, lengths, strict=True)])
        outside = mean([float(not self._low <= length <= self._high) for length in lengths])
        return {"length/pull": pull, "length/outside_share": outside}

    def after_step(self, step: Any) -> dict[str, float]:
        """Update the mean; warn of a large drift, and once each time the mean leaves the band."""
        rollouts = [rollout for group in step.collected.groups for rollout in group.rollouts]
        newest = mean([rollout.actions for rollout in rollouts])
        before = newest if self._mean_tokens is None else self._mean_tokens
        self._mean_tokens = self._decay * before + (1.0 - self._decay) * newest
        drift_tokens = self._mean_tokens - before
        if abs(drift_tokens) > self._largest_drift_tokens:
            found = step.version, drift_tokens, self._mean_tokens
            log.warning("step %d: the mean length moved by %+.1f tokens to %.1f", *found)
        is_outside = not self._low <= self._mean_tokens <= self._high
        if is_outside and not self._was_outside:
            log.warning(
                "step %d: the mean length, %.1f tokens, is outside %d to %d: raise the weight of the "
                "shaping, or move the band",
                *(step.version, self._mean_tokens, self._low, self._high),
            )
        self._was_outside = is_outside
        return {"length/mean": self._mean_tokens, "length/drift": drift_tokens}


def mean(values: Sequence[float]) -> float:
    """Return the mean; 0 for no values."""
    return sum(values) / len(values) if values else 0.0
