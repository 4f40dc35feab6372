"""The policy's loss of one micro-batch: correction, loss, KL, entropy and aggregation of an algorithm."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from asyncrl.algo.aggregation import Counts
from asyncrl.algo.corrections import Correction, log_linear
from asyncrl.algo.kl import bias_corrected
from asyncrl.algo.losses import TokenLoss
from asyncrl.algo.metrics import policy_metrics
from asyncrl.algo.tokens import TokenBatch, sums
from asyncrl.config import registry
from asyncrl.errors import ConfigError
from asyncrl.trainer.base import LOSS, LossFunction, LossSums, MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """An algorithm's loss with every choice resolved to a function."""

    policy_loss: Callable[..., TokenLoss]
    correction: Callable[[TokenBatch, TokenBatch | None], Correction]  # of a micro-batch's tokens, and `step`
    aggregation: Callable[..., Tensor]
    kl: Callable[[Tensor, Tensor], Tensor]
    imitation: float  # coefficient of the cross-entropy on tokens to imitate
    kl_in_loss: bool
    kl_bias_corrected: bool
    proximal: Literal["recompute", "log_linear", "behaviour"]
    max_response_tokens: int  # metrics put lengths into bands of it

    def loss(
        self,
        counts: Counts,
        *,
        kl_coefficient: float,
        entropy_coefficient: float,
        step: TokenBatch | None = None,
    ) -> LossFunction:
        """Return an optimizer step's loss. `step` has all ranks' tokens if the correction depends on them."""
        wants_entropy, limit = registry.takes(self.policy_loss, "entropy_T"), self.max_response_tokens

        def loss_of(microbatch: MicroBatch, logprobs_T: Tensor, entropy_T: Tensor) -> LossSums:
            tokens, weight_metrics = self._correct(microbatch.tokens, logprobs_T, step)
            extra = {"entropy_T": entropy_T.detach()} if wants_entropy else {}
            token_loss = self.policy_loss(tokens, logprobs_T, **extra)
            losses_T, left_out_T = token_loss.losses_T, token_loss.left_out_T
            metrics = policy_metrics(
                tokens, logprobs_T, entropy_T.detach(), left_out_T=left_out_T, max_response_tokens=limit
            )
            totals: dict[str, Tensor] = {}
            if tokens.reference_logprobs_T is not None:
                kl_T = self.kl(logprobs_T, tokens.reference_logprobs_T)
                totals["policy/kl_reference"] = kl_T
                if self.kl_bias_corrected:
                    kl_T = bias_corrected(kl_T, tokens, logprobs_T)
                if self.kl_in_loss:
                    losses_T = losses_T + kl_coefficient * kl_T
            if entropy_coefficient:
                losses_T = losses_T - entropy_coefficient * entropy_T
            loss = self.aggregation(losses_T, tokens, counts)
            if tokens.solved_T is not None:
                nll_T = -logprobs_T * tokens.solved_T
                totals |= {"tokens/solved": tokens.solved_T, "policy/nll/solved": nll_T}
                loss = loss + self.imitation * nll_T.sum() / max(counts.solved, 1)
            of_step = sums(**totals, **{LOSS: loss})
            given = {f"policy/{name}": one for name, one in token_loss.metrics.items()} | dict(weight_metrics)
            if taken := given.keys() & {*metrics, *of_step}:
                found = f"the loss or the correction returns a metric that is {min(taken)} here"
                raise ConfigError(f"{found}, which is measured in every run; give it another name")
            return LossSums(loss=loss, metrics={**metrics, **given, **of_step})

        return loss_of

    def _correct(
        self, tokens: TokenBatch, logprobs_T: Tensor, step: TokenBatch | None
    ) -> tuple[TokenBatch, Mapping[str, float | Tensor]]:
        """Return the tokens with their weights behaviour -> proximal, and metrics of these weights."""
        if self.proximal == "behaviour":
            return tokens, {}
        if tokens.proximal_logprobs_T is None:  # not measured
            if self.proximal == "log_linear":
                assert tokens.lag_T is not None
                # `lag_T` counts from the version before the step, the interpolation from the one after it.
                proximal_T = log_linear(tokens.behaviour_logprobs_T, logprobs_T, tokens.lag_T + 1)
            else:  # the policy that the batch's only step evaluates
                proximal_T = logprobs_T.detach()
            tokens = replace(tokens, proximal_logprobs_T=proximal_T)
        correction = self.correction(tokens, step)
        metrics = {f"weight/{name}": value for name, value in correction.metrics.items()}
        return replace(tokens, weights_T=correction.weights_T), metrics
