"""A Hugging Face language model as a policy (log-probabilities of action tokens) or as a critic (values).

Axes in names:  N packed tokens, T action or predicted tokens, K those at the end of a sequence,
                D hidden size, R results, V vocabulary.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from asyncrl.columns import NONE
from asyncrl.errors import ConfigError
from asyncrl.routing import replay, watch
from asyncrl.trainer.attention import attention_kwargs, of_text
from asyncrl.trainer.base import MicroBatch
from asyncrl.trainer.head import LogprobHead
from asyncrl.trainer.sequence_parallel import SequenceRanks

# Config keys of architectures that bend logits after the output layer.
LOGIT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
# Transformers implements every attention in this way, with windows, soft caps and sinks.
PLAIN = "eager"
# Tokens of a long sequence that are compared, its last ones: logits of all of them might not fit the GPU.
COMPARED = 64


class PolicyModule(nn.Module):
    """The model and its log-probability head."""

    def __init__(
        self, model: Any, sequence_ranks: SequenceRanks | None = None, *, replays: bool = False
    ) -> None:
        """`sequence_ranks` divide each micro-batch with this rank; `replays`: experts can be given."""
        super().__init__()
        text = model.config.get_text_config()
        if caps := [key for key in LOGIT_CAPS if getattr(text, key, None)]:
            found = f"model: config sets {', '.join(caps)}"
            raise ConfigError(f"{found}, which the learner would ignore; choose a model without it")
        # Cohere multiplies its logits, Granite divides them.
        self._divisor = float(
            getattr(text, "logits_scaling", 1.0) / (getattr(text, "logit_scale", 1.0) or 1.0)
        )
        self.model, self._sequence_ranks = model, sequence_ranks
        self.head = LogprobHead(model.get_output_embeddings())
        self._routers = watch(model) if replays else []

    def forward(
        self,
        *,
        target_T: Tensor,
        temperature: float,
        chunk: int,
        kept_TK: Tensor | None = None,
        with_squares: bool = False,
        entropy_gradient: bool = True,
        experts_NLK: Tensor | None = None,
        **packed: Any,
    ) -> Tensor:
        """columns_RT of `TokenLogprobs`, float32; `packed` are the named arguments of `_token_outputs`."""
        if experts_NLK is not None and self._sequence_ranks is not None:
            experts_NLK = self._sequence_ranks.own_tokens_of(experts_NLK, padding=NONE)
        replay(self._routers, experts_NLK)
        how = (temperature * self._divisor, chunk, with_squares, entropy_gradient)
        return _token_outputs(
            self.model.base_model,
            lambda hidden_TD, own_T: self.head(
                hidden_TD, target_T[own_T], *how, kept_TK if kept_TK is None else kept_TK[own_T]
            ),
            self._sequence_ranks,
            **packed,
        )


def run(module: Any, microbatch: MicroBatch, **arguments: Any) -> Tensor:
    """Return what a policy or critic makes of a micro-batch; `arguments` are those besides its tokens.

    An empty micro-batch runs one token, because all ranks must take part in gathering sharded weights.
    """
    ran = microbatch
    if microbatch.input_ids_N.numel() == 0:
        zero = torch.zeros(1, dtype=torch.int64, device=microbatch.input_ids_N.device)
        ran = replace(microbatch, input_ids_N=zero, position_ids_N=zero, sequence_starts=(0, 1))
    outputs: Tensor = module(
        input_ids_N=ran.input_ids_N,
        position_ids_N=ran.position_ids_N,
        sequence_starts=ran.sequence_starts,
        source_T=ran.source_T,
        **ran.model_inputs,
        **arguments,
    )
    return outputs


def _token_outputs(
    backbone: Any,
    head: Callable[[Tensor, Tensor | slice], Tensor],
    sequence_ranks: SequenceRanks | None,
    *,
    input_ids_N: Tensor,
    position_ids_N: Tensor,
    sequence_starts: Sequence[int],
    source_T: Tensor,
    **model_inputs: Tensor,
) -> Tensor:
    """[..., T]: what `head` makes of the last hidden states at `source_T`, from a model without output layer.

    `head` gets the hidden states of this rank's tokens, and which of all T tokens these are. The arguments by
    name are those of a `MicroBatch`. Raises ConfigError for `model_inputs` that ranks would have to divide.
    """
    if sequence_ranks is None:
        hidden_ND = hidden_states(
            backbone, input_ids_N, position_ids_N, sequence_starts=sequence_starts, **model_inputs
        )
        return head(hidden_ND[source_T], slice(None))
    if model_inputs:
        found = f"learner.sequence_parallel: ranks cannot divide {', '.join(model_inputs)} of this model"
        raise ConfigError(f"{found}; set it to 1")
    part = sequence_ranks.part(input_ids_N, position_ids_N, sequence_starts, source_T)
    hidden_nD = hidden_states(
        backbone,
        part.input_ids_n,
        part.position_ids_n,
        sequence_starts=part.sequence_starts,
        sequence_ranks=sequence_ranks,
    )
    sequence_ranks.require_exchanges(backbone.config)
    return sequence_ranks.join(head(hidden_nD[part.source_t], part.own_t), part.own_t, len(source_T))


def hidden_states(
    backbone: Any,
    input_ids_N: Tensor,
    position_ids_N: Tensor,
    *,
    sequence_starts: Sequence[int],
    **model_inputs: Any,
) -> Tensor:
    """hidden_ND: the last hidden state of every packed token, from a model without output layer."""
    tokens = {"input_ids": input_ids_N[None], "position_ids": position_ids_N[None]}
    attention = attention_kwargs(backbone.config._attn_implementation, sequence_starts, input_ids_N.device)
    outputs = backbone(**tokens | attention | model_inputs, use_cache=False)
    hidden_ND: Tensor = outputs.last_hidden_state[0]
    return hidden_ND


class ValueHead(nn.Linear):
    """A linear layer from the hidden state to one number.

    Its weights are normal with standard deviation 1 / (D + 1), its bias is 0. A norm layer gives the hidden
    state a length near sqrt(D), so the first values are of the order 1 / sqrt(D). They are far smaller than
    rewards, which so determine the first advantages. They are not 0, as the backbone would get no gradient.
    Source: the value head of OpenRLHF (Hu et al. 2024, arXiv:2405.11143).
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1)
        # A separate generator, so that every rank draws the same weights.
        nn.init.normal_(self.weight, std=1 / (hidden_size + 1), generator=torch.Generator().manual_seed(0))
        nn.init.zeros_(self.bias)

    def forward(self, hidden_TD: Tensor) -> Tensor:
        """values_T in float32: bfloat16 would be 0.4 % off, as much as the advantages of a trained critic."""
        dtype = torch.promote_types(hidden_TD.dtype, torch.float32)
        return linear(hidden_TD.to(dtype), self.weight.to(dtype), self.bias.to(dtype)).squeeze(-1)


class ValueModule(nn.Module):
    """A backbone and its value head: the expected return from each token on, given the tokens before it."""

    def __init__(self, backbone: Any, sequence_ranks: SequenceRanks | None = None) -> None:
        """`backbone` is a model without output layer; `sequence_ranks` as in `PolicyModule`."""
        super().__init__()
        self.backbone, self._sequence_ranks = backbone, sequence_ranks
        # Some backbones end with a projection to the size of their embeddings.
        size = backbone.get_input_embeddings().embedding_dim
        self.head = ValueHead(size).to(device=backbone.device, dtype=backbone.dtype)

    def forward(self, **packed: Any) -> Tensor:
        """values_T, float32, each before its action token; `packed` as in `PolicyModule`."""
        return _token_outputs(
            self.backbone, lambda hidden_TD, _: self.head(hidden_TD), self._sequence_ranks, **packed
        )


def packed_logprobs(
    policy: Any, sequences: Sequence[Sequence[int]], device: torch.device, *, chunk: int
) -> list[Tensor]:
    """Return the log-probabilities of `ids[1:]` of each sequence, all in one pack."""
    lengths = [len(ids) for ids in sequences]
    ids_N = torch.tensor([token for ids in sequences for token in ids], device=device)
    positions_N = torch.cat([torch.arange(length, device=device) for length in lengths])
    predicted_T = positions_N.nonzero()[:, 0]
    columns_RT: Tensor = policy(
        input_ids_N=ids_N,
        position_ids_N=positions_N,
        sequence_starts=tuple(accumulate(lengths, initial=0)),
        source_T=predicted_T - 1,
        target_T=ids_N[predicted_T],
        temperature=1.0,
        chunk=chunk,
    )
    return list(torch.split(columns_RT[0], [length - 1 for length in lengths]))


def plain_logprobs(model: Any, ids: Sequence[int], device: torch.device) -> Tensor:
    """Return those of the last `COMPARED` tokens of one sequence, by the model's own code in eval mode."""
    ids_1N = torch.tensor([ids], device=device)
    kept = min(len(ids) - 1, COMPARED)
    few = "logits_to_keep" in inspect.signature(model.forward).parameters
    of_learner, is_training = model.config._attn_implementation, model.training
    model.eval()
    model.set_attn_implementation(of_text(model.config, PLAIN))
    try:
        logits_1NV = model(
            input_ids=ids_1N, use_cache=False, **({"logits_to_keep": kept + 1} if few else {})
        ).logits
    finally:
        model.set_attn_implementation(of_text(model.config, of_learner))
        model.train(is_training)
    logprobs_KV: Tensor = logits_1NV[0, -kept - 1 : -1].float().log_softmax(-1)
    return logprobs_KV.gather(-1, ids_1N[0, -kept:, None])[:, 0]
