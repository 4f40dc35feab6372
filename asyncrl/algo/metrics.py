"""What one optimizer step looked like: sums that add up over micro-batches and ranks, then the published numbers.

Sums are floats by name; names that end in `/max` are reduced by maximum, all others by addition (`merge`). Ratios here
are raw: a clipped or truncated ratio cannot show the tail that ends a run. Log-ratios are clamped to +-20.

    mismatch/*   proximal against behaviour: staleness plus the numerical difference of generator and learner
    policy/*     current against proximal: how far this update has moved
    drift/*      current against behaviour: both together
"""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from asyncrl.algo.ratios import log_ratio, sums
from asyncrl.algo.rewards import GroupRewards
from asyncrl.algo.tokens import TokenBatch

TAIL = 2.0
"""A raw ratio beyond this, or below its inverse, is counted as tail."""


def policy_metrics(batch: TokenBatch, logprobs_T: Tensor, entropy_T: Tensor | None = None) -> dict[str, float]:
    """Sums over the tokens of one micro-batch; feed them to `merge` and `finish`."""
    current_T = logprobs_T.detach()
    columns: dict[str, Tensor] = {
        "tokens": torch.ones_like(current_T),
        "sequences": batch.lengths_S > 0,
        "policy/logprob": current_T,
        "advantage/mean": batch.advantages_T,
        "advantage/abs": batch.advantages_T.abs(),
    }
    maxima: dict[str, Tensor] = {}
    pairs = {
        "mismatch": (batch.anchor_logprobs_T, batch.behaviour_logprobs_T),
        "policy": (current_T, batch.anchor_logprobs_T),
        "drift": (current_T, batch.behaviour_logprobs_T),
    }
    for name, (to_T, from_T) in pairs.items():
        _add_ratio(columns, maxima, name, log_ratio(to_T.detach(), from_T))
    if entropy_T is not None:
        columns["policy/entropy"] = entropy_T
    if batch.weights_T is not None:
        columns["weight/mean"] = batch.weights_T
        columns["weight/zero"] = batch.weights_T == 0
        maxima["weight/max"] = batch.weights_T
    if batch.lag_T is not None:
        columns["lag/mean"] = batch.lag_T
        columns["lag/stale"] = batch.lag_T > 0
        maxima["lag/max"] = batch.lag_T
    if batch.reference_logprobs_T is not None:
        columns["reference/nll"] = -batch.reference_logprobs_T
        columns["reference/k3"] = _k3(log_ratio(batch.reference_logprobs_T, current_T))
    return sums(**columns) | _maxima(maxima, batch.tokens)


def group_metrics(rewards: GroupRewards) -> dict[str, float]:
    """Sums over the groups and sequences of one batch; rewards are those the advantages were made from."""
    totals_S = rewards.totals_S
    sizes_G = torch.bincount(rewards.group_S, minlength=rewards.num_groups)
    std_S = rewards.group_std_S(totals_S, ddof=1)
    return sums(
        **{
            "groups": sizes_G > 0,
            "rewards": torch.ones_like(totals_S),
            "group/singleton": sizes_G == 1,
            # Each group counts once, however many sequences it has.
            "group/zero_variance": (std_S == 0) / rewards.sizes_S,
            "group/reward_std": std_S / rewards.sizes_S,
            "reward/mean": totals_S,
            "reward/square": totals_S.square(),
        }
    )


def merge(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Sums of all micro-batches or ranks: maxima by maximum, the rest added. Not all need to have all names."""
    merged: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            if name not in merged:
                merged[name] = value
            else:
                merged[name] = _larger(merged[name], value) if name.endswith("/max") else merged[name] + value
    return merged


def finish(sums: Mapping[str, float]) -> dict[str, float]:
    """Published metrics from fully reduced sums.

    `<pair>/ess` is the effective share of the tokens, (sum r)^2 / (n sum r^2), 1 when all ratios are equal. Names in
    `group/` become means over groups, names in `reward/` over sequences, all other sums (also a loss's or correction's)
    means over tokens; maxima stay.
    """
    counts = {name: sums.get(name, 0.0) for name in ("tokens", "sequences", "groups", "rewards")}
    published = {name: counts[name] for name in ("tokens", "sequences", "groups") if name in sums}
    for name, value in sums.items():
        if name.endswith("/max"):
            published[name] = value
        elif name not in counts:
            kind = {"group": "groups", "reward": "rewards"}.get(name.split("/")[0], "tokens")
            published[name] = value / max(counts[kind], 1.0)
    for name in [name for name in published if name.endswith("/ratio_square")]:
        pair = name.removesuffix("/ratio_square")
        square = published.pop(name)
        published[f"{pair}/ess"] = published[f"{pair}/ratio"] ** 2 / square if square > 0 else 0.0
    if "reward/square" in published:
        square = published.pop("reward/square")
        published["reward/std"] = max(square - published["reward/mean"] ** 2, 0.0) ** 0.5
    return published


def _larger(first: float, second: float) -> float:
    """The maximum; NaN, whichever of them it is, as in a sum."""
    return first if first > second or math.isnan(first) else second


def _add_ratio(columns: dict[str, Tensor], maxima: dict[str, Tensor], name: str, log_ratio_T: Tensor) -> None:
    ratio_T = log_ratio_T.double().exp()
    columns[f"{name}/k1"] = -log_ratio_T
    columns[f"{name}/k3"] = _k3(log_ratio_T)
    columns[f"{name}/ratio"] = ratio_T
    columns[f"{name}/ratio_square"] = ratio_T.square()
    columns[f"{name}/tail_high"] = ratio_T > TAIL
    columns[f"{name}/tail_low"] = ratio_T < 1.0 / TAIL
    maxima[f"{name}/ratio/max"] = ratio_T
    maxima[f"{name}/abs_log_ratio/max"] = log_ratio_T.abs()


def _k3(log_ratio_T: Tensor) -> Tensor:
    """Estimate of the KL divergence from the policy that the tokens come from; see `kl.k3`."""
    return torch.expm1(log_ratio_T.double()) - log_ratio_T


def _maxima(columns: Mapping[str, Tensor], tokens: int) -> dict[str, float]:
    if not tokens:
        return {}
    return dict(zip(columns, torch.stack([column.double().max() for column in columns.values()]).tolist(), strict=True))
