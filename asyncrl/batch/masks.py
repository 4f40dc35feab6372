"""Masks take action tokens out of the loss before it is computed; their shares are published.

Axes in names:  S sequences (rollouts) of the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.algo.metrics import BANDS, TURNS, length_bands
from asyncrl.batch.packing import TrainSample
from asyncrl.types import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Masks:
    """The masked tokens of one sequence. One entry per response token; each token is in one mask at most."""

    stale: NDArray[np.bool_]  # older than allowed
    truncated: NDArray[np.bool_]  # in a response that was cut off

    @property
    def any(self) -> NDArray[np.bool_]:
        """Return the tokens that leave the loss."""
        return self.stale | self.truncated


def masks(rollout: Rollout, sequence: TrainSample, *, max_lag: int | None, truncated: bool) -> Masks:
    """Mask tokens of `keep` that are older than `max_lag`; with `truncated`, mask cut-off responses."""
    nothing = np.zeros_like(sequence.keep)
    stale = nothing if max_lag is None else sequence.keep & (sequence.lag > max_lag)
    is_cut = truncated and rollout.truncated
    return Masks(stale=stale, truncated=sequence.keep & ~stale if is_cut else nothing)


def masked_shares(
    sequences: Sequence[TrainSample],
    masked: Sequence[Masks],
    max_response_tokens: int,
    turn_part_T: Tensor | None = None,
) -> dict[str, float]:
    """Return the masked shares of all action tokens, of each length band and part of a conversation.

    `sequences` are those before the masks; `turn_part_T` has one entry per action token of them.
    """
    lengths_S = torch.tensor([int(sequence.keep.sum()) for sequence in sequences])
    stale_S = torch.tensor([int(one.stale.sum()) for one in masked])
    truncated_S = torch.tensor([int(one.truncated.sum()) for one in masked])
    band_S = length_bands(lengths_S, max_response_tokens)
    by_band = {
        band: _share(stale_S[band_S == index], lengths_S[band_S == index]) for index, band in enumerate(BANDS)
    }
    stale_T = np.concatenate([one.stale[seen.keep] for seen, one in zip(sequences, masked, strict=True)])
    parts = {} if turn_part_T is None else {name: turn_part_T == at for at, name in enumerate(TURNS)}
    by_turn = {
        f"staleness/masked_share/turn/{name}": _share(torch.from_numpy(stale_T) & is_T, is_T)
        for name, is_T in parts.items()
    }
    return {
        "staleness/masked_share": _share(stale_S, lengths_S),
        **{f"staleness/masked_share/{band}": share for band, share in by_band.items()},
        "completions/masked_share": _share(truncated_S, lengths_S),
        **by_turn,
    }


def _share(part_S: Tensor, whole_S: Tensor) -> float:
    return float(part_S.sum()) / max(int(whole_S.sum()), 1)
