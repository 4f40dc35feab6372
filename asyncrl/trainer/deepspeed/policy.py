"""A Hugging Face causal language model as a policy: log-probabilities of action tokens.

Axes in names:  N packed tokens, T action tokens, D hidden size, R results.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from asyncrl.errors import ConfigError
from asyncrl.trainer.deepspeed.attention import attention_kwargs
from asyncrl.trainer.deepspeed.head import LogprobHead

# Config keys of architectures that transform logits after the output layer.
LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


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
        entropy_gradient: bool = True,
    ) -> Tensor:
        """columns_RT of `TokenLogprobs`, float32, predicted at the packed positions `source_T`."""
        hidden_ND = hidden_states(self.model.base_model, input_ids_N, position_ids_N, sequence_starts)
        arguments = (target_T, temperature, chunk, with_squares, entropy_gradient)
        columns_RT: Tensor = self.head(hidden_ND[source_T], *arguments)
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
