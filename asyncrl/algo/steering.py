"""Changes the coefficients of KL penalty and entropy bonus after each step, by a measurement."""


def adapt_coefficient(coefficient: float, kl: float, *, target: float, horizon: float, steps: float) -> float:
    """The next KL coefficient: higher if the measured KL is above its target, by at most 20 % per horizon.

    Args:
        kl: measured over the last `steps`, in nats per token.
        horizon: how many steps a full correction takes; same unit as `steps`, of which more change no more.

    Source: Ziegler et al. 2019 (arXiv:1909.08593). A fixed coefficient needs no function.
    """
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + error * min(steps / horizon, 1.0))


def adapt_bonus(coefficient: float, entropy: float, *, target: float, step: float, maximum: float) -> float:
    """The next coefficient in 0 .. maximum: + `step` if the entropy is below its target, - `step` if above.

    Args:
        entropy: measured, in nats per token; so is `target`.

    Source: Skywork-OR1 2025 (arXiv:2505.22312), adaptive entropy control.
    """
    change = step if entropy < target else -step if entropy > target else 0.0
    return min(max(coefficient + change, 0.0), maximum)


def acting_bonus(coefficient: float, entropy: float, *, target: float) -> float:
    """The coefficient in the loss: 0 while the entropy is above its target. Source: as `adapt_bonus`."""
    return coefficient if entropy <= target else 0.0
