"""A proximal policy without its forward pass."""

from torch import Tensor

from asyncrl.algo.ratios import LOG_RATIO_BOUND


def log_linear(behaviour_logprobs_T: Tensor, logprobs_T: Tensor, lag_T: Tensor) -> Tensor:
    """ln pi_proximal = ln mu + a (ln pi - ln mu), a = (lag - 1) / lag: on the line from the behaviour to the current policy.

    The proximal policy is one version behind the current one, `lag` versions after the behaviour policy. A token of
    lag 0 or 1 keeps its behaviour log-probability. Constant in the loss.

    Args:
        lag_T: int64, version being made minus version that sampled the token.

    Source: AReaL (Fu et al. 2025, arXiv:2505.24298), its log-linear approximation.
    """
    share_T = (1.0 - 1.0 / lag_T.clamp(min=1)).clamp(min=0.0)
    logprobs_T = logprobs_T.detach()
    # As in every ratio, the distance counts up to the bound; so the line is finite for an infinite ln mu.
    behaviour_logprobs_T = behaviour_logprobs_T.clamp(logprobs_T - LOG_RATIO_BOUND, logprobs_T + LOG_RATIO_BOUND)
    return behaviour_logprobs_T + share_T * (logprobs_T - behaviour_logprobs_T)
