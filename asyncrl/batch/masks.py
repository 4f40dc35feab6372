"""Masks take action tokens out of the loss before it is computed; their shares are published.

Columns that cost a forward pass are measured here, before any mask.

Axes in names:  S sequences (rollouts), C columns, T action tokens of the batch.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.algo.metrics import BANDS, TURNS, length_bands
from asyncrl.batch.packing import SampleImages, TrainSample, deal, microbatch
from asyncrl.columns import TEACHER
from asyncrl.trainer.base import Trainer
from asyncrl.types import Rollout

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """Settings of the run and of this rank that the plan depends on."""

    max_lag: int
    mask_stale: bool  # tokens older than `max_lag` leave the loss; they are mostly tokens of long responses
    mask_truncated: bool  # responses that were cut off leave the loss
    minibatches: int
    tokens_per_microbatch: int
    share: int  # which part of every batch this rank trains on, of `shares`
    shares: int
    device: torch.device
    images: SampleImages | None = None  # of the rows, if the data has any


def masks(rollout: Rollout, sequence: TrainSample, settings: PlanSettings) -> tuple[Mask, Mask]:
    """Return the tokens of `keep` that are too old, and the others if the response was cut off: both leave.

    Each mask has one entry per response token.
    """
    nothing = np.zeros_like(sequence.keep)
    stale = sequence.keep & (sequence.lag > settings.max_lag) if settings.mask_stale else nothing
    is_cut = settings.mask_truncated and rollout.truncated
    return stale, sequence.keep & ~stale if is_cut else nothing


def masked_shares(
    sequences: Sequence[TrainSample],
    masked: Sequence[tuple[Mask, Mask]],
    max_response_tokens: int,
    turn_part_T: Tensor | None = None,
) -> dict[str, float]:
    """Return the masked shares of all action tokens, of each length band and part of a conversation.

    `sequences` are those before the masks; `turn_part_T` has one entry per action token of them.
    """
    kept = [sequence.keep for sequence in sequences]
    stale_T, truncated_T = (
        torch.from_numpy(np.concatenate([each[keep] for each, keep in zip(column, kept, strict=True)]))
        for column in zip(*masked, strict=True)
    )
    lengths_S = torch.tensor([int(keep.sum()) for keep in kept])
    band_T = length_bands(lengths_S, max_response_tokens).repeat_interleave(lengths_S)
    every_T = torch.ones_like(stale_T)
    parts = {f"staleness/masked_share/{band}": band_T == at for at, band in enumerate(BANDS)}
    if turn_part_T is not None:
        parts |= {f"staleness/masked_share/turn/{turn}": turn_part_T == at for at, turn in enumerate(TURNS)}

    def share(masked_T: Tensor, part_T: Tensor) -> float:
        return float((masked_T & part_T).sum()) / max(int(part_T.sum()), 1)

    return {
        "staleness/masked_share": share(stale_T, every_T),
        **{name: share(stale_T, part_T) for name, part_T in parts.items()},
        "completions/masked_share": share(truncated_T, every_T),
    }


def measure(
    trainer: Trainer, sequences: Sequence[TrainSample], columns: Collection[str], settings: PlanSettings
) -> dict[str, Tensor]:
    """Return the columns of all kept tokens, float32 [T] in the order of `sequences`, on every rank.

    Each rank measures its share of packed micro-batches. Without columns, nothing runs and nothing is sent.
    The reference is not measured if a teacher in scorer processes has measured it already.
    """
    recorded: dict[str, Tensor] = {}
    if "reference_logprobs_T" in columns and sequences and TEACHER in sequences[0].recorded:
        taught = np.concatenate([one.recorded[TEACHER][one.keep] for one in sequences])
        # NaN stands in groups without the column, after a resume without the processes of the teacher.
        if not np.isnan(taught).any():
            recorded = {"reference_logprobs_T": torch.from_numpy(taught)}
    names = sorted(set(columns) - set(recorded))
    if not names:
        return recorded
    shares = deal(sequences, settings.tokens_per_microbatch, trainer.shares)
    own = [[sequences[i] for i in members] for members in shares[trainer.share]]
    batches = [microbatch(members, settings.device, settings.images) for members in own]
    measured = trainer.measure(batches, names)
    parts = trainer.gather(
        b"".join(
            torch.cat([part[name] for part in measured]).float().cpu().numpy().tobytes()
            for name in names
            if measured
        )
    )
    ends = np.cumsum([int(sequence.keep.sum()) for sequence in sequences])
    columns_CT = np.empty((len(names), int(ends[-1]) if len(ends) else 0), dtype=np.float32)
    for part, bins in zip(parts, shares, strict=True):
        owned = [np.arange(ends[i] - sequences[i].keep.sum(), ends[i]) for members in bins for i in members]
        if owned:
            part_CT = np.frombuffer(part, dtype=np.float32).reshape(len(names), -1)
            columns_CT[:, np.concatenate(owned)] = part_CT
    return dict(zip(names, map(torch.from_numpy, columns_CT), strict=True)) | recorded
