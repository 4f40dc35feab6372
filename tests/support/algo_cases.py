"""Random batches for the tests of asyncrl.algo, and the same ones as plain Python numbers for the oracles."""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asyncrl.algo.group_rewards import GroupRewards
from asyncrl.algo.tokens import TokenBatch


class Token(NamedTuple):
    """One action token, as floats. `anchor` is what the loss compares with."""

    logprob: float
    anchor: float
    behaviour: float
    advantage: float
    weight: float
    entropy: float


class Case(NamedTuple):
    """A batch with the current policy's log-probabilities and entropies."""

    batch: TokenBatch
    logprobs_T: Tensor
    entropy_T: Tensor


def make_case(
    seed: int, *, proximal: bool = True, lengths: Sequence[int] | None = None, spread: float = 0.6
) -> Case:
    """Lengths 0 to 5, ratios on both sides of every usual clip, advantages of all signs, float64."""
    draw = random.Random(seed)
    lengths = [draw.randint(0, 5) for _ in range(draw.randint(1, 6))] if lengths is None else lengths
    torch_draw = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(sum(lengths), generator=torch_draw, dtype=torch.float64)

    behaviour_T = -0.05 - normal(1.5).abs()
    proximal_T = -0.01 - (behaviour_T + normal(spread)).abs()
    logprobs_T = -0.01 - ((proximal_T if proximal else behaviour_T) + normal(spread)).abs()
    advantages_S = torch.tensor(
        [draw.choice([-1.5, -0.4, 0.0, 0.7, 1.3]) for _ in lengths], dtype=torch.float64
    )
    sequence_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    batch = TokenBatch(
        sequence_T=sequence_T,
        num_sequences=len(lengths),
        behaviour_logprobs_T=behaviour_T,
        proximal_logprobs_T=proximal_T if proximal else None,
        advantages_T=advantages_S[sequence_T],
        weights_T=torch.rand(sum(lengths), generator=torch_draw, dtype=torch.float64) * 2,
        lag_T=torch.randint(0, 4, (sum(lengths),), generator=torch_draw),
    )
    return Case(batch, logprobs_T, normal(1.0).abs())


def rows(case: Case) -> list[list[Token]]:
    """The tokens of every sequence."""
    batch = case.batch
    found: list[list[Token]] = [[] for _ in range(batch.num_sequences)]
    weights_T = torch.ones(batch.tokens) if batch.weights_T is None else batch.weights_T
    columns = (
        case.logprobs_T,
        batch.anchor_logprobs_T,
        batch.behaviour_logprobs_T,
        batch.advantages_T,
        weights_T,
        case.entropy_T,
    )
    for index, *values in zip(
        batch.sequence_T.tolist(), *(column.tolist() for column in columns), strict=True
    ):
        found[index].append(Token(*values))
    return found


def pick(case: Case, sequences: Sequence[int]) -> Case:
    """The case with these sequences only, in this order."""
    batch = case.batch
    tokens = [torch.where(batch.sequence_T == index)[0] for index in sequences]
    order = torch.cat([*tokens, torch.zeros(0, dtype=torch.int64)])
    columns: dict[str, Any] = {
        field.name: column[order]
        for field in dataclasses.fields(batch)
        if field.name.endswith("_T") and (column := getattr(batch, field.name)) is not None
    }
    columns["sequence_T"] = torch.cat(
        [torch.full((len(t),), i) for i, t in enumerate(tokens)] + [order[:0]]
    ).long()
    return Case(
        TokenBatch(**columns, num_sequences=len(sequences)), case.logprobs_T[order], case.entropy_T[order]
    )


def cast(case: Case, dtype: torch.dtype) -> Case:
    """Every floating column in another precision."""
    batch = case.batch
    columns: dict[str, Any] = {
        field.name: column.to(dtype)
        for field in dataclasses.fields(batch)
        if isinstance(column := getattr(batch, field.name), Tensor) and column.is_floating_point()
    }
    return Case(dataclasses.replace(batch, **columns), case.logprobs_T.to(dtype), case.entropy_T.to(dtype))


def make_rewards(
    seed: int, *, sizes: Sequence[int] | None = None, token_rewards: bool = False
) -> GroupRewards:
    """Groups of 1 to 5, lengths 0 to 4; rewards from few values, so that ties and flat groups are common."""
    draw = random.Random(seed)
    sizes = [draw.randint(1, 5) for _ in range(draw.randint(1, 4))] if sizes is None else sizes
    lengths = [draw.randint(0, 4) for _ in range(sum(sizes))]
    values = [draw.choice([0.0, 1.0, 0.1, draw.uniform(-1, 2)]) for _ in lengths]
    if draw.random() < 0.3:
        values = [draw.choice([0.0, 1.0]) for _ in lengths]

    def uniform(count: int, low: float = -1.0, high: float = 1.0) -> Tensor:
        return torch.tensor([draw.uniform(low, high) for _ in range(count)], dtype=torch.float32)

    tokens = sum(lengths)
    rewards = GroupRewards(
        rewards_S=torch.tensor(values, dtype=torch.float32),
        group_S=torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)),
        num_groups=len(sizes),
        lengths_S=torch.tensor(lengths),
        sequence_T=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        parts={
            "right": torch.tensor([float(draw.random() < 0.5) for _ in lengths]),
            "short": uniform(len(lengths)),
        },
        token_rewards_T=uniform(tokens, -0.2, 0.2) if token_rewards else None,
        values_T=uniform(tokens),
        greedy_rewards_group=uniform(len(sizes)),
        logprobs_T=uniform(tokens, -3.0, -0.1),
        behaviour_logprobs_T=uniform(tokens, -3.0, -0.1),
        reference_logprobs_T=uniform(tokens, -3.0, -0.1),
        truncated_S=uniform(len(lengths)) > 0,
        sum_squared_probs_T=uniform(tokens, 0.3, 1.0),
    )
    turns = [_turns(draw, length) for length in lengths]  # tokens of each turn, for each sequence
    flat = [count for counts in turns for count in counts]
    return dataclasses.replace(
        rewards,
        episode_K=torch.repeat_interleave(
            torch.arange(len(turns)), torch.tensor([len(one) for one in turns])
        ),
        turn_T=torch.repeat_interleave(torch.arange(len(flat)), torch.tensor(flat, dtype=torch.int64)),
        turn_rewards_K=torch.tensor([draw.choice([0.0, 0.5, draw.uniform(-1, 1)]) for _ in flat]),
        turn_states_K=torch.tensor([draw.choice([-7, 0, 3, 1 << 62]) for _ in flat], dtype=torch.int64),
        expected_S=uniform(len(lengths)).double(),
    )


def _turns(draw: random.Random, tokens: int) -> list[int]:
    """Divide the tokens of a sequence into turns of at least one."""
    found: list[int] = []
    while tokens:
        found.append(draw.randint(1, tokens))
        tokens -= found[-1]
    return found
