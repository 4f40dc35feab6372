"""The algorithm: which functions are composed, and with what numbers. `docs/algorithms.md` says which to choose."""

from typing import Literal

from asyncrl.config.base import Choice, NonNegative, NonNegativeFloat, Part, Positive, PositiveFloat, Share


class KLConfig(Part):
    """Penalty towards the reference model, which starts as the policy."""

    coefficient: NonNegativeFloat = 0.0
    """0 switches the reference model off."""
    estimator: Choice = Choice(name="k3")
    """How the divergence of a token is estimated."""
    bias_corrected: bool = False
    """In the loss: times current / behaviour probability, so that it is the KL of the policy that is trained (DeepSeek-V3.2)."""
    placement: Literal["loss", "reward"] = "loss"
    """In the loss, or subtracted from the reward of every token."""
    target: PositiveFloat | None = None
    """Nats per token: the coefficient adapts so that the KL stays near it; null keeps it fixed."""
    horizon: PositiveFloat = 10000.0
    """Sequences over which the coefficient may change by a fifth."""
    reference_decay: Share = 1.0
    """1: the reference is frozen. Below: after each step it keeps this share of itself and takes the rest from the policy."""


class EntropyConfig(Part):
    """Bonus for the entropy of the token distribution."""

    coefficient: float = 0.0
    """Where it begins; fixed without `target`."""
    target: PositiveFloat | None = None
    """Nats per token: below it the coefficient grows by `step` per batch, above it falls, and acts only below."""
    step: PositiveFloat = 0.005
    """How much the adaptive coefficient changes after a batch."""
    maximum: PositiveFloat = 1.0
    """The adaptive coefficient stays in 0 .. maximum."""


class AlgorithmConfig(Part):
    """Four independent choices, plus KL, entropy, filters and reward shaping."""

    advantage: Choice = Choice(name="grpo")
    """From rewards to what each token is trained with."""
    policy_loss: Choice = Choice(name="ppo_clip")
    """Loss of a token, from its advantage and its probabilities."""
    correction: Choice = Choice(name="truncate")
    """Behaviour to proximal: importance weights of stale tokens."""
    rejections: tuple[Choice, ...] = ()
    """Further corrections, of which only the rejections count: the weights are those of `correction`."""
    proximal: Literal["recompute", "log_linear", "behaviour"] = "recompute"
    """Decoupled (weights at the start of the update, by a forward pass or interpolated), or bypass (the behaviour policy)."""
    aggregation: Choice = Choice(name="token-mean")
    """How the losses of tokens become one."""
    kl: KLConfig = KLConfig()
    entropy: EntropyConfig = EntropyConfig()
    filters: tuple[Choice, ...] = ()
    """Group filters, e.g. `zero_variance` (dynamic sampling); what they reject is refilled."""
    max_refills: Positive = 10
    """Batches' worth of groups that filters may reject for one optimizer step before the run stops and says why."""
    shaping: tuple[Choice, ...] = ()
    """Reward shaping, e.g. `soft_overlong`."""
    mask_truncated: bool = False
    """Overlong filtering: rollouts cut off at the length limit leave the loss (not the baseline)."""


class OptimizerConfig(Part):
    """AdamW."""

    lr: PositiveFloat = 1e-6
    """Learning rate after the warm-up; constant."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """Decay of the first and second moments."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled, as in AdamW."""
    warmup_steps: NonNegative = 0
    """Steps in which the learning rate rises linearly to `lr`."""
    max_grad_norm: PositiveFloat = 1.0
    """A longer gradient is scaled down to this norm."""


class CriticConfig(Part):
    """The value model of `gae`: its own backbone, which starts as the policy's; there only if the advantage needs values."""

    clip: PositiveFloat | None = 0.5
    """How far a value may move from the one that the advantages were made with; null: anywhere."""
    warmup_steps: NonNegative = 0
    """Steps in which only the critic learns."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
