"""A Hugging Face model as a critic: the expected return from each token on, given the tokens before it.

Axes in names:  N packed tokens, T action tokens, D hidden size.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from asyncrl.trainer.policy import token_outputs
from asyncrl.trainer.sequence_parallel import SequenceRanks


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
    """A backbone and its value head."""

    def __init__(self, backbone: Any, sequence_ranks: SequenceRanks | None = None) -> None:
        """`backbone` is a model without output layer; `sequence_ranks` as in `PolicyModule`."""
        super().__init__()
        self.backbone, self._sequence_ranks = backbone, sequence_ranks
        self.head = ValueHead(backbone.config.hidden_size).to(device=backbone.device, dtype=backbone.dtype)

    def forward(self, **packed: Any) -> Tensor:
        """values_T, float32, each before its action token; `packed` as in `PolicyModule`."""
        return token_outputs(
            self.backbone, lambda hidden_TD, _: self.head(hidden_TD), self._sequence_ranks, **packed
        )
