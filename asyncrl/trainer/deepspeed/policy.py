"""A Hugging Face causal language model as a policy: log-probabilities of action tokens.

Axes in names:  N packed tokens, T action tokens, C a chunk of T, D hidden size, V vocabulary, R results.
The logits of at most one chunk exist at any time, forward and backward: [C, V], never [N, V].
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from asyncrl.errors import ConfigError
from asyncrl.trainer.deepspeed.attention import attention_kwargs

# Config keys of architectures that transform logits after the output layer.
LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


class TokenLogprobs(torch.autograd.Function):
    """(hidden_TD, weight_VD, target_T) -> columns_RT: ln softmax(z)[target], entropy of p = softmax(z).

    z = hidden @ weight.T / temperature. `with_squares` adds a third row, the sum of p ** 2, without gradient.
    Backward recomputes each chunk's logits. With g and e the gradients of the first two rows, H the entropy:
    dL/dz = g (onehot(target) - p) - e p (ln p + H).
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
    ) -> Tensor:
        dtype = torch.promote_types(hidden_TD.dtype, torch.float32)  # at least float32
        rows = 3 if with_squares else 2
        columns_RT = torch.empty(rows, len(target_T), dtype=dtype, device=hidden_TD.device)
        logsumexp_T = torch.empty_like(columns_RT[0])
        for start in range(0, len(target_T), chunk):
            part = slice(start, start + chunk)
            logits_CV = linear(hidden_TD[part], weight_VD).to(dtype).div_(temperature)
            peak_C = logits_CV.amax(-1)
            exp_CV = (logits_CV - peak_C[:, None]).exp_()
            sum_C = exp_CV.sum(-1)
            logsumexp_T[part] = peak_C + sum_C.log()
            columns_RT[0, part] = logits_CV.gather(-1, target_T[part, None]).squeeze(-1) - logsumexp_T[part]
            columns_RT[1, part] = logsumexp_T[part] - torch.linalg.vecdot(exp_CV, logits_CV) / sum_C
            if with_squares:
                columns_RT[2, part] = torch.linalg.vecdot(exp_CV, exp_CV) / sum_C.square()
        ctx.save_for_backward(hidden_TD, weight_VD, target_T, logsumexp_T, columns_RT[1].clone())
        ctx.temperature, ctx.chunk = temperature, chunk
        return columns_RT

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_VD, target_T, logsumexp_T, entropy_T = ctx.saved_tensors
        gradient_T, entropy_gradient_T = gradients[0][:2]
        with_entropy = bool(entropy_gradient_T.any())
        hidden_gradient_TD = torch.empty_like(hidden_TD)
        # At least float32: in bfloat16 the contributions of many chunks would be lost in rounding.
        weight_gradient_VD = torch.zeros_like(weight_VD, dtype=entropy_T.dtype)
        for start in range(0, len(target_T), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits_CV = linear(hidden_TD[part], weight_VD).to(entropy_T.dtype).div_(ctx.temperature)
            log_p_CV = logits_CV.sub_(logsumexp_T[part, None])
            logit_gradient_CV = log_p_CV.exp()
            factor_CV = -gradient_T[part, None]
            if with_entropy:
                factor_CV = factor_CV - entropy_gradient_T[part, None] * log_p_CV.add_(entropy_T[part, None])
            logit_gradient_CV.mul_(factor_CV).scatter_add_(-1, target_T[part, None], gradient_T[part, None])
            logit_gradient_CV = logit_gradient_CV.div_(ctx.temperature).to(hidden_TD.dtype)
            torch.mm(logit_gradient_CV, weight_VD, out=hidden_gradient_TD[part])
            weight_gradient_VD += logit_gradient_CV.T @ hidden_TD[part]
        return hidden_gradient_TD, weight_gradient_VD.to(weight_VD.dtype), None, None, None, None


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
        self, hidden_TD: Tensor, target_T: Tensor, temperature: float, chunk: int, with_squares: bool
    ) -> Tensor:
        """columns_RT of `TokenLogprobs`, in nats, float32; logits are divided by `temperature`."""
        arguments = (hidden_TD, self.weight, target_T, temperature, chunk, with_squares)
        columns_RT: Tensor = TokenLogprobs.apply(*arguments)  # type: ignore[no-untyped-call]
        return columns_RT


class PolicyModule(nn.Module):
    """The model and its log-probability head."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        transforms = [key for key in LOGIT_TRANSFORMS if getattr(model.config, key, None) not in (None, 1.0)]
        if transforms:
            found = f"model: config sets {', '.join(transforms)}"
            raise ConfigError(f"{found}, which the learner would ignore; choose a model without it")
        self.model = model
        self.head = LogprobHead(model.get_output_embeddings())

    def forward(
        self,
        input_ids_N: Tensor,
        position_ids_N: Tensor,
        sequence_starts: Sequence[int],
        source_T: Tensor,
        target_T: Tensor,
        temperature: float,
        chunk: int,
        with_squares: bool = False,
    ) -> Tensor:
        """columns_RT of `TokenLogprobs`, float32, predicted at the packed positions `source_T`."""
        hidden_ND = hidden_states(self.model.base_model, input_ids_N, position_ids_N, sequence_starts)
        columns_RT: Tensor = self.head(hidden_ND[source_T], target_T, temperature, chunk, with_squares)
        return columns_RT


def hidden_states(
    backbone: Any, input_ids_N: Tensor, position_ids_N: Tensor, sequence_starts: Sequence[int]
) -> Tensor:
    """hidden_ND: the last hidden state of every packed token, from a model without output layer."""
    outputs = backbone(
        input_ids=input_ids_N[None],
        position_ids=position_ids_N[None],
        use_cache=False,
        **attention_kwargs(backbone.config._attn_implementation, sequence_starts, input_ids_N.device),
    )
    hidden_ND: Tensor = outputs.last_hidden_state[0]
    return hidden_ND
