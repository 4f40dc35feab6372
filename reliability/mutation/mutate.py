"""Breaks the mathematics, or how sequences are made, in one place at a time and sees whether the tests notice.

    python -m reliability.mutation.mutate            # all mutants, one line each; exit 1 if any survives
    python -m reliability.mutation.mutate losses     # those of one module

Works in a temporary copy. A mutant is a textual replacement that must match; one that no longer matches is an error.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import Phase, settings

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300


class Mutant(NamedTuple):
    """Replace the first `old` after `after` by `new`, in a module of asyncrl.algo, or of asyncrl if it has a slash."""

    module: str
    old: str
    new: str
    after: str = ""

    def file(self, root: Path) -> Path:
        """Return the module's file below a copy of the repository."""
        return root / "asyncrl" / ("" if "/" in self.module else "algo") / f"{self.module}.py"


TESTS = {
    "tokens": "aggregation losses corrections kl",
    "group_rewards": "advantages turn_advantages algo_metrics",
    "advantages": "advantages",
    "preferences": "preferences",
    "token_advantages": "advantages",
    "turn_advantages": "turn_advantages",
    "losses": "losses value",
    "corrections": "corrections advantages",
    "aggregation": "aggregation",
    "kl": "kl",
    "draws": "draws",
    "filters": "filters",
    "shaping": "shaping",
    "metrics": "algo_metrics",
    "ranges": "registry",
    "batch/objective": "composition",
    "batch/recipe": "composition objective tracker",
    "batch/plan": "composition",
    "batch/estimate": "composition",
    "batch/masks": "composition plan measure",
    "batch/resolve": "composition measure estimate tracker",
    "batch/coefficients": "coefficients kl tracker",
    "batch/packing": "packing composition",
    "./lora": "lora",
    "engine/vllm/adapter": "integration/test_vllm_adapter",
    "engine/vllm/engine": "integration/test_engine_lora",
    "engine/vllm/layerwise": "integration/test_vllm_experts",
    "data/images": "images",
    "data/image_processor": "images",
    "config/algorithm_rules": "config_schema",
    "config/registry": "registry",
    "session/tree": "session chat_rows",
    "trainer/policy": "logprobs sequence_parallel models memory_use",
    "trainer/head": "head logprobs kept_tokens",
}
"""Which tests must notice a change in a module."""

MUTANTS = [
    Mutant("tokens", "LOG_RATIO_BOUND = 20.0", "LOG_RATIO_BOUND = 21.0"),
    Mutant("tokens", ".clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)", ""),
    Mutant("tokens", ".clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)", ".clamp(max=LOG_RATIO_BOUND)"),
    Mutant("tokens", "(numerator_T - denominator_T.detach())", "(denominator_T.detach() - numerator_T)"),
    Mutant("tokens", "self.lengths_S.clamp(min=1)", "(self.lengths_S + 1)"),
    Mutant("tokens", "self.lengths_S.clamp(min=1)", "self.lengths_S"),
    Mutant("tokens", "values_T if self.weights_T is None else values_T * self.weights_T", "values_T"),
    Mutant("tokens", "if self.proximal_logprobs_T is None else self.proximal_logprobs_T", ""),
    Mutant("tokens", "dtype=torch.float64, device=values.device).index_add(\n        0, segment, values.double()",
           "dtype=values.dtype, device=values.device).index_add(\n        0, segment, values"),
    Mutant("group_rewards", "(self.group_sum_S(weights_S) - ddof).clamp(min=1)", "self.group_sum_S(weights_S)"),
    Mutant("group_rewards", "(self.group_sum_S(weights_S) - ddof).clamp(min=1)", "(self.group_sum_S(weights_S) - ddof)"),
    Mutant("group_rewards", "return variance_S.sqrt()", "return variance_S"),
    Mutant("group_rewards", "/ self.group_sum_S(weights_S)", "/ self.sizes_S"),
    Mutant("group_rewards", "self.rewards_S.double() + segment_sum(", "self.rewards_S.double() - segment_sum("),
    Mutant("group_rewards", "== 0, 0.0, values_T.roll(-1)", "< 0, 0.0, values_T.roll(-1)"),
    Mutant("group_rewards", "max(values.numel() - 1, 1)", "values.numel()"),
    Mutant("group_rewards", "+ WHITEN_EPS", "+ 1.0"),
    Mutant("group_rewards", "is_last_T = self.from_end_T == 0", "is_last_T = self.positions_T == 0"),
    Mutant("group_rewards", "padded[row] += discount * padded[row - 1]", "padded[row] += padded[row - 1]"),
    Mutant("group_rewards", "(through_T - values_T)[first_T]", "through_T[first_T]"),
    Mutant("advantages", "std_eps: Positive = 1e-6", "std_eps: Positive = 1e-2"),
    Mutant("advantages", "ddof: ZeroOrOne = 1", "ddof: ZeroOrOne = 0"),
    Mutant("advantages", 'scale="none"', 'scale="group"', after="def dr_grpo"),
    Mutant("advantages", 'scale="batch"', 'scale="group"', after="def lite_ppo"),
    Mutant("advantages", "* sizes_S / (sizes_S - 1).clamp(min=1)", ""),
    Mutant("advantages", ", rewards.lengths_S))", "))", after="def opo"),
    Mutant("advantages", "* rewards.num_sequences / informative", ""),
    Mutant("advantages", "is_best_S & is_alone_S &", "is_best_S &"),
    Mutant("advantages", "gain_S / (rewards.group_std_S(totals_S, ddof=1) + std_eps)", "gain_S"),
    Mutant("advantages", "torch.where(mean_S > 0, ", "torch.where(mean_S != 0, "),
    Mutant("advantages", "+= weight * ", "+= "),
    Mutant("advantages", "(rewards.sizes_S > 1)", "(rewards.sizes_S > 0)", after="def _whiten_compared"),
    Mutant("advantages", "max(values_S.numel() - ddof, 1)", "values_S.numel()"),
    Mutant("token_advantages", "+ gamma * following_T", "+ following_T"),
    Mutant("token_advantages", "gamma * gae_lambda)", "gae_lambda)", after="def _gae"),
    Mutant("token_advantages", "whiten(advantages_T) if whitened else advantages_T", "advantages_T"),
    Mutant("token_advantages", "rewards.rewards_T, gamma)).float()", "rewards.rewards_T, 1.0)).float()"),
    Mutant("token_advantages", "1.0 - 2.0 * probs_T", "1.0 - probs_T"),
    Mutant("token_advantages", "== 1, 0.0, baseline_T", "== 0, 0.0, baseline_T"),
    Mutant("token_advantages", "over_group_T(weights_T * returns_T)", "over_group_T(returns_T)"),
    Mutant("token_advantages", "rewards.compared_T(returns_T - baseline_T)", "(returns_T - baseline_T).float()"),
    Mutant("losses", "-torch.minimum(", "-torch.maximum("),
    Mutant("losses", "ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)", "ratio_T.clamp(1.0 - clip_high, 1.0 + clip_low)"),
    Mutant("losses", "(advantages_T < 0) & (ratio_T < 1.0 - clip_low)", "(advantages_T > 0) & (ratio_T < 1.0 - clip_low)"),
    Mutant("losses", "(advantages_T > 0) & (ratio_T > 1.0 + clip_high)", "(ratio_T > 1.0 + clip_high)"),
    Mutant("losses", "(batch.advantages_T < 0) & (losses_T > ceiling_T)", "losses_T > ceiling_T"),
    Mutant("losses", "-batch.advantages_T * dual_clip", "-batch.advantages_T * (1.0 + dual_clip)"),
    Mutant("losses", "torch.where(keep_T, losses_T, 0.0)", "torch.where(keep_T, 0.0, losses_T)"),
    Mutant("losses", "clip_high=cap - 1.0", "clip_high=cap"),
    Mutant("losses", "clip_low=None, clip_high=cap", "clip_low=0.2, clip_high=cap"),
    Mutant("losses", "log_ratio(logprobs_T.detach(), batch", "log_ratio(logprobs_T, batch", after="def cispo"),
    Mutant("losses", "low = 0.0 if clip_low is None else 1.0 - clip_low", "low = 0.0"),
    Mutant("losses", "* 4.0 / tau_T", "* 2.0 / tau_T"),
    Mutant("losses", "batch.advantages_T > 0, tau_positive, tau_negative", "batch.advantages_T > 0, tau_negative, tau_positive"),
    Mutant("losses", "0.5 * beta", "beta"),
    Mutant("losses", "batch.weighted(-batch.advantages_T * logprobs_T)", "-batch.advantages_T * logprobs_T"),
    Mutant("tokens", "logprobs_T - logprobs_T.detach() + d_T", "d_T"),
    Mutant("tokens", "log_ratio(logprobs_T.detach(), batch", "log_ratio(logprobs_T, batch"),
    Mutant("tokens", "else self.mean_S)", "else self.sum_S)"),
    Mutant("tokens", 'if level == "sequence"', 'if level != "sequence"'),
    Mutant("tokens", "level).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)", "level)"),
    Mutant("losses", '"geometric"', '"sequence"', after="def gspo"),
    Mutant("losses", "batch.advantages_T < 0", "batch.advantages_T > 0", after="def vespo"),
    Mutant("losses", "lambda_T * (1.0 - s_T)", "lambda_T * -s_T"),
    Mutant("losses", "logprobs_T.detach(), \"sequence\"", "logprobs_T, \"sequence\"", after="def vespo"),
    Mutant("losses", "policy_ratio(batch, logprobs_T, level)", 'policy_ratio(batch, logprobs_T, "token")', after="def ppo_clip"),
    Mutant("losses", "policy_ratio(batch, logprobs_T, level)", 'policy_ratio(batch, logprobs_T, "token")', after="def sapo"),
    Mutant("losses", "(2.0 * epsilon)", "epsilon"),
    Mutant("losses", "epsilon: Positive = 0.2", "epsilon: Positive = 0.3"),
    Mutant("kl", "batch.weighted(ratio_T * ", "(ratio_T * "),
    Mutant("kl", "d_T * (logprobs_T - constant_T)", "kl_T.detach() * (logprobs_T - constant_T)"),
    Mutant("kl", "log_ratio(constant_T, batch.reference", "log_ratio(constant_T, batch.behaviour"),
    Mutant("advantages", "ddof=1, weights_S=given_S", "ddof=1"),
    Mutant("preferences", " * (centred_S.abs() > EQUAL)", ""),
    Mutant("preferences", "margin + EQUAL", "margin"),
    Mutant("advantages", "(_batch_std(advantages_S, 1) + std_eps)", "_batch_std(advantages_S, 1)"),
    Mutant("token_advantages", "clamp(max=weight_cap).square()", "clamp(max=weight_cap)"),
    Mutant("token_advantages", "was_cut_T, values_T, following_T", "was_cut_T, 0.0, following_T"),
    Mutant("token_advantages", '& (rewards.from_end_T == 0)', ""),
    Mutant("token_advantages", "if critic_lambda is None else critic_lambda", ""),
    Mutant("token_advantages", "length_alpha * rewards.lengths_S", "rewards.lengths_S"),
    Mutant("token_advantages", ".clamp(min=0.0)", "", after="def _lambda"),
    Mutant("turn_advantages", "(_sizes(cell) - 1).clamp(min=1)", "_sizes(cell)", after="def _mean_of_others"),
    Mutant("turn_advantages", "_sum(values, cell) - _sum(values, own)", "_sum(values, cell)"),
    Mutant("turn_advantages", "turns.rewards_T, 1.0))", "turns.rewards_T, 0.9))"),
    Mutant("turn_advantages", "turns.rewards_T, gamma))", "turns.rewards_T, 1.0))", after="def gigpo"),
    Mutant("turn_advantages", "state_K * rewards.num_groups + group_K", "state_K"),
    Mutant("turn_advantages", "omega * turn_K", "turn_K"),
    Mutant("turn_advantages", "torch.where(states_K == 0, 0.0, compared(to_come_K, cell_K, turns.sequence_T))", "compared(to_come_K, cell_K, turns.sequence_T)"),
    Mutant("turn_advantages", "_sizes(cell) - _sizes(own)", "_sizes(cell)"),
    Mutant("turn_advantages", "outcome_weight * outcome_S", "outcome_S"),
    Mutant("turn_advantages", "rewards.totals_S - paid_S", "rewards.totals_S"),
    Mutant("turn_advantages", " + turns.next_T(before_last_K)", ""),
    Mutant("turn_advantages", "gamma * turns.next_T(values_K)", "turns.next_T(values_K)"),
    Mutant("turn_advantages", "deltas_K, gamma * gae_lambda)", "deltas_K, gae_lambda)"),
    Mutant("turn_advantages", "token_gamma * tokens.next_T", "tokens.next_T"),
    Mutant("turn_advantages", "deltas_T), token_decay)", "deltas_T), 1.0)"),
    Mutant("turn_advantages", "whiten(advantages_T) if whitened else advantages_T", "advantages_T"),
    Mutant("turn_advantages", " - segment_sum(rewards_K, episode_K, rewards.num_sequences)", ""),
    Mutant("turn_advantages", "rewards_K = rewards_K + segment_sum", "segment_sum"),
    Mutant("turn_advantages", "group_S[turns.sequence_T] * longest + number_K", "group_S[turns.sequence_T] + number_K"),
    Mutant("group_rewards", "(self.sizes_S > 1)", "(self.sizes_S > 0)"),
    Mutant("turn_advantages", "values.float().double()", "values"),
    Mutant("draws", "samples - correct, k", "correct, k"),
    Mutant("draws", "comb(i, k - 1)", "comb(i, k)"),
    Mutant("draws", "sorted(rewards)", "rewards"),
    Mutant("draws", "if answer:", "if answer is not None:"),
    Mutant("draws", "sum(marks) / len(marks)", "float(marks[0])"),
    Mutant("draws", "if count == highest]", "if True]"),
    Mutant("draws", "if count >= most]", "if count > most]"),
    Mutant("draws", "sum(count for count, _ in rivals)", "len(rivals)"),
    Mutant("draws", "others[::-1]", "others"),
    Mutant("draws", "range(1, min(k, highest) + 1)", "range(2, min(k, highest) + 1)"),
    Mutant("draws", "/ float(drawn[len(answers), k])", ""),
    Mutant("draws", "drawn[count, :most]", "drawn[count, : most + 1]"),
    Mutant("draws", "worth + value * chance", "worth + value"),
    Mutant("draws", "/ np.arange(1, worth.shape[1])", ""),
    Mutant("draws", "drawn[m] * (1.0 - k / samples)", "drawn[m] * 0.5"),
    Mutant("batch/objective", "bias_corrected(kl_T, tokens, logprobs_T)", "kl_T"),
    Mutant("batch/estimate", "rollout.truncated for", "False for"),
    Mutant("batch/resolve", "if name in known", 'if name == "gamma"'),
    Mutant("losses", "torch.minimum(sign_T * d_T", "torch.maximum(sign_T * d_T"),
    Mutant("losses", "batch.mean_S(sign_T * pessimistic_T)", "batch.mean_S(pessimistic_T)"),
    Mutant("losses", "d_T.clamp(-clip_low, clip_high)", "d_T.clamp(-clip_high, clip_low)"),
    Mutant("losses", "p_T - q_T > limit_high", "p_T - q_T > limit_low"),
    Mutant("losses", "q_T - p_T > limit_low", "p_T - q_T > limit_low"),
    Mutant("losses", "& (p_T > q_T)", ""),
    Mutant("losses", "& (p_T < q_T)", ""),
    Mutant("losses", "log_ratio(logprobs_T.detach(), batch", "log_ratio(logprobs_T, batch", after="def _masked"),
    Mutant("losses", "ratio_T.clamp(max=cap) * batch", "ratio_T * batch"),
    Mutant("losses", "losses_T + pull * ", "losses_T - pull * "),
    Mutant("losses", "losses_T + pull * log_ratio(logprobs_T,", "losses_T + pull * log_ratio(logprobs_T.detach(),"),
    Mutant("losses", "losses_T + pull", "losses_T + 2.0 * pull"),
    Mutant("losses", "advantages_T > 0", "advantages_T >= 0", after="def _masked"),
    Mutant("losses", "- batch.advantages_T.mean()", ""),
    Mutant("losses", "- logprobs_T.mean()", ""),
    Mutant("losses", "& ~is_clipped_T", ""),
    Mutant("losses", "max(int(share * batch.tokens), 1)", "int(share * batch.tokens)"),
    Mutant("losses", "coefficient * d_T.abs()", "coefficient * d_T"),
    Mutant("losses", "keep_T[drawn] = False", "keep_T[candidates] = False"),
    Mutant("losses", "(batch.advantages_T >= 0) | ", ""),
    Mutant("losses", "batch.advantages_T >= 0", "batch.advantages_T > 0"),
    Mutant("losses", "drift_T = -log_ratio", "drift_T = log_ratio"),
    Mutant("losses", "batch.behaviour_logprobs_T", "batch.anchor_logprobs_T"),
    Mutant("losses", "descending=True", "descending=False"),
    Mutant("losses", ".ceil()", ".floor()"),
    Mutant("losses", " - SHARE_SLACK", ""),
    Mutant("losses", "lengths_S.double()", "lengths_S.float()"),
    Mutant("losses", "keep_T & high_T", "high_T"),
    Mutant("losses", "torch.maximum(", "torch.minimum(", after="def value_loss"),
    Mutant("losses", "old_values_T - clip, old_values_T + clip", "returns_T - clip, returns_T + clip", after="def value_loss"),
    Mutant("losses", "0.5 * torch.maximum", "torch.maximum", after="def value_loss"),
    Mutant("corrections", ".clamp(floor, cap)", ".clamp(min=cap)", after="def truncate"),
    Mutant("corrections", ".clamp(floor, cap)", ".clamp(max=cap)", after="def truncate"),
    Mutant("corrections", "cap: Positive = 2.0", "cap: Positive = 3.0", after="def truncate"),
    Mutant("corrections", "truncated=(ratio_T > cap)", "truncated=(ratio_T < cap)"),
    Mutant("corrections", "(ratio_T > cap) | (ratio_T < floor)", "(ratio_T > cap)"),
    Mutant("corrections", "[step.lengths_S > 0]", ""),
    Mutant("corrections", ".clamp(min=torch.finfo(counted.dtype).tiny)", ""),
    Mutant("corrections", "step or batch, level", "batch, level", after="def truncate"),
    Mutant("corrections", "step or batch,", "batch,", after="def mask"),
    Mutant("corrections", "torch.where(is_inside(ratio_T), ratio_T, 0.0)", "ratio_T"),
    Mutant("corrections", "means_T > limit", "squares_T > limit"),
    Mutant("corrections", "_log_ratio_T(step or batch)", "_log_ratio_T(batch)", after="def m2po"),
    Mutant("corrections", "square() < bound", "square() <= bound"),
    Mutant("corrections", "limit: Positive = 0.04", "limit: Positive = 0.06"),
    Mutant("corrections", "level).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)", "level)"),
    Mutant("corrections", "keep_T = keep_T & other.keep_T", "keep_T = other.keep_T"),
    Mutant("corrections", "**sums(rejected=~keep_T)}", "}", after="def combined"),
    Mutant("corrections", "torch.where(keep_T, correction.weights_T, 0.0)", "correction.weights_T"),
    Mutant("corrections", "(p_T - q_T).abs()", "(p_T - q_T)"),
    Mutant("corrections", "binary_kl(p_T, q_T)", "binary_kl(q_T, p_T)", after="def _divergence_T"),
    Mutant("corrections", "(ratio_T >= low) & (ratio_T <= high)", "(ratio_T <= high)", after="def mask"),
    Mutant("corrections", "1.0 / high if low is None else low", "0.0 if low is None else low"),
    Mutant("corrections", "return 0.5 * l_T.square()", "return l_T.square()"),
    Mutant("corrections", "torch.expm1(l_T) - l_T", "torch.expm1(-l_T) + l_T"),
    Mutant("corrections", "~keep_T, **counted", "keep_T, **counted"),
    Mutant("corrections", "torch.where(keep_T, weights_T, 0.0)", "weights_T"),
    Mutant("corrections", "(ratio_T < low) | (ratio_T > high)", "(ratio_T > high)", after="def veto"),
    Mutant("corrections", "log_ratio(batch.anchor_logprobs_T.detach(), batch.behaviour_logprobs_T)",
           "log_ratio(batch.behaviour_logprobs_T, batch.anchor_logprobs_T)"),
    Mutant("aggregation", "int((batch.lengths_S > 0).sum())", "batch.num_sequences"),
    Mutant("aggregation", "max(counts.tokens, 1)", "max(batch.tokens, 1)"),
    Mutant("aggregation", "max(counts.sequences, 1)", "max(batch.num_sequences, 1)"),
    Mutant("aggregation", "max(counts.tokens, 1)", "counts.tokens"),
    Mutant("aggregation", "batch.episode_mean_S(losses_T)", "batch.sum_S(losses_T)"),
    Mutant("aggregation", ") / scale", ")"),
    Mutant("kl", "0.5 * log_ratio", "log_ratio"),
    Mutant("kl", "torch.expm1(-d_T) + d_T", "torch.expm1(d_T) - d_T"),
    Mutant("kl", "torch.expm1(-d_T)", "((-d_T).exp() - 1)"),
    Mutant("kl", ".clamp(max=K3_BOUND)", ""),
    Mutant("kl", "+ gradient_T - gradient_T.detach()", ""),
    Mutant("kl", "value_T.detach() + gradient_T", "value_T + gradient_T"),
    Mutant("batch/coefficients", "max(kl / target - 1.0, -0.2), 0.2", "max(kl / target - 1.0, -0.2), 0.5"),
    Mutant("batch/coefficients", "steps / horizon", "horizon / steps"),
    Mutant("batch/coefficients", "entropy < target else -step", "entropy > target else -step"),
    Mutant("batch/coefficients", "step if entropy < target", "step if entropy <= target"),
    Mutant("batch/coefficients", "-step if entropy > target", "-step if entropy >= target"),
    Mutant("batch/coefficients", "change, 0.0), maximum", "change, 0.0), 1.0"),
    Mutant("batch/coefficients", "max(coefficient + change, 0.0)", "(coefficient + change)"),
    Mutant("batch/coefficients", "_measured <= target else", "_measured < target else"),
    Mutant("losses", "if spread > 0", "if spread >= 0", after="def value_loss"),
    Mutant("losses", "(returns_T.double() - values_T.double())", "values_T.double()", after="def value_loss"),
    Mutant("filters", "is_compared and is_flat", "is_flat"),
    Mutant("filters", "<= tolerance", "< tolerance"),
    Mutant("filters", "mean <= low", "mean < low"),
    Mutant("filters", "mean >= high", "mean > high"),
    Mutant("shaping", "max_response_tokens - buffer_tokens", "max_response_tokens", after="excess_tokens ="),
    Mutant("shaping", "0.0), 1.0)", "0.0), 9.0)"),
    Mutant("shaping", "reward - penalty", "reward + penalty", after="return"),
    Mutant("corrections", "1.0 - 1.0 / lag_T", "1.0 / lag_T"),
    Mutant("corrections", "logprobs_T.detach()", "logprobs_T", after="def log_linear"),
    Mutant("corrections", ".clamp(\n        logprobs_T - LOG_RATIO_BOUND, logprobs_T + LOG_RATIO_BOUND\n    )", ""),
    Mutant("metrics", "torch.where(to_T == from_T, 0.0, log_ratio(to_T.detach(), from_T))", "log_ratio(to_T.detach(), from_T)"),
    Mutant("metrics", "batch.reference_logprobs_T.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)", "batch.reference_logprobs_T"),
    Mutant("metrics", '"policy": (current_T, batch.anchor_logprobs_T)', '"policy": (current_T, batch.behaviour_logprobs_T)'),
    Mutant("metrics", "ratio_T = log_ratio_T.exp()", "ratio_T = log_ratio_T.exp().clamp(max=2.0)"),
    Mutant("metrics", 'f"{name}/k1": -log_ratio_T', 'f"{name}/k1": log_ratio_T'),
    Mutant("metrics", "torch.expm1(log_ratio_T.double()) - log_ratio_T", "torch.expm1(log_ratio_T.double()) + log_ratio_T"),
    Mutant("metrics", "merged[name] = _larger(merged[name], value)", "merged[name] = value"),
    Mutant("metrics", "-_larger(-merged[name], -value)", "_larger(merged[name], value)"),
    Mutant("metrics", "-_larger(-merged[name], -value)", "min(merged[name], value)"),
    Mutant("metrics", "merged[name] += value", "merged[name] = value"),
    Mutant("metrics", "or math.isnan(first)", ""),
    Mutant("metrics", "= square - 1.0 if", "= square if"),
    Mutant("metrics", "- published[f\"{of}/mean\"] ** 2", ""),
    Mutant("metrics", 'if last in (*BANDS, *TURNS, "solved"):', "if False:"),
    Mutant("metrics", "if last in OVER_SEQUENCES:", "if False:"),
    Mutant("metrics", '"perplexity": "sequences"', '"perplexity": "tokens"'),
    Mutant("metrics", "_perplexity_S(batch, log_ratio_T)", "_perplexity_S(batch, -log_ratio_T)"),
    Mutant("metrics", "torch.expm1(2.0 * product_S)", "torch.expm1(product_S)"),
    Mutant("metrics", "batch.sum_S(log_ratio_T).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)", "batch.sum_S(log_ratio_T)"),
    Mutant("metrics", "(-batch.mean_S(logprobs_T", "(batch.mean_S(logprobs_T"),
    Mutant("metrics", "logprobs_T.double().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)", "logprobs_T.double()"),
    Mutant("metrics", "torch.where(batch.lengths_S > 0, (-batch.mean_S(logprobs_T)).exp(), 0.0)",
           "(-batch.mean_S(logprobs_T)).exp()"),
    Mutant("metrics", "_perplexity_S(batch, batch.anchor_logprobs_T)", "_perplexity_S(batch, batch.behaviour_logprobs_T)"),
    Mutant("metrics", "batch.advantages_T > 0", "batch.advantages_T >= 0"),
    Mutant("metrics", "lengths * len(BANDS) - 1", "lengths * len(BANDS)"),
    Mutant("metrics", "lengths * len(BANDS) - 1", "(lengths - 1) * len(BANDS)"),
    Mutant("metrics", "clamp(0, len(BANDS) - 1)", "clamp(0)"),
    Mutant("metrics", "(batch.weights_T == 0) & (band_T == index)", "(batch.weights_T == 0)"),
    Mutant("metrics", "left_out_T & (band_T == index)", "left_out_T | (band_T == index)"),
    Mutant("metrics", 'column.max() if name.endswith("/max")', 'column.max() if name.endswith("")'),
    Mutant("metrics", "elif size:", "else:"),
    Mutant("metrics", "** 2 / square", "/ square"),
    Mutant("metrics", "& (rewards.sizes_S > 1)) / rewards.sizes_S", "& (rewards.sizes_S > 1))"),
    Mutant("metrics", "& (rewards.sizes_S > 1)", ""),
    Mutant("metrics", "log_ratio(batch.reference_logprobs_T, current_T)", "log_ratio(current_T, batch.reference_logprobs_T)"),
    Mutant("metrics", "batch.weights_T == 0", "batch.weights_T > 0"),
    Mutant("metrics", "batch.lengths_S > 0", "batch.lengths_S >= 0"),
    Mutant("config/registry", "ast.literal_eval(node) if node else ...", "None"),
    Mutant("config/registry", 'extra="forbid", strict=True', 'extra="forbid"'),
    Mutant("config/registry", 'extra="forbid", strict=True', "strict=True"),
    Mutant("config/registry", "(*SUPPLIED.get(kind, ()), *ON_REQUEST)", "ON_REQUEST"),
    Mutant("config/registry", 'ON_REQUEST = frozenset({"entropy_T", "step"})', "ON_REQUEST = frozenset()"),
    Mutant("config/registry", "functools.partial(function, **params)", "function"),
    Mutant("config/registry", "values[low] >= values[high]", "values[low] > values[high]"),
    Mutant("config/registry", "model.model_fields.items()} | dict(params)", "model.model_fields.items()}"),
    Mutant("config/registry", '("filter", "reward_range"): ("low", "high"),', ""),
    Mutant("ranges", "Field(gt=1)", "Field(ge=1)"),
    Mutant("ranges", "Field(ge=0, le=1)", "Field(ge=0)"),
    Mutant("batch/objective", "(losses_T, tokens, counts)", "(losses_T, tokens, Counts.of(tokens))"),
    Mutant("batch/objective", "losses_T + kl_coefficient * kl_T", "losses_T + kl_coefficient * tokens.weighted(kl_T)"),
    Mutant("batch/resolve", "if sees else", "if False else"),
    Mutant("batch/resolve", "combined(first, others)", "combined(first, ())"),
    Mutant("batch/resolve", "any(map(_sees_step, (config.correction, *config.rejections)))", "_sees_step(config.correction)"),
    Mutant("batch/recipe", "token_mean(token_loss.losses_T, tokens, counts)", "token_loss.losses_T.mean()"),
    Mutant("batch/recipe", "minibatch.counts,", "plan.minibatches[0].counts,", after="def train_policy"),
    Mutant("batch/recipe", "critic_loss(minibatch.counts,", "critic_loss(plan.minibatches[0].counts,"),
    Mutant("batch/recipe", "kl, entropy = self.coefficients.kl,", "kl, entropy = self.coefficients._kl_config.coefficient,"),
    Mutant("batch/recipe", "step=minibatch.tokens", "step=None"),
    Mutant("batch/packing", "int(np.count_nonzero(of_episode))", "len(of_episode)"),
    Mutant("batch/packing", 'columns["solved_T"][one.keep]', 'columns["solved_T"]'),
    Mutant("batch/objective", "max(counts.solved, 1)", "max(tokens.solved_T.sum(), 1)"),
    Mutant("batch/plan", "microbatch(samples, settings.device).tokens", "microbatch([samples[0]], settings.device).tokens"),
    Mutant("batch/plan", "sample.keep & ~(stale | truncated)", "sample.keep"),
    Mutant("batch/estimate", "sum(rollout.actions for rollout in episode)", "sum(len(rollout.response_ids) for rollout in episode)"),
    Mutant("batch/estimate", "token_rewards_T=-kl_coefficient * kl_T", "token_rewards_T=kl_coefficient * kl_T"),
    Mutant("batch/masks", "sequence.lag > settings.max_lag", "sequence.lag >= settings.max_lag"),
    Mutant("batch/resolve", "> 1 or over_step", "> 1"),
    Mutant("batch/packing", "-(-len(first_fit) // ranks) * ranks", "len(first_fit)"),
    Mutant("batch/packing", "in first_fit]", "in []]"),
    Mutant("batch/packing", "<= budget_tokens)", "<= 2 * budget_tokens)"),
    Mutant("config/algorithm_rules", "side * (bound - 1) <= 0", "side * (bound - 1) < 0"),
    Mutant("session/tree", "if rule in (_ROOT, RENDERED):", "if rule == _ROOT:"),
    Mutant("session/tree", "broken if parent else breaker.broken", "breaker.broken"),
    Mutant("session/tree", 'own="" if parent else [*self._own, ""][0]', 'own=[*self._own, ""][0]'),
    Mutant("session/tree", '*[""] * len(messages)][known:]', '*[""] * len(messages)]'),
    Mutant("session/tree", "inside=parent is not None", "inside=True"),
    Mutant("session/tree", "parent is None and ids[: len(opening)] != opening", "parent is None"),
    Mutant("session/tree", "parent is None and ids[: len(opening)] != opening", "ids[: len(opening)] != opening"),
    Mutant("session/tree", "next((turn for turn in reversed(turns) if not turn.children), turns[-1])", "turns[-1]"),
    Mutant("session/tree", "reversed(range(len(keys)))", "range(len(keys))"),
    Mutant("session/tree", "is_trained=train,", "is_trained=True,"),
    Mutant("session/tree", 'parent is not None and self._history == "exact"', "parent is not None"),
    Mutant("session/tree", "if first == last_id:", "if True:"),
    Mutant("session/tree", "if last_id in self._renderer.stop_ids:", "if False:"),
    Mutant("session/tree", "turn.parent is None or turn.parent.children > 0", "turn.parent is None"),
    Mutant("session/tree", "turn.parent.children > 1", "turn.parent.children > 0"),
    Mutant("session/tree", "said = parent.said if parent else None", "said = None"),
    Mutant("session/tree", "keys.append(key_after(request.begun_key, joined))", "pass"),
    Mutant("session/tree", "(_ROOT, _TEXT, STABLE)", "(_ROOT, _TEXT)"),
    Mutant("session/tree", "if turn.is_trained} - done", "if turn.is_trained}"),
    Mutant("session/tree", "path and path[-1].index not in actions", "False"),
    Mutant("session/tree", "order != sorted(order)", "False"),
    Mutant("session/tree", "len(turn.delta_ids) if turn.parent else 0", "len(turn.delta_ids)"),
    Mutant("session/tree", "np.zeros(given, dtype=np.bool_)", "np.ones(given, dtype=np.bool_)"),
    Mutant("session/tree", "rollout.action_mask & is_action", "rollout.action_mask"),
    Mutant("session/tree", "rollout.behaviour_logprobs * np.float32(is_action)", "rollout.behaviour_logprobs"),
    Mutant("session/tree", "spans[-1]._replace", "spans[0]._replace"),
    Mutant("session/tree", "length += given + len(", "length += len("),
    Mutant("session/tree", "before.digest() != turn.prompt_digest", "False"),
    Mutant("session/tree", "key=lambda span: span.weights", "key=lambda span: span"),
    Mutant("session/tree", "len(ends) == 1 and rewards is None", "rewards is None"),
    Mutant("session/tree", "path[-1].rollout,", "path[0].rollout,"),
    Mutant("trainer/policy", "temperature * self._divisor", "temperature / self._divisor"),
    Mutant("trainer/policy", 'getattr(text, "logits_scaling", 1.0) /', "1.0 /"),
    Mutant("trainer/policy", '(getattr(text, "logit_scale", 1.0) or 1.0)', "1.0"),
    Mutant("trainer/policy", "if getattr(text, key, None)]", "if False]"),
    Mutant("trainer/policy", '"position_ids": position_ids_N[None]', '"position_ids": torch.arange(len(input_ids_N))[None]'),
    Mutant("trainer/policy", "sequence_starts, input_ids_N.device)", "(0, len(input_ids_N)), input_ids_N.device)"),
    Mutant("trainer/policy", "head(hidden_ND[source_T], slice", "head(hidden_ND[source_T].detach(), slice"),
    Mutant("trainer/policy", ".numel() == 0", ".numel() < 0"),
    Mutant("trainer/policy", "if model_inputs:", "if False:"),
    Mutant("trainer/policy", "**ran.model_inputs,", ""),
    Mutant("trainer/policy", "target_T[own_T]", "target_T"),
    Mutant("trainer/head", "in reversed(chunks(len(target_T), ctx.chunk))", "in chunks(len(target_T), ctx.chunk)"),
    Mutant("trainer/head", "            logits_CV = None\n            torch.mm", "            torch.mm"),
    Mutant("trainer/head", "pairwise(edges)][::-1]", "pairwise(edges)]"),
    Mutant("trainer/head", "hidden_CD / temperature", "hidden_CD"),
    Mutant("trainer/head", ".masked_fill_(kept_CK < 0, NEVER)", ""),
    Mutant("trainer/head", "logits_CV - peak_C[:, None]", "logits_CV"),
    Mutant("trainer/head", "-gradient_T * logprob_T.expm1()", "-gradient_T * logprob_T"),
    Mutant("trainer/head", "-gradient_T * logprob_T.expm1()", "-gradient_T * (logprob_T.exp() - 1)"),
    Mutant("trainer/head", "(logprob_T + entropy_T)", "logprob_T"),
    Mutant("trainer/head", ".add_(entropy_C[:, None])", ""),
    Mutant("trainer/head", "gradients[0][:2] / ctx.temperature", "gradients[0][:2]"),
    Mutant("trainer/head", "dtype=entropy_T.dtype) if ctx", "dtype=weight_VD.dtype) if ctx"),
    Mutant("trainer/head", "scatter_add_(-1, kept_CK.clamp(min=0).long(), gradient_CK)", "scatter_(-1, kept_CK.clamp(min=0).long(), gradient_CK)"),
    Mutant("trainer/head", "(kept_CK == target_C[:, None])", "(kept_CK != target_C[:, None])"),
    Mutant("./lora", "* (lora.alpha / lora.rank)", "* (lora.alpha / lora.rank) ** 2"),
    Mutant("./lora", "up.float() @ down.float()", "down.float().T @ up.float().T"),
    Mutant("./lora", "layer.enable_adapters(False)", "layer.enable_adapters(True)"),
    Mutant("./lora", "torch.manual_seed(0)", "torch.seed()"),
    Mutant("./lora", "parameter.data.copy_(found.get_tensor(name))", "parameter.data"),
    Mutant("./lora", '".lora_A." in name or ".lora_B." in name', '".lora_B." in name'),
    Mutant("engine/vllm/adapter", "self._served.remove_adapter(NUMBER)", "pass"),
    Mutant("engine/vllm/adapter", "if ignored:", "if False:"),
    Mutant("engine/vllm/adapter", "NUMBER, tensors,", 'NUMBER, {n: t for n, t in tensors.items() if ".k_proj." not in n},'),
    Mutant("engine/vllm/adapter", "NUMBER, tensors,", 'NUMBER, {n: t * (2 if ".lora_B." in n else 1) for n, t in tensors.items()},'),
    Mutant("engine/vllm/engine", "lora_request=self._adapter", "lora_request=None"),
    Mutant("engine/vllm/engine", "cache_salt=salt or self.salt)", 'cache_salt="0")'),
    Mutant("engine/vllm/layerwise", "        repack_experts(layer)", "        pass"),
    Mutant("advantages", '- rewards.column("expected_S")', ""),
    Mutant("advantages", 'rewards.per_token(whiten(rewards.totals_S - rewards.column("expected_S")))',
           'whiten(rewards.per_token(rewards.totals_S - rewards.column("expected_S")))'),
    Mutant("batch/coefficients", "1.0", "0.5", after="def _unknown"),
    Mutant("batch/coefficients", "rewards.totals_S.mean()", "rewards.totals_S.max()", after="class Tracker"),
    Mutant("batch/coefficients", "sums[:, 0] / sums[:, 1]", "sums[:, 0]", after="class Tracker"),
    Mutant("batch/coefficients", "self._decay * before", "before", after="class Tracker"),
    Mutant("batch/coefficients", "self._decay * number + count", "number + count", after="class Tracker"),
    Mutant("batch/coefficients", "self._decay * number + count", "self._decay * number + 1", after="class Tracker"),
    Mutant("batch/coefficients", "not (totals_S := rewards.totals_S).isfinite().all()", "(totals_S := rewards.totals_S).isnan().any()", after="class Tracker"),
    Mutant("batch/coefficients", "totals_S := rewards.totals_S)", "totals_S := rewards.rewards_S.double())", after="class Tracker"),
    Mutant("batch/coefficients", "int(row): (total, number)", "int(row) + 1: (total, number)", after="class Tracker"),
    Mutant("batch/resolve", '"decay", 1.0', '"name", 1.0'),
    Mutant("batch/recipe", "tracker.record(plan.rewards)", "pass"),
    Mutant("batch/recipe", "entropy_gradient=bool(entropy)", "entropy_gradient=False"),
    Mutant("batch/recipe", "sequences=plan.rewards.num_sequences", "sequences=len(plan.sequences)"),
    Mutant("batch/estimate", "in_time(self.targets, rewards)", "self.targets(rewards)"),
    Mutant("tokens", "numerator_T.detach().clamp(max=0.0).exp()", "numerator_T.detach().exp()"),
    Mutant("losses", "(sign_T > 0) & (d_T > clip_high)", "(sign_T > 0) & (d_T > clip_low)"),
    Mutant("data/images", "_content(beside / place", "_content(Path(place)"),
    Mutant("data/images", "if isinstance(content, bytes) and content else", "if content else"),
    Mutant("data/images", "if size_bytes > MOST_BYTES:", "if False:"),
    Mutant("data/images", "if pixels > MOST_PIXELS:", "if False:"),
    Mutant("data/image_processor", "np.array_equal(_digests_of(images), recorded)", "len(images) == len(recorded)"),
    Mutant("data/image_processor", "self._plan.row(group.ticket_id)", "self._plan.row(group.ticket_id + 1)"),
    Mutant("data/image_processor", "(rollout.response_ids == token).any()", "(rollout.prompt_ids == token).all()"),
    Mutant("data/image_processor", "[list(pictures)] * copies", "[list(pictures[:1])] * copies"),
    Mutant("data/image_processor", "for image in images]])", "for image in set(images)]])"),
]  # fmt: skip


def mutate(text: str, mutant: Mutant) -> str:
    """Raises SystemExit if the mutant does not match: the code has moved on and the mutant must, too."""
    start = text.find(mutant.after)
    at = text.find(mutant.old, max(start, 0))
    if start < 0 or at < 0:
        raise SystemExit(f"mutant does not match: {mutant}; adapt it to the code")
    return text[:at] + mutant.new + text[at + len(mutant.old) :]


def is_killed(copy: Path, tests: str) -> bool:
    """Whether the tests fail in the copy. Runs in a fork, because importing torch takes longer than the tests."""
    child = os.fork()
    if not child:
        os.chdir(copy)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        sys.path.insert(0, str(copy))
        files = [f"tests/{name if '/' in name else f'unit/test_{name}'}.py" for name in tests.split()]
        os._exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--timeout", str(TIMEOUT_S), *files]))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in (0, 1):
        raise SystemExit(f"pytest ended with {code} in {copy}; run it there by hand")
    return code == 1


def main(only: str | None) -> int:
    """Number of survivors."""
    chosen = [mutant for mutant in MUTANTS if only in (None, mutant.module)]
    survivors = 0
    torch.set_num_threads(1)
    # Found is enough: no shrinking.
    settings.register_profile("mutation", phases=[Phase.explicit, Phase.generate], database=None)
    settings.load_profile("mutation")
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "copy"
        copy.mkdir()
        (copy.parent / "shared").symlink_to(ROOT.parent / "shared")  # models that tests load
        os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        for name in ("asyncrl", "tests", "docs"):  # some tests compare tables of pages
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        if is_killed(copy, " ".join(dict.fromkeys(TESTS[mutant.module] for mutant in chosen))):
            raise SystemExit("the tests fail without any mutant; mend that first")
        for mutant in chosen:
            path = mutant.file(copy)
            original = path.read_text()
            path.write_text(mutate(original, mutant))
            killed = is_killed(copy, TESTS[mutant.module])
            path.write_text(original)
            survivors += not killed
            verdict = "killed  " if killed else "SURVIVED"
            sys.stdout.write(f"{verdict}  {mutant.module}: {mutant.old} -> {mutant.new or '(nothing)'}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{len(chosen) - survivors} of {len(chosen)} mutants killed\n")
    return survivors


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1] if len(sys.argv) > 1 else None) else 0)
