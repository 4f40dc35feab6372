"""Sections of the algorithm: which functions are composed, with what numbers (see docs/algorithms.md)."""

from typing import Annotated, Literal

from asyncrl.algo.ranges import NonNegative, NonNegativeInt, Positive, PositiveInt, Share
from asyncrl.config.base import Choice, Part, marked
from asyncrl.config.resume import REFUSED, refused

_TEACHER = refused("the training so far was held to the other reference")


class ReferenceConfig(Part):
    """The reference model, where it is not the initial policy: a teacher."""

    path: Annotated[str, _TEACHER]
    """A Hugging Face directory or hub name; its tokenizer must be that of model.path."""
    revision: Annotated[str | None, _TEACHER] = None
    """Hub revision; pin it for repeatable runs."""
    scorers: NonNegativeInt = 0
    """Processes that hold the teacher, if it is too large for the learner; 0: the learner holds it."""
    gpus: tuple[NonNegativeInt, ...] = ()
    """GPUs of each of these processes in turn, by number; by default all processes see all GPUs."""


class KLConfig(Part):
    """Penalty for distance from the reference model, which is the initial policy or `algorithm.reference`."""

    coefficient: NonNegative = 0.0
    """Strength of the penalty; 0 loads no reference, unless the advantage needs it."""
    estimator: Annotated[Choice, marked(kind="kl")] = Choice(name="k3")
    """Estimator of a token's divergence."""
    bias_corrected: bool = False
    """True multiplies the KL in the loss by the current / behaviour probability ratio, so that it is the KL
    of the trained policy (DeepSeek-V3.2)."""
    placement: Literal["loss", "reward"] = "loss"
    """`loss` adds the KL to the loss; `reward` subtracts it from the reward of every token."""
    target: Positive | None = None
    """KL in nats per token that an adaptive coefficient aims at; null keeps the coefficient fixed."""
    horizon: Positive = 10000.0
    """Number of sequences over which the coefficient may change by a fifth."""
    reference_decay: Share = 1.0
    """Share of itself that the reference keeps after a step; the rest is the policy's. 1 freezes it."""


class EntropyConfig(Part):
    """Bonus for the entropy of the token distribution."""

    coefficient: float = 0.0
    """Coefficient of the bonus; with `target` its initial value."""
    target: Positive | None = None
    """Entropy in nats per token. Below it the coefficient grows by `step` per batch and acts; above it the
    coefficient falls and does not act."""
    step: Positive = 0.005
    """Change of the adaptive coefficient after a batch."""
    maximum: Positive = 1.0
    """Largest value of the adaptive coefficient; the smallest is 0."""


class AlgorithmConfig(Part):
    """Four independent choices, plus KL, entropy, filters and reward shaping."""

    advantage: Annotated[
        Choice,
        marked(
            kind="advantage",
            resume=(
                REFUSED,
                "a critic is stored with its optimizer state; both advantages must have one, or neither",
            ),
        ),
    ] = Choice(name="grpo")
    """Function from rewards to the advantage of each token."""
    policy_loss: Annotated[Choice, marked(kind="policy_loss")] = Choice(name="ppo_clip")
    """Function from advantage and probabilities to the loss of a token."""
    correction: Annotated[Choice, marked(kind="correction")] = Choice(name="truncate")
    """Importance weights of stale tokens, from the behaviour to the proximal policy."""
    rejections: tuple[Annotated[Choice, marked(kind="correction")], ...] = ()
    """Further corrections that only reject tokens; the weights are those of `correction`."""
    proximal: Literal["recompute", "log_linear", "behaviour"] = "recompute"
    """Proximal policy: `recompute` by a forward pass at the start of the batch, `log_linear` by
    interpolation, or `behaviour` for the behaviour policy."""
    aggregation: Annotated[Choice, marked(kind="aggregation")] = Choice(name="token-mean")
    """Function from the losses of all tokens to one loss."""
    reference: ReferenceConfig | None = None
    """A teacher in place of the initial policy, for `distill` and every other use of a reference."""
    kl: KLConfig = KLConfig()
    entropy: EntropyConfig = EntropyConfig()
    filters: tuple[Annotated[Choice, marked(kind="filter")], ...] = ()
    """Group filters, such as `zero_variance` (dynamic sampling); rejected groups are replaced."""
    max_refills: PositiveInt = 10
    """Limit of rejected groups per step, in batches; above it the run stops with the reason."""
    shaping: tuple[Annotated[Choice, marked(kind="shaping")], ...] = ()
    """Reward shaping, such as `soft_overlong`."""
    mask_truncated: bool = False
    """True masks rollouts that the length limit cut off (overlong filtering); they count for the baseline."""


class OptimizerConfig(Part):
    """AdamW."""

    lr: Positive = 1e-6
    """Learning rate after the warm-up."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """Decay of the first and second moments."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay, as in AdamW."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps in which the learning rate rises linearly to `lr`."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: `lr` throughout, or falling to `final_share` of it at the end of the
    run (`learner.steps`). A resumed run goes on at its number of optimizer steps."""
    final_share: Share = 0.0
    """Share of `lr` that is left at the end of the run, where `schedule` lets it fall."""
    max_grad_norm: Positive = 1.0
    """Norm to which a larger gradient is scaled down."""


class CriticConfig(Part):
    """Value model, which starts with the policy's backbone. It exists only if the advantage needs values."""

    clip: Positive | None = 0.5
    """Largest distance of a new value from the value used for the advantages; null is unlimited."""
    warmup_steps: NonNegativeInt = 0
    """Steps during which only the critic is trained."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
