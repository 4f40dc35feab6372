"""A mixture of experts whose experts are chosen by a list, written out token by token."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import silu


class ByHand:
    """A Qwen3-MoE. The n-th call runs with the n-th of `choices`, [tokens, layers, top_k]; -1: the best experts."""

    def __init__(self, model: Any, choices: Sequence[NDArray[np.int16]]) -> None:
        self._model, self._choices = model, list(choices)
        self._now: NDArray[np.int16] = choices[0]
        for layer, block in enumerate(each.mlp for each in model.model.layers):
            block.forward = lambda hidden, layer=layer, block=block: self._mixed(hidden, layer, block)

    def __call__(self, input_ids: Tensor) -> Any:
        self._now = self._choices.pop(0)
        return SimpleNamespace(logits=self._model(input_ids=input_ids).logits)

    def _mixed(self, hidden: Tensor, layer: int, block: Any) -> Tensor:
        experts, outputs = block.experts, []
        for token, state in enumerate(hidden[0]):
            scores = (block.gate.weight @ state).softmax(0)
            own = self._now[token, layer].tolist()
            own = scores.argsort(descending=True)[: len(own)].tolist() if min(own) < 0 else own
            total = scores[own].sum()
            output = torch.zeros_like(state)
            for expert in own:
                gate, up = (experts.gate_up_proj[expert] @ state).chunk(2)
                output = output + scores[expert] / total * (experts.down_proj[expert] @ (silu(gate) * up))
            outputs.append(output)
        return torch.stack(outputs)[None]
