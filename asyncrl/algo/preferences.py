"""Preferences between the episodes of a group, and distillation from the reference, as advantages.

A token's advantage is -S times the derivative of the objective by its log-probability, under the weights that
the step starts from. So with policy loss `reinforce`, aggregation `seq-mean-token-sum` and one optimizer step
per batch, the step's gradient is exactly that of the objective.

    h  sum_t (ln pi - ln pi_ref) of an episode           S  episodes of the batch with an action token
    m  h of the chosen minus h of the rejected episode   P  groups with a pair of episodes of unlike reward

The objective is a mean over the P groups, and in each over its pairs: equal rewards give several pairs.
Rewards are those after shaping. Sums over tokens are in float64; results are float32 [T].
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from asyncrl.algo.group_rewards import GroupRewards
from asyncrl.algo.ranges import EQUAL, NonNegative, Positive
from asyncrl.algo.tokens import segment_sum


def dpo_pairs(
    rewards: GroupRewards,
    *,
    beta: Positive = 0.1,
    pairs: Literal["best_worst", "all"] = "best_worst",
    margin: NonNegative = 0.0,
) -> Tensor:
    """± beta sigmoid(-beta m) S / P: the gradient of -ln sigmoid(beta m).

    Args:
        pairs: the best with the worst of a group, or any two episodes of unlike reward.
        margin: difference in reward that the episodes of a pair must exceed.

    Source: Rafailov et al. 2023 (arXiv:2305.18290); Guo et al. 2024 (arXiv:2402.04792), online.
    """
    found = pairs_of(rewards, pairs, margin)
    return _advantages(rewards, found, beta * torch.sigmoid(-beta * found.difference(_log_ratio_S(rewards))))


def ipo_pairs(rewards: GroupRewards, *, beta: Positive = 0.1) -> Tensor:
    """∓ 2 (m - 1 / (2 beta)) S / P, of the best and the worst: the gradient of (m - 1 / (2 beta))^2.

    Source: Azar et al. 2023 (arXiv:2310.12036) eq. 17; m is a sum over tokens, in TRL a difference of means.
    """
    found = pairs_of(rewards)
    return _advantages(rewards, found, -2.0 * (found.difference(_log_ratio_S(rewards)) - 0.5 / beta))


def kto(
    rewards: GroupRewards,
    *,
    beta: Positive = 0.1,
    threshold: float | None = None,
    undesirable: Positive = 1.0,
) -> Tensor:
    """± w beta v (1 - v) S / N, v = sigmoid(± (beta h - z)): the gradient of the mean of w (1 - v) over N.

    z = beta max(0, mean of h over the batch) is a constant of the step. N counts the episodes with a sign.

    Args:
        threshold: reward above which an episode is desirable, else undesirable; null: the mean of its group,
            and an episode just at the mean has no sign.
        undesirable: weight w of an undesirable episode; a desirable one has 1.

    Source: Ethayarajh et al. 2024 (arXiv:2402.01306) eq. 7; TRL takes z from answers to other prompts.
    """
    counts_S = rewards.lengths_S > 0
    if threshold is None:
        centred_S = rewards.centred_S(rewards.rewards_S.double())
        sign_S = centred_S.sign() * (centred_S.abs() > EQUAL) * counts_S
    else:
        sign_S = (2.0 * (rewards.rewards_S > threshold) - 1.0).double() * counts_S
    log_ratio_S = _log_ratio_S(rewards)
    baseline = beta * (log_ratio_S.sum() / counts_S.sum().clamp(min=1)).clamp(min=0.0)
    value_S = torch.sigmoid(sign_S * (beta * log_ratio_S - baseline))
    weight_S = 1.0 + (undesirable - 1.0) * (sign_S < 0).double()
    slope_S = sign_S * weight_S * beta * value_S * (1.0 - value_S)
    return rewards.per_token(slope_S * counts_S.sum() / sign_S.abs().sum().clamp(min=1.0))


def best_of_n(rewards: GroupRewards) -> Tensor:
    """S / P for the best of a group, which equals share; 0 for the others: fine-tuning on the best answer.

    Source: Dong et al. 2023 (arXiv:2304.06767), RAFT.
    """
    found = pairs_of(rewards)
    return _advantages(rewards, found, torch.ones_like(found.weight_P), rejects=False)


def distill(rewards: GroupRewards, *, clip: Positive = 5.0, reward: NonNegative = 0.0) -> Tensor:
    """clip(ln pi_ref - ln pi, -clip, clip) of each token + reward (R - mean_group): on-policy distillation.

    Its expectation is minus the gradient of KL(pi || pi_ref) at each token, the reference being the teacher.

    Args:
        reward: weight of the task's reward; 0 learns from the teacher alone.

    Source: Agarwal et al. 2023 (arXiv:2306.13649); Lu et al. 2025, "On-policy distillation".
    """
    logprobs_T, reference_T = rewards.column("logprobs_T"), rewards.column("reference_logprobs_T")
    teacher_T = (reference_T.double() - logprobs_T.double()).clamp(-clip, clip)
    task_S = reward * rewards.centred_S(rewards.rewards_S.double())
    return (teacher_T + task_S[rewards.sequence_T]).float()


def preference_metrics(rewards: GroupRewards) -> dict[str, float]:
    """Published numbers of the pairs of best and worst; none if the batch lacks a column that they need."""
    if rewards.logprobs_T is None or rewards.reference_logprobs_T is None:
        return {}
    found = pairs_of(rewards)
    if not found.groups:
        return {"preference/pairs": 0.0}
    margin_P = found.difference(_log_ratio_S(rewards))
    logprob_S = segment_sum(rewards.logprobs_T.double(), rewards.sequence_T, rewards.num_sequences)
    columns = {
        "preference/pairs": torch.full_like(margin_P, found.groups),
        "preference/margin": margin_P,
        "preference/accuracy": (margin_P > 0).double(),
        "preference/chosen_logprob": logprob_S[found.chosen_P],
        "preference/rejected_logprob": logprob_S[found.rejected_P],
    }
    return {name: float(column_P @ found.weight_P) / found.groups for name, column_P in columns.items()}


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Pairs of episodes [P], by their indices among the sequences of a batch."""

    chosen_P: Tensor  # int64
    rejected_P: Tensor  # int64
    weight_P: Tensor  # float64, 1 for all pairs of a group together
    groups: int  # with a pair

    def difference(self, values_S: Tensor) -> Tensor:
        """[P]: the value of the chosen minus that of the rejected episode."""
        return values_S[self.chosen_P] - values_S[self.rejected_P]


def pairs_of(
    rewards: GroupRewards, pairs: Literal["best_worst", "all"] = "best_worst", margin: float = 0.0
) -> _Pairs:
    """Pair the episodes of each group that have an action token and unlike rewards."""
    indices_S = torch.arange(rewards.num_sequences, device=rewards.rewards_S.device)[rewards.lengths_S > 0]
    sizes = torch.bincount(rewards.group_S[indices_S], minlength=rewards.num_groups).tolist()
    found = [(indices_S[:0], indices_S[:0], torch.zeros(0, dtype=torch.float64, device=indices_S.device))]
    for members in torch.split(indices_S, sizes):
        rewards_M = rewards.rewards_S[members].double()
        gap_MM = rewards_M[:, None] - rewards_M
        is_pair_MM = gap_MM > margin + EQUAL
        if pairs == "best_worst" and len(members):
            is_pair_MM &= gap_MM == gap_MM.max()
        if count := int(is_pair_MM.sum()):
            chosen, rejected = is_pair_MM.nonzero(as_tuple=True)
            found.append((members[chosen], members[rejected], found[0][2].new_full((count,), 1.0 / count)))
    chosen_P, rejected_P, weight_P = (torch.cat(column) for column in zip(*found, strict=True))
    return _Pairs(chosen_P, rejected_P, weight_P, len(found) - 1)


def _advantages(rewards: GroupRewards, pairs: _Pairs, slope_P: Tensor, *, rejects: bool = True) -> Tensor:
    """float32 [T]: the slopes of the pairs, + for the chosen and - for the rejected, times S / P."""
    scale = int((rewards.lengths_S > 0).sum()) / max(pairs.groups, 1)
    slope_P = slope_P * pairs.weight_P * scale
    slope_S = torch.zeros(rewards.num_sequences, dtype=torch.float64, device=slope_P.device)
    slope_S.index_add_(0, pairs.chosen_P, slope_P)
    if rejects:
        slope_S.index_add_(0, pairs.rejected_P, -slope_P)
    return rewards.per_token(slope_S)


def _log_ratio_S(rewards: GroupRewards) -> Tensor:
    """float64 [S]: h, the log-probability ratio of each episode to the reference."""
    logprobs_T, reference_T = rewards.column("logprobs_T"), rewards.column("reference_logprobs_T")
    log_ratio_T = logprobs_T.double() - reference_T.double()
    return segment_sum(log_ratio_T, rewards.sequence_T, rewards.num_sequences)
