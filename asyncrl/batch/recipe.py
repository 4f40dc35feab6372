"""What a run optimises: the choices of a config, resolved, in the order in which a step needs them."""

from dataclasses import dataclass

from asyncrl.batch.coefficients import Coefficients
from asyncrl.batch.objective import Objective, critic_loss
from asyncrl.batch.plan import Plan, Planner
from asyncrl.config.algorithm import CriticConfig
from asyncrl.trainer.base import StepResult, Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Plan, critic steps, policy steps, and what changes from step to step."""

    planner: Planner
    objective: Objective
    coefficients: Coefficients
    critic: CriticConfig | None
    """None where no advantage needs values."""
    epochs: int
    reference_decay: float
    """1: the reference is frozen, or there is none."""

    def train_critic(self, trainer: Trainer, plan: Plan) -> tuple[StepResult, ...]:
        """The critic's optimizer steps; none without a critic."""
        if self.critic is None:
            return ()
        return tuple(
            trainer.critic_step(minibatch.microbatches, critic_loss(minibatch.counts, clip=self.critic.clip))
            for _ in range(self.epochs)
            for minibatch in plan.minibatches
        )

    def train_policy(self, trainer: Trainer, plan: Plan, version: int) -> tuple[StepResult, ...]:
        """The policy's optimizer steps, then what follows from them; none in the versions that warm the critic up."""
        if self.critic is not None and version < self.critic.warmup_steps:
            return ()
        kl, entropy = self.coefficients.kl, self.coefficients.entropy
        results = tuple(
            trainer.step(
                minibatch.microbatches,
                self.objective.loss(minibatch.counts, kl_coefficient=kl, entropy_coefficient=entropy, step=minibatch.tokens),
            )
            for _ in range(self.epochs)
            for minibatch in plan.minibatches
        )
        self.coefficients.adapt(results, sequences=len(plan.sequences))
        if self.reference_decay < 1.0:
            trainer.update_reference(self.reference_decay)
        return results
