"""Group filters: each returns the reason to reject a whole group, or None. Plain floats, no tensors.

A rejected group is counted under its reason, and the learner refills the batch (dynamic sampling).
"""

from dataclasses import dataclass

from asyncrl.algo.ranges import EQUAL, NonNegative


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutcome:
    """The input of a filter: one entry per episode of the group, without environment of each response."""

    rewards: tuple[float, ...]  # before shaping and KL
    lengths: tuple[int, ...]  # in tokens that the policy sampled
    finish_reasons: tuple[str, ...]  # `stop`, or what cut it off: `length`, `turns` or `time`
    missing: int = 0  # episodes that failed, and that the group goes without


def zero_variance(group: GroupOutcome, *, tolerance: NonNegative = EQUAL) -> str | None:
    """Rejects a group whose rewards are all equal, for its advantages are zero.

    Keeps a group of one, unless other episodes are missing.

    Source: Yu et al. 2025 (arXiv:2503.14476) sec. 3.2, dynamic sampling.
    """
    is_compared = len(group.rewards) + group.missing > 1
    is_flat = max(group.rewards) - min(group.rewards) <= tolerance
    return "zero_variance" if is_compared and is_flat else None


def reward_range(group: GroupOutcome, *, low: float, high: float) -> str | None:
    """Keeps a group whose mean reward lies strictly between low and high: not too hard, not too easy.

    Both bounds are required because they depend on the scale of the reward.
    Source: Cui et al. 2025 (arXiv:2502.01456), online prompt filtering.
    """
    mean = sum(group.rewards) / len(group.rewards)
    if mean <= low:
        return "reward_too_low"
    return "reward_too_high" if mean >= high else None
