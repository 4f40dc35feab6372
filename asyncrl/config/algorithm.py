"""Sections of the algorithm: which functions are composed, with what numbers (see docs/algorithms.md)."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, WithJsonSchema

from asyncrl.algo.ranges import NonNegative, NonNegativeInt, Positive, PositiveInt, Share
from asyncrl.config.base import REFUSED, Choice, Part, marked, refused

ANY_SETTINGS = {"type": "object", "additionalProperties": True}

_TEACHER = refused("the training so far was held to the other reference")


class ReferenceConfig(Part):
    """A teacher as the reference, in place of the initial policy."""

    path: Annotated[str | None, _TEACHER] = None
    """Its directory or hub name, with the tokenizer of model.path; null is model.path."""
    revision: Annotated[str | None, _TEACHER] = None
    """Hub revision; pin it for repeatable runs."""
    template: Annotated[str | None, _TEACHER] = None
    """Text with {column} placeholders that the teacher reads in place of the prompt, such as the reference
    answer, which the policy does not see; needs `scorers`."""
    scorers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Processes that hold the teacher; at 0 the learner holds it."""
    gpus: tuple[NonNegativeInt, ...] = ()
    """GPUs of these processes in turn, which generators leave free; by default the first one."""


class KLConfig(Part):
    """Penalty for distance from the initial policy or `algorithm.reference`."""

    coefficient: NonNegative = 0.0
    """Strength; 0 loads no reference, unless the advantage needs it."""
    estimator: Annotated[Choice, marked(kind="kl")] = Choice(name="k3")
    """Estimator of a token's divergence."""
    bias_corrected: bool = False
    """True multiplies the KL in the loss by the current / behaviour ratio (DeepSeek-V3.2)."""
    placement: Literal["loss", "reward"] = "loss"
    """`loss` adds the KL to the loss; `reward` subtracts it from the reward of every token."""
    target: Positive | None = None
    """KL in nats per token that an adaptive coefficient aims at."""
    horizon: Positive = 10000.0
    """Sequences over which the coefficient may change by a fifth."""
    reference_decay: Share = 1.0
    """Share of itself that the reference keeps after a step; 1 freezes it."""


class EntropyConfig(Part):
    """Bonus for the entropy of the token distribution."""

    coefficient: float = 0.0
    """Factor of the bonus; with `target` its initial value."""
    target: Positive | None = None
    """Entropy in nats per token below which the coefficient grows and acts."""
    step: Positive = 0.005
    """Change of the adaptive coefficient after a batch."""
    maximum: Positive = 1.0
    """Largest value of the adaptive coefficient; the smallest is 0."""


class ImitationConfig(Part):
    """Cross-entropy on the tokens of the policy's own good answers (VAPO)."""

    coefficient: NonNegative = 0.0
    """Weight of the mean of -ln pi over their tokens in the loss; VAPO has 0.1."""
    solved: float = 1.0
    """Reward, after shaping, from which an answer is imitated."""


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
    """Advantage of each token from the rewards."""
    policy_loss: Annotated[Choice, marked(kind="policy_loss")] = Choice(name="ppo_clip")
    """Loss of a token from its advantage and probabilities."""
    correction: Annotated[Choice, marked(kind="correction")] = Choice(name="truncate")
    """Importance weights of stale tokens."""
    rejections: tuple[Annotated[Choice, marked(kind="correction")], ...] = ()
    """Further corrections that only reject tokens."""
    proximal: Literal["recompute", "log_linear", "behaviour"] = "recompute"
    """Proximal policy: a forward pass, an interpolation, or the behaviour policy."""
    aggregation: Annotated[Choice, marked(kind="aggregation")] = Choice(name="token-mean")
    """Loss from the losses of all tokens."""
    reference: ReferenceConfig | None = None
    """A teacher as the reference, in place of the initial policy."""
    kl: KLConfig = KLConfig()
    entropy: EntropyConfig = EntropyConfig()
    imitation: ImitationConfig = ImitationConfig()
    filters: tuple[Annotated[Choice, marked(kind="filter")], ...] = ()
    """Group filters, such as `zero_variance`; rejected groups are replaced."""
    max_refills: PositiveInt = 10
    """Most rejected groups per step, in batches, before the run stops."""
    shaping: tuple[Annotated[Choice, marked(kind="shaping")], ...] = ()
    """Reward shaping, such as `soft_overlong`."""
    mask_truncated: bool = False
    """True masks rollouts that were cut off, except in the baseline."""


Optimizer = Literal["adamw", "adamw_8bit", "muon", "adafactor"]
Schedule = Literal[
    "constant",
    "linear",
    "cosine",
    "cosine_with_min_lr",
    "cosine_with_restarts",
    "inverse_sqrt",
    "polynomial",
    "warmup_stable_decay",
]


Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Part):
    """Optimizer and learning rate."""

    kind: Annotated[Optimizer, refused("the checkpoint holds the state of this optimizer")] = "adamw"
    """`adamw_8bit` has moments of 8 bits; `muon` steps the matrices of layers, AdamW the rest. `muon` and
    `adafactor` need `zero_stage` 0."""
    lr: Positive = 1e-6
    """Learning rate after the warm-up."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay of both moments; `adafactor` has its own."""
    eps: Positive = 1e-8
    """Added to the root of the second moment; `adafactor` has its own."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    warmup_steps: NonNegativeInt | Annotated[float, Field(gt=0, lt=1)] = 0
    """Optimizer steps of linear rise to `lr`; below 1 a share of all."""
    schedule: Schedule = "constant"
    """Schedule of transformers after the warm-up, until `learner.steps`."""
    schedule_arguments: Annotated[dict[str, JsonValue], WithJsonSchema(ANY_SETTINGS)] = Field(
        default_factory=dict
    )
    """Arguments of the schedule, such as `num_decay_steps`."""
    max_grad_norm: Positive = 1.0
    """Norm to which a larger gradient is scaled down."""

    def warmup_of(self, steps: int) -> int:
        """Return how many of a run's optimizer steps are its warm-up."""
        warmup = self.warmup_steps
        return math.ceil(warmup * steps) if isinstance(warmup, float) else warmup

    def rates(self, steps: int) -> dict[str, Any]:
        """Return the arguments of `rate_share` for a run of so many optimizer steps."""
        numbers = {"warmup_steps": self.warmup_of(steps), "total_steps": steps, "lr": self.lr}
        return {"schedule": self.schedule, "arguments": self.schedule_arguments, **numbers}


class CriticConfig(Part):
    """Value model of an advantage that needs values."""

    clip: Positive | None = 0.5
    """Largest distance of a new value from the old; null is unlimited."""
    warmup_steps: NonNegativeInt = 0
    """Steps that train only the critic."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
