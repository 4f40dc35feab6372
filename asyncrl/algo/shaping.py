"""Reward shaping: functions from a rollout's reward to its shaped reward. Plain floats.

The learner calls `shape(reward, response_tokens=..., max_response_tokens=..., finish_reason=...)`; the
rollout keeps its raw reward.
"""

from asyncrl.algo.ranges import NonNegative, PositiveInt


def soft_overlong(
    reward: float,
    *,
    response_tokens: int,
    max_response_tokens: int,
    finish_reason: str,
    buffer_tokens: PositiveInt,
    penalty: NonNegative = 1.0,
) -> float:
    """reward - penalty * clip((response_tokens - max_response_tokens) / buffer_tokens + 1, 0, 1).

    The penalty is 0 up to `buffer_tokens` before the limit, then grows linearly to `penalty` at the limit.
    Source: Yu et al. 2025 (arXiv:2503.14476) eq. 13, DAPO.
    """
    excess_tokens = response_tokens - (max_response_tokens - buffer_tokens)
    if (
        finish_reason == "length"
    ):  # texts that were not sampled, such as results of tools, count for the limit
        excess_tokens = buffer_tokens
    return reward - penalty * min(max(excess_tokens / buffer_tokens, 0.0), 1.0)
