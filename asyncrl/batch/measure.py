"""Measures columns that cost a forward pass, over all action tokens of a batch, for its advantages.

Axes in names:  C columns, T action tokens of the batch before any mask.
"""

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from asyncrl.batch.packing import SampleImages, TrainSample, deal, microbatch
from asyncrl.columns import TEACHER
from asyncrl.trainer.base import Trainer


def measure(
    trainer: Trainer,
    sequences: Sequence[TrainSample],
    columns: Collection[str],
    *,
    budget_tokens: int,
    device: torch.device,
    images: SampleImages | None = None,
) -> dict[str, Tensor]:
    """Return the columns of all kept tokens, float32 [T] in the order of `sequences`, on every rank.

    Each rank measures its share of packed micro-batches. Without columns, nothing runs and nothing is sent.
    The reference is not measured if a teacher in scorer processes has measured it already.
    """
    recorded: dict[str, Tensor] = {}
    if "reference_logprobs_T" in columns and sequences and TEACHER in sequences[0].recorded:
        taught = [one.recorded[TEACHER][one.keep] for one in sequences]
        recorded = {"reference_logprobs_T": torch.from_numpy(np.concatenate(taught))}
    names = sorted(set(columns) - set(recorded))
    if not names:
        return recorded
    shares = deal(sequences, budget_tokens, trainer.shares)
    own = shares[trainer.share]
    batches = [microbatch([sequences[i] for i in members], device, images) for members in own]
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
    measured_T = {name: torch.from_numpy(column_T) for name, column_T in zip(names, columns_CT, strict=True)}
    return measured_T | recorded
