"""What a run optimises: an algorithm's choices as functions, in the order in which a step needs them."""

from dataclasses import dataclass

from asyncrl.batch.coefficients import Coefficients
from asyncrl.batch.critic_steps import CriticSteps
from asyncrl.batch.objective import Objective
from asyncrl.batch.plan import Plan, Planner
from asyncrl.trainer.base import StepResult, Trainer


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
