"""The loss of one micro-batch, composed from the four choices of an algorithm plus KL and entropy."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from asyncrl.algo import registry
from asyncrl.algo.aggregation import Counts
from asyncrl.algo.corrections import Correction
from asyncrl.algo.losses import TokenLoss
from asyncrl.algo.metrics import merge, policy_metrics
from asyncrl.algo.tokens import TokenBatch
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.base import Choice
from asyncrl.config.schema import BatchConfig
from asyncrl.trainer.base import LossFunction, LossSums, MicroBatch, Trainer

LOSS = "loss"
"""Metric that is a sum already divided by the counts of the step; all others are sums over tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """An algorithm's loss with every choice resolved to a function."""

    policy_loss: Callable[..., TokenLoss]
    correction: Callable[[TokenBatch], Correction]
    aggregation: Callable[..., Tensor]
    kl: Callable[[Tensor, Tensor], Tensor]
    kl_coefficient: float
    entropy_coefficient: float
    recompute_proximal: bool
    one_step: bool
    """One optimizer step per batch: then the proximal policy is the one that the step itself evaluates."""

    @classmethod
    def build(cls, config: AlgorithmConfig, batch: BatchConfig) -> "Objective":
        """Resolve names of `config`. Raises ConfigError."""

        def resolve(kind: str, choice: Choice) -> Callable[..., Any]:
            return registry.resolve(kind, choice.name, choice.params)

        return cls(
            policy_loss=resolve("policy_loss", config.policy_loss),
            correction=resolve("correction", config.correction),
            aggregation=resolve("aggregation", config.aggregation),
            kl=resolve("kl", config.kl.estimator),
            kl_coefficient=config.kl.coefficient,
            entropy_coefficient=config.entropy.coefficient,
            recompute_proximal=config.proximal == "recompute",
            one_step=batch.epochs * batch.minibatches == 1,
        )

    def fill(self, trainer: Trainer, microbatches: tuple[MicroBatch, ...]) -> tuple[MicroBatch, ...]:
        """Proximal and reference columns, where they need a pass of their own. Once per batch."""
        columns = {"logprobs_T"} if self.recompute_proximal and not self.one_step else set()
        columns |= {"reference_logprobs_T"} if self.kl_coefficient else set()
        if not columns:
            return microbatches
        filled = []
        for microbatch, measured in zip(microbatches, trainer.measure(microbatches, columns), strict=True):
            tokens = replace(
                microbatch.tokens,
                proximal_logprobs_T=measured.get("logprobs_T"),
                reference_logprobs_T=measured.get("reference_logprobs_T"),
            )
            filled.append(replace(microbatch, tokens=tokens))
        return tuple(filled)

    def _correct(self, tokens: TokenBatch, logprobs_T: Tensor) -> tuple[TokenBatch, Mapping[str, float]]:
        """Importance weights behaviour -> proximal, and what the correction counts; nothing where they are the same."""
        if not self.recompute_proximal:
            return tokens, {}
        if self.one_step:
            tokens = replace(tokens, proximal_logprobs_T=logprobs_T.detach())
        correction = self.correction(tokens)
        return replace(tokens, weights_T=correction.weights_T), correction.metrics

    def loss(self, counts: Counts) -> LossFunction:
        """The loss function of one optimizer step, given its token and sequence counts over all ranks."""

        wants_entropy = registry.takes(self.policy_loss, "entropy_T")

        def loss_of(microbatch: MicroBatch, logprobs_T: Tensor, entropy_T: Tensor) -> LossSums:
            tokens, corrected = self._correct(microbatch.tokens, logprobs_T)
            extra = {"entropy_T": entropy_T} if wants_entropy else {}
            token_loss = self.policy_loss(tokens, logprobs_T, **extra)
            losses_T = token_loss.losses_T
            counted = {f"policy/{name}": value for name, value in token_loss.metrics.items()}
            counted |= {f"weight/{name}": value for name, value in corrected.items()}
            metrics = merge([policy_metrics(tokens, logprobs_T, entropy_T.detach()), counted])
            if tokens.reference_logprobs_T is not None:
                kl_T = self.kl(logprobs_T, tokens.reference_logprobs_T)
                losses_T = losses_T + self.kl_coefficient * kl_T
                metrics["policy/kl_reference"] = float(kl_T.detach().sum())
            if self.entropy_coefficient:
                losses_T = losses_T - self.entropy_coefficient * entropy_T
            loss = self.aggregation(losses_T, tokens, counts)
            return LossSums(loss=loss, metrics=metrics | {LOSS: float(loss.detach())})

        return loss_of
