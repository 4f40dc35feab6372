"""A bonus for entropy that keeps it near a target."""


def adapt_bonus(coefficient: float, entropy: float, *, target: float, step: float, maximum: float) -> float:
    """The next coefficient, within 0 .. maximum: `step` more when the measured entropy is below its target, `step` less above.

    Args:
        entropy: measured, in nats per token; so is `target`.

    Source: He et al. 2025 (arXiv:2505.22312), Skywork-OR1, adaptive entropy control.
    """
    change = step if entropy < target else -step if entropy > target else 0.0
    return min(max(coefficient + change, 0.0), maximum)


def acting_bonus(coefficient: float, entropy: float, *, target: float) -> float:
    """What the loss uses: nothing while the entropy is above its target. Source: as `adapt_bonus`."""
    return coefficient if entropy <= target else 0.0
