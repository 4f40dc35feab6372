"""Packs sequences of unequal length into micro-batches of nearly equal work, in the same way on every rank.

Axes in names:  R response tokens of one sequence, N tokens of a micro-batch, T its action tokens.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.algo.aggregation import Counts
from asyncrl.algo.tokens import TokenBatch
from asyncrl.columns import COLUMNS, EXPERTS, KEPT_COUNTS, KEPT_IDS, NONE, filled
from asyncrl.errors import ShapeError
from asyncrl.trainer.base import MicroBatch
from asyncrl.types import Group


class SampleImages(Protocol):
    """The images of samples (`data/images.py`)."""

    # An image that no sample has, and the tokens of a prompt with nothing else.
    blank: bytes
    blank_ids: NDArray[np.int32]

    def of(self, group: Group) -> tuple[bytes, ...]:
        """Return the images of a group's prompt."""

    def inputs(self, images: Sequence[bytes]) -> Mapping[str, torch.Tensor]:
        """Return what the model's forward pass takes of a pack with these images."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainSample:
    """One prompt and response as the trainer sees them. Columns have one entry per response token."""

    prompt_ids: NDArray[np.int32]
    response_ids: NDArray[np.int32]
    keep: NDArray[np.bool_]  # action tokens; in a plan only those that no mask took out of the loss
    behaviour_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    lag: NDArray[np.int64]
    # Kept tokens of its episode; None if each episode of the minibatch is one sequence.
    episode_tokens: int | None = None
    # Further columns under the names of `TokenBatch`, the same names in all sequences of a batch.
    columns: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    # What the generator recorded of each token besides, [R, ...]; the same names in all sequences of a batch.
    recorded: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    # int16 [tokens of prompt and response, layers, top_k]: the experts that the engine chose; -1: unknown.
    experts: NDArray[np.int16] | None = None
    # int32, as many for each token as `recorded["kept_counts"]` says: the ids that it could have been.
    kept_ids: NDArray[np.int32] | None = None
    # The files of the prompt's images.
    images: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        fields = ("keep", "behaviour_logprobs", "advantages", "lag")
        columns = {**{name: getattr(self, name) for name in fields}, **self.columns, **self.recorded}
        size = len(self.response_ids)
        if wrong := {name: len(column) for name, column in columns.items() if len(column) != size}:
            raise ShapeError(f"sequence has {size} response tokens, but {wrong}; give each token one entry")
        if len(self.prompt_ids) == 0:
            raise ShapeError(
                "sequence has an empty prompt; a token before the first response token predicts it"
            )

    @property
    def tokens(self) -> int:
        """Return the number of prompt and response tokens."""
        return len(self.prompt_ids) + len(self.response_ids)


def samples_of(
    groups: Sequence[Group], version: int, images: SampleImages | None = None
) -> tuple[TrainSample, ...]:
    """Return one sample per rollout, with every action token and without advantages."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    own = [seen for group in groups for seen in [images.of(group) if images else ()] * len(group.rollouts)]
    lengths = [len(rollout.response_ids) for rollout in rollouts]
    names = {name for rollout in rollouts for name in rollout.recorded}
    totals = [len(rollout.prompt_ids) + len(rollout.response_ids) for rollout in rollouts]
    experts = filled(EXPERTS, [rollout.recorded.get(EXPERTS) for rollout in rollouts], totals)
    recorded = {
        name: filled(name, [rollout.recorded.get(name) for rollout in rollouts], lengths)
        for name in sorted(names)
        if COLUMNS[name].axes[0] == "response_tokens"
    }
    return tuple(
        TrainSample(
            prompt_ids=rollout.prompt_ids,
            response_ids=rollout.response_ids,
            keep=rollout.action_mask,
            behaviour_logprobs=rollout.behaviour_logprobs,
            advantages=np.zeros(len(rollout.response_ids), dtype=np.float32),
            lag=version - rollout.versions,
            recorded={name: pieces[index] for name, pieces in recorded.items()},
            experts=experts[index] if experts else None,
            kept_ids=rollout.recorded.get(KEPT_IDS),
            images=own[index],
        )
        for index, rollout in enumerate(rollouts)
    )


def counted(samples: Sequence[TrainSample], rollouts: Sequence[int]) -> tuple[Sequence[TrainSample], Counts]:
    """Return the samples of an optimizer step with the tokens of their episodes, and what divides its losses.

    `rollouts` has the number of samples of each episode.
    """
    kept = [int(sample.keep.sum()) for sample in samples]
    solved = [one.columns["solved_T"][one.keep].sum() for one in samples if "solved_T" in one.columns]
    of_episode = np.add.reduceat(kept, np.cumsum([0, *rollouts[:-1]]))
    if len(rollouts) < len(samples):
        samples = [
            replace(sample, episode_tokens=int(tokens))
            for sample, tokens in zip(samples, np.repeat(of_episode, rollouts), strict=True)
        ]
    return samples, Counts(sum(kept), int(np.count_nonzero(of_episode)), int(sum(solved)))


def pack(lengths: Sequence[int], budget_tokens: int, ranks: int = 1) -> list[list[int]]:
    """Put indices of `lengths` into bins of at most `budget_tokens`, with even loads and in few rounds.

    First-fit decreasing gives the number of rounds of `ranks` bins. Then each item, longest first, goes to
    the emptiest of these bins; if that does not fit, first fit stays. So every rank has work in every round,
    if there are enough items. Raises ShapeError if an item alone is over the budget.
    """
    longest = max(lengths, default=0)
    if longest > budget_tokens:
        raise ShapeError(
            f"a sequence of {longest} tokens exceeds the budget of {budget_tokens} tokens; raise "
            "learner.tokens_per_microbatch"
        )
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    first_fit = _fill(order, lengths, budget_tokens)
    bins: list[list[int]] = [[] for _ in range(min(-(-len(first_fit) // ranks) * ranks, len(lengths)))]
    loads = [0] * len(bins)
    for i in order:
        place = loads.index(min(loads))
        if loads[place] + lengths[i] > budget_tokens:
            return [sorted(members) for members in first_fit]
        bins[place].append(i)
        loads[place] += lengths[i]
    return [sorted(members) for members in bins]


def _fill(order: Sequence[int], lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    loads: list[int] = []
    for i in order:
        fitting = (b for b, load in enumerate(loads) if load + lengths[i] <= budget_tokens)
        if (place := next(fitting, len(bins))) == len(bins):
            bins.append([])
            loads.append(0)
        bins[place].append(i)
        loads[place] += lengths[i]
    return bins


def share_out(bins: Sequence[Sequence[int]], ranks: int, lengths: Sequence[int]) -> list[list[list[int]]]:
    """Return the bins of each rank, with empty ones added so that all ranks have the same number.

    Ranks meet in a collective after every micro-batch, so a round deals bins of similar size. The direction
    alternates, so that no rank gets the larger bin of every round.
    """
    order = sorted(range(len(bins)), key=lambda b: (-sum(lengths[i] for i in bins[b]), b))
    shares: list[list[list[int]]] = [[] for _ in range(ranks)]
    for turn, start in enumerate(range(0, len(order), ranks)):
        dealt = [list(bins[b]) for b in order[start : start + ranks]]
        dealt += [[]] * (ranks - len(dealt))
        for rank, members in enumerate(dealt if turn % 2 == 0 else reversed(dealt)):
            shares[rank].append(members)
    return shares


def deal(sequences: Sequence[TrainSample], budget_tokens: int, ranks: int) -> list[list[list[int]]]:
    """Return the indices of sequences with a kept token, for each rank and each of its micro-batches."""
    kept = [i for i, sequence in enumerate(sequences) if sequence.keep.any()]
    lengths = [sequences[i].tokens for i in kept]
    shares = share_out(pack(lengths, budget_tokens, ranks), ranks, lengths)
    return [[[kept[j] for j in members] for members in bins] for bins in shares]


def per_sample(column_T: torch.Tensor, samples: Sequence[TrainSample]) -> list[NDArray[np.float32]]:
    """Split a flat column into one entry per response token of each sample; 0 where it is not an action."""
    keep = np.concatenate([sample.keep for sample in samples])
    column = np.zeros(len(keep), dtype=np.float32)
    column[keep] = column_T.numpy()
    return np.split(column, np.cumsum([len(sample.keep) for sample in samples])[:-1])


def microbatch(
    sequences: Sequence[TrainSample], device: torch.device, images: SampleImages | None = None
) -> MicroBatch:
    """Lay the sequences end to end; kept tokens become action tokens. There may be no sequences.

    With `images`, a micro-batch without any ends with a blank one, from which no action token follows: ranks
    gather sharded weights together, so that each must run the same parts of the model.
    """
    ids = [part for sequence in sequences for part in (sequence.prompt_ids, sequence.response_ids)]
    lengths = [sequence.tokens for sequence in sequences]
    seen = [image for sequence in sequences for image in sequence.images]
    if images is not None and not seen:
        seen, ids, lengths = [images.blank], [*ids, images.blank_ids], [*lengths, len(images.blank_ids)]
    starts = np.cumsum([0, *lengths])
    # Response token r stands at start + prompt + r; the token before it predicts it.
    kept = [np.flatnonzero(sequence.keep) for sequence in sequences]
    sources = [
        start + len(sequence.prompt_ids) + r - 1
        for start, sequence, r in zip(starts[: len(sequences)], sequences, kept, strict=True)
    ]

    def joined(columns: Iterable[NDArray[Any]], dtype: torch.dtype | None = None) -> torch.Tensor:
        return _joined([column[r] for column, r in zip(columns, kept, strict=True)], dtype, device)

    of_episodes = [sequence.episode_tokens for sequence in sequences if sequence.episode_tokens is not None]
    measured, recorded = (sequences[0].columns, sequences[0].recorded) if sequences else ({}, {})
    tokens = TokenBatch(
        sequence_T=_joined([np.full(len(r), s) for s, r in enumerate(kept)], torch.int64, device),
        num_sequences=len(sequences),
        behaviour_logprobs_T=joined((sequence.behaviour_logprobs for sequence in sequences), torch.float32),
        advantages_T=joined((sequence.advantages for sequence in sequences), torch.float32),
        lag_T=joined((sequence.lag for sequence in sequences), torch.int64),
        episode_tokens_S=torch.tensor(of_episodes, device=device) if of_episodes else None,
        recorded={name: joined(sequence.recorded[name] for sequence in sequences) for name in recorded},
        **{
            name: joined((sequence.columns[name] for sequence in sequences), torch.float32)
            for name in measured
        },
    )
    inputs = images.inputs(seen) if images is not None else {}
    experts = [sequence.experts for sequence in sequences if sequence.experts is not None]
    return MicroBatch(
        input_ids_N=_joined(ids, torch.int64, device),
        position_ids_N=_joined([np.arange(length) for length in lengths], torch.int64, device),
        sequence_starts=tuple(starts.tolist()),
        source_T=_joined(sources, torch.int64, device),
        target_T=joined((sequence.response_ids for sequence in sequences), torch.int64),
        tokens=tokens,
        experts_NLK=_joined(experts, torch.int16, device) if experts else None,
        kept_TK=_kept(sequences, device),
        model_inputs={name: tensor.to(device) for name, tensor in inputs.items()},
    )


def _kept(sequences: Sequence[TrainSample], device: torch.device) -> torch.Tensor | None:
    """Return [T, K]: the ids that each kept token could have been, filled up with -1."""
    counts = [sequence.recorded[KEPT_COUNTS] for sequence in sequences if sequence.kept_ids is not None]
    if not counts:
        return None
    ids = [one.kept_ids[np.repeat(one.keep, own)] for one, own in zip(sequences, counts, strict=True)]  # type: ignore[index]
    count_T = np.concatenate([own[one.keep] for one, own in zip(sequences, counts, strict=True)])
    kept_TK = np.full((len(count_T), count_T.max(initial=1)), NONE, dtype=np.int32)
    kept_TK[np.arange(kept_TK.shape[1]) < count_T[:, None]] = np.concatenate(ids)
    return torch.from_numpy(kept_TK).to(device)


def _joined(parts: Sequence[NDArray[Any]], dtype: torch.dtype | None, device: torch.device) -> torch.Tensor:
    """Return the parts end to end, with their own data type if `dtype` is None."""
    joined = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
    return torch.from_numpy(joined).to(device=device, dtype=dtype)
