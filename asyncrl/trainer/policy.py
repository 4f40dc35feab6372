"""A Hugging Face causal language model as a policy: log-probabilities of action tokens.

Axes in names:  N packed tokens, T action tokens, D hidden size, R results.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from asyncrl.errors import ConfigError
from asyncrl.trainer.attention import attention_kwargs
from asyncrl.trainer.head import LogprobHead
from asyncrl.trainer.sequence_parallel import SequenceRanks

# Config keys of architectures that transform logits after the output layer.
LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


class PolicyModule(nn.Module):
    """The model and its log-probability head."""

    def __init__(self, model: Any, sequence_ranks: SequenceRanks | None = None) -> None:
        """`sequence_ranks` are the ranks that divide each micro-batch with this one."""
        super().__init__()
        transforms = [key for key in LOGIT_TRANSFORMS if getattr(model.config, key, None) not in (None, 1.0)]
        if transforms:
            found = f"model: config sets {', '.join(transforms)}"
            raise ConfigError(f"{found}, which the learner would ignore; choose a model without it")
        self.model, self._sequence_ranks = model, sequence_ranks
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
        entropy_gradient: bool = True,
    ) -> Tensor:
        """columns_RT of `TokenLogprobs`, float32, predicted at the packed positions `source_T`."""
        packed = (input_ids_N, position_ids_N, sequence_starts, source_T)
        how = (temperature, chunk, with_squares, entropy_gradient)
        return token_outputs(
            self.model.base_model,
            lambda hidden_TD, own_T: self.head(hidden_TD, target_T[own_T], *how),
            *packed,
            self._sequence_ranks,
        )


def token_outputs(
    backbone: Any,
    head: Callable[[Tensor, Tensor | slice], Tensor],
    input_ids_N: Tensor,
    position_ids_N: Tensor,
    sequence_starts: Sequence[int],
    source_T: Tensor,
    sequence_ranks: SequenceRanks | None,
) -> Tensor:
    """[..., T]: what `head` makes of the last hidden states at `source_T`, from a model without output layer.

    `head` gets the hidden states of this rank's tokens, and which of all T tokens these are.
    """
    if sequence_ranks is None:
        hidden_ND = hidden_states(backbone, input_ids_N, position_ids_N, sequence_starts)
        return head(hidden_ND[source_T], slice(None))
    part = sequence_ranks.part(input_ids_N, position_ids_N, sequence_starts, source_T)
    hidden_nD = hidden_states(
        backbone, part.input_ids_n, part.position_ids_n, part.sequence_starts, sequence_ranks
    )
    sequence_ranks.require_exchanges(backbone.config)
    return sequence_ranks.join(head(hidden_nD[part.source_t], part.own_t), part.own_t, len(source_T))


def hidden_states(
    backbone: Any,
    input_ids_N: Tensor,
    position_ids_N: Tensor,
    sequence_starts: Sequence[int],
    sequence_ranks: SequenceRanks | None = None,
) -> Tensor:
    """hidden_ND: the last hidden state of every packed token, from a model without output layer."""
    attention = attention_kwargs(backbone.config._attn_implementation, sequence_starts, input_ids_N.device)
    outputs = backbone(
        input_ids=input_ids_N[None],
        position_ids=position_ids_N[None],
        use_cache=False,
        **attention | ({} if sequence_ranks is None else {"sequence_ranks": sequence_ranks}),
    )
    hidden_ND: Tensor = outputs.last_hidden_state[0]
    return hidden_ND
