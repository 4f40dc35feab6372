"""Metrics of one optimizer step: sums over micro-batches and ranks, then the published numbers.

Names that end in `/max` or `/min` are reduced that way, all others by addition (`merge`). A micro-batch's
sums are tensors [] on its device, so the host need not wait. Ratios are raw: clipping or truncation would
hide the tail that ends a run. Log-ratios, and log-probabilities behind perplexities and `reference/nll`, are
clamped to +-20, so every metric is finite unless a behaviour or reference log-probability is NaN.

    mismatch/*   proximal / behaviour: staleness plus the numerical difference between generator and learner
    policy/*     current / proximal: how far this update has moved
    drift/*      current / behaviour: both together

Axes in names:  T action tokens, S sequences (rollouts), G groups.
"""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from asyncrl.algo.group_rewards import GroupRewards
from asyncrl.algo.tokens import LOG_RATIO_BOUND, TokenBatch, log_ratio, sums

# A raw ratio beyond this, or below its inverse, is counted as tail.
TAIL = 2.0
# Thirds of the longest response allowed. Dropping more long than short responses is a bias.
BANDS = ("short", "medium", "long")
# The turns of an episode: errors of engines and the age of tokens grow with the length of the conversation.
TURNS = ("first", "middle", "last")
# Metrics with these last names are means over sequences.
OVER_SEQUENCES = frozenset({"perplexity_ratio", "chi2_sequence"})


def policy_metrics(
    batch: TokenBatch,
    logprobs_T: Tensor,
    entropy_T: Tensor | None = None,
    *,
    left_out_T: Tensor | None = None,
    max_response_tokens: int | None = None,
) -> dict[str, Tensor]:
    """Sums over the tokens of one micro-batch, for `merge` and `finish`. A missing column is not measured.

    Args:
        batch: the micro-batch, with importance weights if there are any.
        logprobs_T: ln pi of the current policy.
        entropy_T: entropy of the current policy, in nats.
        left_out_T: bool, tokens that the policy loss leaves out.
        max_response_tokens: the longest response allowed; with it, dropped tokens are counted by `BANDS`.
    """
    current_T = logprobs_T.detach()
    columns: dict[str, Tensor] = {
        "tokens": torch.ones_like(current_T),
        "sequences": batch.lengths_S > 0,
        "policy/logprob": current_T,
        "perplexity/behaviour": _perplexity_S(batch, batch.behaviour_logprobs_T),
        "perplexity/proximal": _perplexity_S(batch, batch.anchor_logprobs_T),
        "perplexity/current": _perplexity_S(batch, current_T),
    }
    pairs = {
        "mismatch": (batch.anchor_logprobs_T, batch.behaviour_logprobs_T),
        "policy": (current_T, batch.anchor_logprobs_T),
        "drift": (current_T, batch.behaviour_logprobs_T),
    }
    for name, (to_T, from_T) in pairs.items():
        # Equal log-probabilities are a ratio of 1, also where both are infinite.
        log_ratio_T = torch.where(to_T == from_T, 0.0, log_ratio(to_T.detach(), from_T))
        columns |= _ratio_columns(name, batch, log_ratio_T)
        if name == "mismatch" and batch.turn_part_T is not None:
            # How far generator and learner are apart in each part of a conversation.
            for index, turn in enumerate(TURNS):
                is_T = batch.turn_part_T == index
                columns |= {f"tokens/{turn}": is_T, f"mismatch/turn/{turn}": log_ratio_T.abs() * is_T}
    if entropy_T is not None:
        columns["policy/entropy"] = entropy_T
    if batch.reference_logprobs_T is not None:
        columns["reference/nll"] = -batch.reference_logprobs_T.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        columns["reference/k3"] = _k3(log_ratio(batch.reference_logprobs_T, current_T))
    columns |= _batch_columns(batch)
    if max_response_tokens is not None:
        columns |= _dropped_columns(batch, left_out_T, max_response_tokens)
    return _reduced(columns, batch.tokens)


def group_metrics(rewards: GroupRewards) -> dict[str, Tensor]:
    """Sums over groups and sequences of one batch, of the rewards behind the advantages."""
    totals_S = rewards.totals_S
    sizes_G = torch.bincount(rewards.group_S, minlength=rewards.num_groups)
    std_S = rewards.group_std_S(totals_S, ddof=1)
    is_flat_S = rewards.group_std_S(rewards.rewards_S.double(), ddof=1) == 0  # without the KL of tokens
    columns = {
        "groups": sizes_G > 0,
        "rewards": torch.ones_like(totals_S),
        "group/singleton": sizes_G == 1,
        # Each group counts once, however many sequences it has.
        "group/zero_variance": (is_flat_S & (rewards.sizes_S > 1)) / rewards.sizes_S,
        "group/reward_std": std_S / rewards.sizes_S,
        "reward/mean": totals_S,
        "reward/square": totals_S.square(),
        "reward/min": totals_S,
        "reward/max": totals_S,
    }
    return _reduced(columns, rewards.num_sequences)


def merge(parts: Iterable[Mapping[str, float | Tensor]]) -> dict[str, float]:
    """Reduce micro-batches or ranks, which may lack names: extremes by maximum or minimum, others by sum.

    The host waits for the device once, whatever the number of parts.
    """
    merged: dict[str, float] = {}
    listed = [(name, value) for part in parts for name, value in part.items()]
    tensors = [value for _, value in listed if isinstance(value, Tensor)]
    on_device = [value.detach().to(tensors[0].device, torch.float64) for value in tensors]
    numbers = iter(torch.stack(on_device).tolist() if on_device else [])
    for name, found in listed:
        value = next(numbers) if isinstance(found, Tensor) else found
        if name not in merged:
            merged[name] = value
        elif name.endswith("/max"):
            merged[name] = _larger(merged[name], value)
        elif name.endswith("/min"):
            merged[name] = -_larger(-merged[name], -value)
        else:
            merged[name] += value
    return merged


def finish(sums: Mapping[str, float]) -> dict[str, float]:
    """Make the published metrics from fully reduced sums.

    `<pair>/ess` is the effective share of the tokens, (sum r)^2 / (n sum r^2), 1 when all ratios are equal.
    `group/*` become means over groups, `reward/*` over rewards, `perplexity/*` and `OVER_SEQUENCES` over
    sequences, names that end in a band or a turn over its tokens. All other sums, those of losses and
    corrections included, become means over tokens; extremes stay as they are. Without an answer to imitate
    there is no mean over them.
    """
    counted = ("tokens", "sequences", "groups", "rewards")
    counts = {name: value for name, value in sums.items() if name.split("/")[0] in counted}
    published = {name: value for name, value in counts.items() if name != "rewards"}
    for name, value in sums.items():
        count = counts.get(_denominator(name), 0.0)
        if name.endswith(("/max", "/min")):
            published[name] = value
        elif name not in counts and (count or not name.endswith("/solved")):
            published[name] = value / max(count, 1.0)
    # Only of what is measured here: losses and corrections of users call their sums as they like.
    for pair in [pair for pair in ("mismatch", "policy", "drift") if f"{pair}/ratio_square" in published]:
        square = published.pop(f"{pair}/ratio_square")
        published[f"{pair}/ess"] = published[f"{pair}/ratio"] ** 2 / square if square > 0 else 0.0
        published[f"{pair}/chi2_token"] = square - 1.0 if square > 0 else 0.0
    for of in [of for of in ("advantage", "reward") if f"{of}/square" in published]:
        variance = published.pop(f"{of}/square") - published[f"{of}/mean"] ** 2
        published[f"{of}/std"] = max(variance, 0.0) ** 0.5
    return published


def _denominator(name: str) -> str:
    """The count that a sum is divided by."""
    first, last = name.split("/")[0], name.rsplit("/", 1)[-1]
    if last in (*BANDS, *TURNS, "solved"):
        return f"tokens/{last}"
    if last in OVER_SEQUENCES:
        return "sequences"
    return {"group": "groups", "reward": "rewards", "perplexity": "sequences"}.get(first, "tokens")


def _larger(first: float, second: float) -> float:
    """The maximum; NaN if either is NaN, as in a sum."""
    return first if first > second or math.isnan(first) else second


def _ratio_columns(name: str, batch: TokenBatch, log_ratio_T: Tensor) -> dict[str, Tensor]:
    """Per-token columns and two [S]: ratio of perplexities, and chi-square divergence of whole responses."""
    log_ratio_T = log_ratio_T.double()
    ratio_T = log_ratio_T.exp()
    product_S = batch.sum_S(log_ratio_T).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return {
        f"{name}/k1": -log_ratio_T,
        f"{name}/k3": _k3(log_ratio_T),
        f"{name}/ratio": ratio_T,
        f"{name}/ratio_square": ratio_T.square(),
        f"{name}/tail_high": ratio_T > TAIL,
        f"{name}/tail_low": ratio_T < 1.0 / TAIL,
        f"{name}/ratio/max": ratio_T,
        f"{name}/ratio/min": ratio_T,
        f"{name}/abs_log_ratio/max": log_ratio_T.abs(),
        f"{name}/perplexity_ratio": _perplexity_S(batch, log_ratio_T),
        f"{name}/chi2_sequence": torch.expm1(2.0 * product_S),
    }


def _batch_columns(batch: TokenBatch) -> dict[str, Tensor]:
    """Columns of the batch itself, which do not depend on the current policy."""
    columns = {
        "advantage/mean": batch.advantages_T,
        "advantage/square": batch.advantages_T.double().square(),
        "advantage/abs": batch.advantages_T.abs(),
        "advantage/positive": batch.advantages_T > 0,
        "advantage/max": batch.advantages_T,
        "advantage/min": batch.advantages_T,
    }
    if batch.weights_T is not None:
        columns["weight/mean"] = batch.weights_T
        columns["weight/zero"] = batch.weights_T == 0
        columns["weight/max"] = batch.weights_T
    if batch.lag_T is not None:
        columns["lag/mean"] = batch.lag_T
        columns["lag/stale"] = batch.lag_T > 0
        columns["lag/max"] = batch.lag_T
    return columns


def _dropped_columns(
    batch: TokenBatch, left_out_T: Tensor | None, max_response_tokens: int
) -> dict[str, Tensor]:
    """Columns for each length band: its tokens, and those that the correction or the loss dropped."""
    band_T = length_bands(batch.lengths_S, max_response_tokens)[batch.sequence_T]
    columns = {}
    for index, band in enumerate(BANDS):
        columns[f"tokens/{band}"] = band_T == index
        if batch.weights_T is not None:
            columns[f"weight/zero/{band}"] = (batch.weights_T == 0) & (band_T == index)
        if left_out_T is not None:
            columns[f"policy/left_out/{band}"] = left_out_T & (band_T == index)
    return columns


def length_bands(lengths: Tensor, max_response_tokens: int) -> Tensor:
    """Index into `BANDS` for each length; a band is a third of `max_response_tokens`, with its upper end."""
    return (lengths * len(BANDS) - 1).div(max_response_tokens, rounding_mode="floor").clamp(0, len(BANDS) - 1)


def _perplexity_S(batch: TokenBatch, logprobs_T: Tensor) -> Tensor:
    """exp of the mean negative log-probability; 0 for an empty sequence, which is not counted either."""
    logprobs_T = logprobs_T.double().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return torch.where(batch.lengths_S > 0, (-batch.mean_S(logprobs_T)).exp(), 0.0)


def _k3(log_ratio_T: Tensor) -> Tensor:
    """[T]: estimate of KL(denominator || numerator) from the denominator's tokens; see `kl.k3`."""
    return torch.expm1(log_ratio_T.double()) - log_ratio_T


def _reduced(columns: Mapping[str, Tensor], size: int) -> dict[str, Tensor]:
    """The sum, maximum or minimum of each column, by its name; an empty batch has no extremes."""
    reduced: dict[str, Tensor] = {}
    for name, column in columns.items():
        if not name.endswith(("/max", "/min")):
            reduced[name] = column
        elif size:
            reduced[name] = column.max() if name.endswith("/max") else column.min()
    return sums(**reduced)
