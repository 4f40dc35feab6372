"""KL penalty towards the reference policy, per token [T] in nats, estimated from the sampled token alone.

d = ln pi - ln pi_ref. In the loss the gradient of the estimator matters, not its value. On-policy, the
gradient of k1 is zero on average, that of k2 equals the gradient of KL(pi || pi_ref), that of k3 the gradient
of the forward KL(pi_ref || pi). `k1+`, `k3+` and `abs+` keep the value and take the gradient of k2. Source:
Schulman 2020, "Approximating KL divergence"; Tang and Munos 2025 (arXiv:2506.09477) for the gradients.
"""

import torch
from torch import Tensor

from asyncrl.algo.tokens import TokenBatch, log_ratio

# k3 grows like the ratio; without a bound, one token would dominate the gradient. Beyond the bound k3 has no
# gradient; k2 and k3+ have one up to a ratio of e^20.
K3_BOUND = 10.0


def k1(logprobs_T: Tensor, reference_logprobs_T: Tensor) -> Tensor:
    """d: unbiased, may be negative. Meant for the reward; in the loss its gradient vanishes on average."""
    return log_ratio(logprobs_T, reference_logprobs_T)


def absolute(logprobs_T: Tensor, reference_logprobs_T: Tensor) -> Tensor:
    """|d|."""
    return log_ratio(logprobs_T, reference_logprobs_T).abs()


def k2(logprobs_T: Tensor, reference_logprobs_T: Tensor) -> Tensor:
    """d^2 / 2: biased value, exact gradient."""
    return 0.5 * log_ratio(logprobs_T, reference_logprobs_T).square()


def k3(logprobs_T: Tensor, reference_logprobs_T: Tensor) -> Tensor:
    """exp(-d) + d - 1: unbiased, never negative, at most 10."""
    d_T = log_ratio(logprobs_T, reference_logprobs_T)
    # expm1 keeps the precision that exp(x) - 1 loses near 0, where all tokens start.
    return (torch.expm1(-d_T) + d_T).clamp(max=K3_BOUND)


def k1_straight_through(logprobs_T: Tensor, reference_logprobs_T: Tensor) -> Tensor:
    """Value of k1, gradient of k2."""
    return _with_k2_gradient(k1(logprobs_T, reference_logprobs_T), logprobs_T, reference_logprobs_T)


def k3_straight_through(logprobs_T: Tensor, reference_logprobs_T: Tensor) -> Tensor:
    """Value of k3, gradient of k2."""
    return _with_k2_gradient(k3(logprobs_T, reference_logprobs_T), logprobs_T, reference_logprobs_T)


def absolute_straight_through(logprobs_T: Tensor, reference_logprobs_T: Tensor) -> Tensor:
    """Value of |d|, gradient of k2."""
    return _with_k2_gradient(absolute(logprobs_T, reference_logprobs_T), logprobs_T, reference_logprobs_T)


def bias_corrected(kl_T: Tensor, batch: TokenBatch, logprobs_T: Tensor) -> Tensor:
    """w r KL, r = pi / anchor: KL under pi from another policy's tokens. Its gradient is w r d grad ln pi.

    So the expected gradient is that of KL(pi || pi_ref), whatever the estimator. Source: DeepSeek-V3.2 2025
    (arXiv:2512.02556), unbiased KL estimate; there the denominator of r is the policy that sampled.
    """
    assert batch.reference_logprobs_T is not None
    constant_T = logprobs_T.detach()
    ratio_T = log_ratio(constant_T, batch.anchor_logprobs_T).exp()
    # Not by autograd of r KL: of the bounded k3, of k2 and of |d| it points away from a reference far off.
    d_T = log_ratio(constant_T, batch.reference_logprobs_T)
    return batch.weighted(ratio_T * (kl_T.detach() + d_T * (logprobs_T - constant_T)))


def _with_k2_gradient(value_T: Tensor, logprobs_T: Tensor, reference_logprobs_T: Tensor) -> Tensor:
    gradient_T = k2(logprobs_T, reference_logprobs_T)
    return value_T.detach() + gradient_T - gradient_T.detach()
