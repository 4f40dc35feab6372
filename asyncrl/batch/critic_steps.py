"""The critic's part of a step."""

from dataclasses import dataclass

from torch import Tensor

from asyncrl.algo.aggregation import Counts, token_mean
from asyncrl.algo.tokens import sums
from asyncrl.algo.value import value_loss
from asyncrl.batch.plan import Plan
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
