"""Ulysses sequence parallelism: ranks divide the tokens of a micro-batch, and in attention its heads.

P consecutive ranks hold the same micro-batch, and each computes a slice of its packed tokens. Attention needs
whole sequences. So before it each rank gives the others their heads of its tokens, and gets its own heads of
all tokens; after it, back. Source: DeepSpeed Ulysses (Jacobs et al. 2023, arXiv:2309.14509).

Axes in names:  N packed tokens, padded so that P divides them, n = N / P those of this rank; T action tokens,
t those of this rank; H heads, h those of this rank; D head size, R results.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.errors import ConfigError

# Rotary embeddings whose frequencies depend on the largest position, which differs between ranks.
LENGTH_DEPENDENT = ("dynamic", "longrope")


class _Exchange(torch.autograd.Function):
    """[P, ...] -> [P, ...]: part i goes to rank i, and comes from rank i. Its backward pass does the same."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, parts.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        parts: Tensor = _Exchange.apply(gradients[0], ctx.group)  # type: ignore[no-untyped-call]
        return parts, None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a rank computes of a micro-batch."""

    input_ids_n: Tensor
    position_ids_n: Tensor
    sequence_starts: tuple[int, ...]  # of all N tokens; padding is a sequence of its own
    own_t: Tensor  # which action tokens are predicted here
    source_t: Tensor  # where in n


class SequenceRanks:
    """The ranks that divide a micro-batch with this one."""

    def __init__(self, count: int) -> None:
        """Every rank of the learner calls this, with a `count` that divides their number."""
        self.count = count
        self._group, _ = dist.new_subgroups(count)  # type: ignore[no-untyped-call]
        self._index = dist.get_rank(self._group)
        self._exchanges = 0

    def part(
        self, input_ids_N: Tensor, position_ids_N: Tensor, sequence_starts: Sequence[int], source_T: Tensor
    ) -> Part:
        """Cut this rank's slice out of a micro-batch, which need not be padded."""
        self._exchanges = 0
        own_ids_n = self.own_tokens_of(input_ids_N)
        tokens, n, padded = len(input_ids_N), len(own_ids_n), len(own_ids_n) * self.count
        own_t = (source_T // n == self._index).nonzero()[:, 0]
        return Part(
            input_ids_n=own_ids_n,
            position_ids_n=self.own_tokens_of(position_ids_N),
            sequence_starts=(*sequence_starts, padded) if padded > tokens else tuple(sequence_starts),
            own_t=own_t,
            source_t=source_T[own_t] - self._index * n,
        )

    def own_tokens_of(self, column_N: Tensor, padding: int = 0) -> Tensor:
        """[n, ...] of this rank from [N, ...], which need not be padded."""
        missing = -len(column_N) % self.count
        padded_N = torch.cat([column_N, column_N.new_full((missing, *column_N.shape[1:]), padding)])
        return padded_N.chunk(self.count)[self._index]

    def join(self, results_Rt: Tensor, own_t: Tensor, tokens: int) -> Tensor:
        """[..., T] of all ranks from [..., t], on every rank.

        Gradients flow into this rank's own results only: each rank computes the same loss from all results,
        and the sum over ranks is its gradient.
        """
        results_RT = results_Rt.new_zeros((*results_Rt.shape[:-1], tokens))
        results_RT[..., own_t] = results_Rt.detach()
        dist.all_reduce(results_RT, group=self._group)
        return results_RT.index_copy(-1, own_t, results_Rt)

    def own_heads(self, *columns_1HnD: Tensor) -> list[Tensor]:
        """[1, h, N, D] from each [1, H, n, D]. Heads that P does not divide are repeated until it does."""
        self._exchanges += 1
        parts_PnC = []
        for column_1HnD in columns_1HnD:
            _, heads, n, size = column_1HnD.shape
            times = self.count // math.gcd(heads, self.count)
            column_HnD = column_1HnD[0].repeat_interleave(times, dim=0) if times > 1 else column_1HnD[0]
            parts_PnC.append(column_HnD.reshape(self.count, -1, n, size).transpose(1, 2).flatten(2))
        received_PnC = self._exchange(torch.cat(parts_PnC, dim=-1))
        own_NC = torch.split(received_PnC.flatten(0, 1), [part.shape[-1] for part in parts_PnC], dim=-1)
        return [
            own.view(len(own), -1, column.shape[-1]).transpose(0, 1)[None]
            for own, column in zip(own_NC, columns_1HnD, strict=True)
        ]

    def own_tokens(self, output_1NhD: Tensor) -> Tensor:
        """[1, n, H, D] from [1, N, h, D]."""
        received_PnhD = self._exchange(output_1NhD[0].reshape(self.count, -1, *output_1NhD.shape[2:]))
        return received_PnhD.transpose(0, 1).flatten(1, 2)[None]

    def require_exchanges(self, config: Any) -> None:
        """Raise ConfigError if a layer of the last forward pass has mixed tokens of this rank only."""
        layers = config.get_text_config().num_hidden_layers
        if self._exchanges != layers:
            raise ConfigError(
                f"learner.sequence_parallel: only {self._exchanges} of {layers} layers of this model "
                f"({config.model_type}) have an attention whose heads ranks can divide; set it to 1"
            )

    def _exchange(self, parts: Tensor) -> Tensor:
        received: Tensor = _Exchange.apply(parts, self._group)  # type: ignore[no-untyped-call]
        return received


def across_ranks(attention: Callable[..., tuple[Tensor, None]]) -> Callable[..., tuple[Tensor, None]]:
    """Let an attention of transformers' kind take its tokens from all `sequence_ranks`, if there are any."""

    def exchanged(
        module: Any,
        query_1HnD: Tensor,
        key_1HnD: Tensor,
        value_1HnD: Tensor,
        attention_mask: Tensor | None,
        *,
        sequence_ranks: SequenceRanks | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        if sequence_ranks is None:
            return attention(module, query_1HnD, key_1HnD, value_1HnD, attention_mask, **kwargs)
        columns_1hND = sequence_ranks.own_heads(query_1HnD, key_1HnD, value_1HnD)
        output_1NhD, _ = attention(module, *columns_1hND, attention_mask, **kwargs)
        return sequence_ranks.own_tokens(output_1NhD), None

    return exchanged


def length_dependent(config: Any) -> dict[str, int]:
    """Return the kinds of rotary embedding that depend on the longest sequence, if it has more tokens."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    parts = [part for part in (rope, *rope.values()) if isinstance(part, dict)]
    found = [part for part in parts if part.get("rope_type") in LENGTH_DEPENDENT]
    known = "original_max_position_embeddings"
    return {part["rope_type"]: part.get(known) or text.max_position_embeddings for part in found}


def require_divisible(config: Any, count: int) -> None:
    """Raise ConfigError if `count` ranks cannot divide a model with this transformers config."""
    text = config.get_text_config()
    if text.num_attention_heads % count:
        raise ConfigError(
            f"learner.sequence_parallel: found {count}; allowed is a divisor of the "
            f"{text.num_attention_heads} attention heads of the model"
        )
    if count > 1 and (found := length_dependent(config)):
        raise ConfigError(
            f"learner.sequence_parallel: found {count}, but the model's rope_type {', '.join(sorted(found))} "
            "depends on the length of the sequence, of which each rank sees only a part; set it to 1"
        )
