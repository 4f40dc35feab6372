"""The output layer of a policy as log-probabilities of given tokens, one chunk of tokens at a time.

Axes in names:  T action tokens, C a chunk of T, D hidden size, V vocabulary, R results, K kept tokens.
The logits of at most one chunk exist at any time, forward and backward: [C, V], never [T, V]. Those of the
last one stay until backward begins with them. Nothing here waits for the device.
"""

import logging
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl.errors import ConfigError, lacks_gpu_memory

log = logging.getLogger(__name__)

# The logit of no token: its exponential is 0, and 0 times it is 0, unlike -infinity.
NEVER = -1e30


def product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right, summed and returned in at least float32: bfloat16 has 8 bits."""
    dtype = torch.promote_types(left.dtype, torch.float32)
    if left.is_cuda and left.dtype != dtype:
        return torch.mm(left, right, out_dtype=dtype)  # torch has no `out_dtype` on CPUs
    return torch.mm(left.to(dtype), right.to(dtype))


def add_product(sums: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `sums` in place, without a copy of its size for the product."""
    if sums.is_cuda and sums.dtype != left.dtype:
        torch.addmm(sums, left, right, out_dtype=sums.dtype, out=sums)  # torch has none of it on CPUs
    else:
        sums.addmm_(left.to(sums.dtype), right.to(sums.dtype))


def logits_of(hidden_CD: Tensor, weight_VD: Tensor, temperature: float) -> Tensor:
    """hidden @ weight.T / temperature, in at least float32."""
    if temperature != 1.0 and hidden_CD.dtype == torch.promote_types(hidden_CD.dtype, torch.float32):
        return product(hidden_CD / temperature, weight_VD.T)  # no pass over [C, V], and no digits lost
    logits_CV = product(hidden_CD, weight_VD.T)
    return logits_CV if temperature == 1.0 else logits_CV.div_(temperature)


def among(logits_CV: Tensor, target_C: Tensor, kept_CK: Tensor | None) -> tuple[Tensor, Tensor]:
    """The logits of the kept tokens, [C, K], and where the target is among them; of all if there are none."""
    if kept_CK is None:
        return logits_CV, target_C.clone()
    logits_CK = logits_CV.gather(-1, kept_CK.clamp(min=0).long()).masked_fill_(kept_CK < 0, NEVER)
    return logits_CK, (kept_CK == target_C[:, None]).int().argmax(-1)


def chunks(tokens: int, size: int) -> list[slice]:
    """Parts of `size` tokens, of which only the first one may be shorter."""
    edges = [*range(tokens, 0, -size), 0]
    return [slice(start, end) for end, start in pairwise(edges)][::-1]


def statistics(logits_CV: Tensor, target_C: Tensor, with_squares: bool) -> tuple[Tensor, Tensor]:
    """The columns of `TokenLogprobs` for one chunk, and [2, C]: the largest logit, ln sum exp(z - largest).

    All columns come from the difference to the largest logit: its digits do not depend on what is common to
    all logits of a token.
    """
    peak_C = logits_CV.amax(-1)
    shifted_CV = logits_CV - peak_C[:, None]
    exp_CV = shifted_CV.exp()
    sum_C = exp_CV.sum(-1)
    log_sum_C = sum_C.log()
    columns = [shifted_CV.gather(-1, target_C[:, None]).squeeze(-1) - log_sum_C]
    columns.append(log_sum_C - shifted_CV.mul_(exp_CV).sum(-1) / sum_C)
    if with_squares:
        columns.append(exp_CV.square_().sum(-1) / sum_C.square())
    return torch.stack(columns), torch.stack((peak_C, log_sum_C))


def off_target_gradient(
    logits_CV: Tensor,
    scale_2C: Tensor,
    gradient_C: Tensor,
    entropy_C: Tensor,
    by_entropy_C: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """-p (g + e (ln p + H)) [C, V] in `dtype`: dL/dz but for what g adds in the column of the target."""
    log_p_CV = (logits_CV - scale_2C[0, :, None]).sub_(scale_2C[1, :, None])
    if by_entropy_C is None:
        return log_p_CV.exp_().mul_(-gradient_C[:, None]).to(dtype)
    p_CV = log_p_CV.exp()
    factor_CV = log_p_CV.add_(entropy_C[:, None]).mul_(-by_entropy_C[:, None]).sub_(gradient_C[:, None])
    return p_CV.mul_(factor_CV).to(dtype)


class Fused:
    """A function without side effects whose passes over [C, V] are compiled into few kernels.

    Without a C compiler, or if Triton fails, it runs as it is, and a warning says so once. Pass no views: the
    offset of a view is a condition of the compiled code, and each new kind of offset is compiled again.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._plain, self._compiled = function, torch.compile(function, dynamic=True)
        self._failed = False

    def __call__(self, *arguments: Any) -> Any:
        if not self._failed:
            try:
                return self._compiled(*arguments)
            except Exception as error:  # compilers raise anything; a fault of ours comes again below
                if isinstance(error, RuntimeError) and lacks_gpu_memory(error):
                    raise
                self._failed = True
                log.warning(
                    "%s could not be compiled, so the learner's output layer is slower than it could be; "
                    "check that this host has a C compiler and torch's release of Triton",
                    self._plain.__name__,
                    exc_info=error,
                )
        return self._plain(*arguments)


@cache
def fused(function: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """`function` compiled on a GPU, and as it is on a CPU, where users need no compiler."""
    return Fused(function) if device_type == "cuda" else function


class TokenLogprobs(torch.autograd.Function):
    """(hidden_TD, weight_VD, target_T) -> columns_RT: ln softmax(z)[target], entropy of p = softmax(z).

    z = hidden @ weight.T / temperature. `with_squares` adds a third row, the sum of p ** 2, without gradient.
    Backward recomputes the logits of all chunks but the last. With g and e the gradients of the first two
    rows, H the entropy: dL/dz = g (onehot(target) - p) - e p (ln p + H). Without `entropy_gradient`, e is
    taken as 0. With `kept_TK`, p is 0 of all tokens but these, which include the target; -1 is no token.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        target_T: Tensor,
        temperature: float,
        chunk: int,
        with_squares: bool,
        entropy_gradient: bool,
        kept_TK: Tensor | None = None,
    ) -> Tensor:
        rows = 3 if with_squares else 2
        dtype = torch.promote_types(hidden_TD.dtype, torch.float32)
        columns_RT = torch.empty(rows, len(target_T), dtype=dtype, device=hidden_TD.device)
        scale_2T = torch.empty_like(columns_RT[:2])
        of_chunk, logits_CV = fused(statistics, hidden_TD.device.type), None
        for part in chunks(len(target_T), chunk):
            kept_CK = None if kept_TK is None else kept_TK[part]
            logits_CV = logits_of(hidden_TD[part], weight_VD, temperature)
            found = of_chunk(*among(logits_CV, target_T[part], kept_CK), with_squares)
            columns_RT[:, part], scale_2T[:, part] = found
        ctx.save_for_backward(hidden_TD, weight_VD, target_T, kept_TK, scale_2T, columns_RT[:2].clone())
        ctx.logits = logits_CV
        ctx.temperature, ctx.chunk, ctx.entropy_gradient = temperature, chunk, entropy_gradient
        return columns_RT

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_VD, target_T, kept_TK, scale_2T, (logprob_T, entropy_T) = ctx.saved_tensors
        gradient_T, by_entropy_T = gradients[0][:2] / ctx.temperature  # now that of hidden @ weight.T
        # Computed beside the rest, in float32: near p = 1 a rounded p would leave nothing of g (1 - p).
        at_target_T = -gradient_T * logprob_T.expm1()
        if ctx.entropy_gradient:
            at_target_T -= by_entropy_T * logprob_T.exp() * (logprob_T + entropy_T)
        at_target_T = at_target_T.to(hidden_TD.dtype)
        hidden_gradient_TD = torch.empty_like(hidden_TD)
        # At least float32: in bfloat16 the contributions of many chunks would be lost in rounding.
        # An output layer below an adapter is frozen.
        sums_VD = torch.zeros_like(weight_VD, dtype=entropy_T.dtype) if ctx.needs_input_grad[1] else None
        of_chunk = fused(off_target_gradient, hidden_TD.device.type)
        logits_CV, ctx.logits = ctx.logits, None
        for part in reversed(chunks(len(target_T), ctx.chunk)):
            kept_CK = None if kept_TK is None else kept_TK[part]
            if logits_CV is None:
                logits_CV = logits_of(hidden_TD[part], weight_VD, ctx.temperature)
            logits_CK, place_C = among(logits_CV, target_T[part], kept_CK)
            by_entropy_C = by_entropy_T[part].clone() if ctx.entropy_gradient else None
            columns = [column_T[..., part].clone() for column_T in (scale_2T, gradient_T, entropy_T)]
            gradient_CK = of_chunk(logits_CK, *columns, by_entropy_C, hidden_TD.dtype)
            logit_gradient_CV = gradient_CK.scatter_(-1, place_C[:, None], at_target_T[part, None])
            if kept_CK is not None:
                zeros_CV = torch.zeros_like(logits_CV, dtype=hidden_TD.dtype)
                logit_gradient_CV = zeros_CV.scatter_add_(-1, kept_CK.clamp(min=0).long(), gradient_CK)
            logits_CV = None
            torch.mm(logit_gradient_CV, weight_VD, out=hidden_gradient_TD[part])
            if sums_VD is not None:
                add_product(sums_VD, logit_gradient_CV.T, hidden_TD[part])
        weight_gradient_VD = None if sums_VD is None else sums_VD.to(weight_VD.dtype)
        return hidden_gradient_TD, weight_gradient_VD, None, None, None, None, None, None


class LogprobHead(nn.Module):
    """An output layer that returns log-probabilities of given tokens instead of logits.

    It shares the weight of the model's own output layer, and of the embedding if tied. With ZeRO 3, ranks
    gather sharded weights when a module runs and when a gradient reaches one of its outputs, all in the same
    order. So it runs once per micro-batch, for any number of chunks, and returns one tensor.
    """

    def __init__(self, output_layer: nn.Module) -> None:
        super().__init__()
        if getattr(output_layer, "bias", None) is not None:
            found = f"model: output layer {type(output_layer).__name__} has a bias"
            raise ConfigError(f"{found}, which is not supported; choose another model")
        self.weight: nn.Parameter = output_layer.weight  # type: ignore[assignment]

    def forward(
        self,
        hidden_TD: Tensor,
        target_T: Tensor,
        temperature: float,
        chunk: int,
        with_squares: bool,
        entropy_gradient: bool,
        kept_TK: Tensor | None = None,
    ) -> Tensor:
        """columns_RT of `TokenLogprobs`, in nats, float32; logits are divided by `temperature`."""
        how = (temperature, chunk, with_squares, entropy_gradient, kept_TK)
        columns_RT: Tensor = TokenLogprobs.apply(hidden_TD, self.weight, target_T, *how)  # type: ignore[no-untyped-call]
        return columns_RT
