"""What a run optimises: an algorithm's choices as functions, in the order in which a step needs them."""

from dataclasses import dataclass

from torch import Tensor

from asyncrl.algo.aggregation import Counts, token_mean
from asyncrl.algo.losses import value_loss
from asyncrl.algo.tokens import sums
from asyncrl.batch.coefficients import Coefficients
from asyncrl.batch.objective import Objective
from asyncrl.batch.plan import Plan, Planner
from asyncrl.trainer.base import LOSS, CriticLossFunction, LossSums, MicroBatch, StepResult, Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSteps:
    """The training of the critic, for advantages that need values."""

    clip: float | None  # PPO's clip range of the values; None does not clip
    epochs: int
    warmup_steps: int  # number of first steps in which only the critic learns

    def train(self, trainer: Trainer, plan: Plan) -> tuple[StepResult, ...]:
        """Make one optimizer step per epoch and minibatch."""
        return tuple(
            trainer.critic_step(minibatch.microbatches, critic_loss(minibatch.counts, clip=self.clip))
            for _ in range(self.epochs)
            for minibatch in plan.minibatches
        )


def critic_loss(counts: Counts, *, clip: float | None) -> CriticLossFunction:
    """Return the loss function of one optimizer step: the mean over the tokens of all ranks."""

    def loss_of(microbatch: MicroBatch, values_T: Tensor) -> LossSums:
        tokens = microbatch.tokens
        assert tokens.values_T is not None and tokens.returns_T is not None
        token_loss = value_loss(values_T, tokens.values_T, tokens.returns_T, clip=clip)
        loss = token_mean(token_loss.losses_T, tokens, counts)
        of_loss = {f"critic/{name}": value for name, value in token_loss.metrics.items()}
        return LossSums(
            loss=loss, metrics={**of_loss, "tokens": float(tokens.tokens), **sums(**{LOSS: loss})}
        )

    return loss_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How groups become a plan, how the plan is trained, and what changes from step to step."""

    planner: Planner
    objective: Objective
    coefficients: Coefficients
    critic: CriticSteps | None  # None where no advantage needs values
    epochs: int
    reference_decay: float  # 1 if the reference is frozen, or if there is none

    def train_policy(self, trainer: Trainer, plan: Plan, version: int) -> tuple[StepResult, ...]:
        """Run the policy's optimizer steps, then adapt coefficients and reference; in the warm-up not."""
        if tracker := self.planner.estimator.tracker:
            tracker.record(plan.rewards)
        if self.critic and version < self.critic.warmup_steps:
            return ()
        kl, entropy = self.coefficients.kl, self.coefficients.entropy
        results = tuple(
            trainer.step(
                minibatch.microbatches,
                self.objective.loss(
                    minibatch.counts, kl_coefficient=kl, entropy_coefficient=entropy, step=minibatch.tokens
                ),
                entropy_gradient=bool(entropy),
            )
            for _ in range(self.epochs)
            for minibatch in plan.minibatches
        )
        self.coefficients.adapt(results, sequences=plan.rewards.num_sequences)
        if self.reference_decay < 1.0:
            trainer.update_reference(self.reference_decay)
        return results
