"""The algorithm: which functions are composed, and with what numbers. `docs/algorithms.md` says which to choose."""

from typing import Literal

from asyncrl.config.base import Choice, NonNegative, NonNegativeFloat, Part, Positive, PositiveFloat, Share


class KLConfig(Part):
    """Penalty for distance from the reference model, which is the initial policy."""

    coefficient: NonNegativeFloat = 0.0
    """Strength of the penalty; 0 switches the reference model off."""
    estimator: Choice = Choice(name="k3")
    """Estimator of a token's divergence."""
    bias_corrected: bool = False
    """True multiplies the KL in the loss by the current / behaviour probability ratio, so that it is the KL
    of the trained policy (DeepSeek-V3.2)."""
    placement: Literal["loss", "reward"] = "loss"
    """`loss` adds the KL to the loss; `reward` subtracts it from the reward of every token."""
    target: PositiveFloat | None = None
    """KL in nats per token that an adaptive coefficient aims at; null keeps the coefficient fixed."""
    horizon: PositiveFloat = 10000.0
    """Number of sequences over which the coefficient may change by a fifth."""
    reference_decay: Share = 1.0
    """1 freezes the reference. Below 1, the reference keeps this share of itself after each step and takes
    the rest from the policy."""


class EntropyConfig(Part):
    """Bonus for the entropy of the token distribution."""

    coefficient: float = 0.0
    """Coefficient of the bonus; with `target` its initial value."""
    target: PositiveFloat | None = None
    """Entropy in nats per token. Below it the coefficient grows by `step` per batch and acts; above it the
    coefficient falls and does not act."""
    step: PositiveFloat = 0.005
    """Change of the adaptive coefficient after a batch."""
    maximum: PositiveFloat = 1.0
    """Largest value of the adaptive coefficient; the smallest is 0."""


class AlgorithmConfig(Part):
    """Four independent choices, plus KL, entropy, filters and reward shaping."""

    advantage: Choice = Choice(name="grpo")
    """Function from rewards to the advantage of each token."""
    policy_loss: Choice = Choice(name="ppo_clip")
    """Function from advantage and probabilities to the loss of a token."""
    correction: Choice = Choice(name="truncate")
    """Importance weights of stale tokens, from the behaviour to the proximal policy."""
    rejections: tuple[Choice, ...] = ()
    """Further corrections that only reject tokens; the weights are those of `correction`."""
    proximal: Literal["recompute", "log_linear", "behaviour"] = "recompute"
    """Source of the proximal policy: `recompute` by a forward pass at the start of the batch, `log_linear` by
    interpolation, or `behaviour` for the behaviour policy."""
    aggregation: Choice = Choice(name="token-mean")
    """Function from the losses of all tokens to one loss."""
    kl: KLConfig = KLConfig()
    entropy: EntropyConfig = EntropyConfig()
    filters: tuple[Choice, ...] = ()
    """Group filters, such as `zero_variance` (dynamic sampling); rejected groups are replaced."""
    max_refills: Positive = 10
    """Limit of rejected groups per optimizer step, in batches; above it the run stops with the reason."""
    shaping: tuple[Choice, ...] = ()
    """Reward shaping, such as `soft_overlong`."""
    mask_truncated: bool = False
    """True masks rollouts that were cut off at the length limit (overlong filtering); they still count for
    the baseline."""


class OptimizerConfig(Part):
    """AdamW."""

    lr: PositiveFloat = 1e-6
    """Learning rate after the warm-up; constant."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """Decay of the first and second moments."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay, as in AdamW."""
    warmup_steps: NonNegative = 0
    """Steps in which the learning rate rises linearly to `lr`."""
    max_grad_norm: PositiveFloat = 1.0
    """Norm to which a larger gradient is scaled down."""


class CriticConfig(Part):
    """Value model of `gae`, with a backbone that starts as the policy's. It exists only if the advantage
    needs values."""

    clip: PositiveFloat | None = 0.5
    """Largest distance of a value from the value that the advantages were computed with; null is unlimited."""
    warmup_steps: NonNegative = 0
    """Steps during which only the critic is trained."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
