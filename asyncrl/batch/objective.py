"""The policy's loss of one micro-batch, composed from an algorithm's choices: correction, loss, KL, entropy,
aggregation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from asyncrl.algo.aggregation import Counts
from asyncrl.algo.corrections import Correction, combined, log_linear
from asyncrl.algo.kl import bias_corrected
from asyncrl.algo.losses import TokenLoss
from asyncrl.algo.metrics import merge, policy_metrics
from asyncrl.algo.tokens import TokenBatch
from asyncrl.config import registry
from asyncrl.trainer.base import LOSS, LossFunction, LossSums, MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """An algorithm's loss with every choice resolved to a function."""

    policy_loss: Callable[..., TokenLoss]
    correction: Callable[..., Correction]
    rejections: tuple[Callable[[TokenBatch], Correction], ...]
    aggregation: Callable[..., Tensor]
    kl: Callable[[Tensor, Tensor], Tensor]
    kl_in_loss: bool
    kl_bias_corrected: bool
    proximal: Literal["recompute", "log_linear", "behaviour"]
    max_response_tokens: int
    """What lengths are measured against in metrics."""

    def loss(
        self,
        counts: Counts,
        *,
        kl_coefficient: float,
        entropy_coefficient: float,
        step: TokenBatch | None = None,
    ) -> LossFunction:
        """The loss function of one optimizer step, given its counts, and where the correction asks its
        tokens, of all ranks."""

        wants_entropy = registry.takes(self.policy_loss, "entropy_T")

        def loss_of(microbatch: MicroBatch, logprobs_T: Tensor, entropy_T: Tensor) -> LossSums:
            tokens, corrected = self._correct(microbatch.tokens, logprobs_T, step)
            extra = {"entropy_T": entropy_T} if wants_entropy else {}
            token_loss = self.policy_loss(tokens, logprobs_T, **extra)
            losses_T = token_loss.losses_T
            counted = {f"policy/{name}": value for name, value in token_loss.metrics.items()}
            counted |= {f"weight/{name}": value for name, value in corrected.items()}
            measured = policy_metrics(
                tokens,
                logprobs_T,
                entropy_T.detach(),
                left_out_T=token_loss.left_out_T,
                max_response_tokens=self.max_response_tokens,
            )
            metrics = merge([measured, counted])
            if tokens.reference_logprobs_T is not None:
                kl_T = self.kl(logprobs_T, tokens.reference_logprobs_T)
                metrics["policy/kl_reference"] = float(kl_T.detach().sum())
                if self.kl_bias_corrected:
                    kl_T = bias_corrected(kl_T, tokens, logprobs_T)
                if self.kl_in_loss:
                    losses_T = losses_T + kl_coefficient * kl_T
            if entropy_coefficient:
                losses_T = losses_T - entropy_coefficient * entropy_T
            loss = self.aggregation(losses_T, tokens, counts)
            return LossSums(loss=loss, metrics=metrics | {LOSS: float(loss.detach())})

        return loss_of

    def _correct(
        self, tokens: TokenBatch, logprobs_T: Tensor, step: TokenBatch | None
    ) -> tuple[TokenBatch, Mapping[str, float]]:
        """Importance weights behaviour -> proximal, and what the correction counts; nothing where they are
        the same."""
        if self.proximal == "behaviour":
            return tokens, {}
        if tokens.proximal_logprobs_T is None:
            tokens = replace(tokens, proximal_logprobs_T=self._proximal_T(tokens, logprobs_T))
        correction = self.correction(tokens, **({} if step is None else {"step": step}))
        correction = combined(correction, (reject(tokens) for reject in self.rejections))
        return replace(tokens, weights_T=correction.weights_T), correction.metrics

    def _proximal_T(self, tokens: TokenBatch, logprobs_T: Tensor) -> Tensor:
        """Where it was not measured: interpolated, or the policy that the batch's only step evaluates."""
        if self.proximal == "log_linear":
            assert tokens.lag_T is not None
            # The step makes the version after the one that it trains, from which `lag_T` counts.
            return log_linear(tokens.behaviour_logprobs_T, logprobs_T, tokens.lag_T + 1)
        return logprobs_T.detach()
