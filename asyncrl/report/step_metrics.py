"""The published metrics of one step. Names, units and meaning are in `docs/metrics.md`."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch

from asyncrl.algo.draws import maj_at_k
from asyncrl.algo.losses import explained_variance
from asyncrl.algo.metrics import finish, group_metrics, merge
from asyncrl.algo.preferences import preference_metrics
from asyncrl.algo.ranges import EQUAL
from asyncrl.algo.trainable import MOST_PARTS, UNTRAINABLE
from asyncrl.buffer.base import DEADLY, kind_of
from asyncrl.evaluation import votes_of
from asyncrl.learner import Step
from asyncrl.trainer.base import LOSS, StepResult, Usage
from asyncrl.types import Group, Rollout

log = logging.getLogger(__name__)

COLLAPSED = ("below_0", "at_0", "between", "at_1", "above_1")
# Other finish reasons, which a generator of another release may give, count as `other`.
ENDINGS = ("stop", "length", "turns", "sequences", "time")
LONGEST_LAG = 16  # steps; the last bin of the histograms of lag holds all tokens that are older


def step_metrics(step: Step) -> dict[str, float]:
    """Return everything that is known about a step, by name."""
    sums = merge([*(result.metrics for result in step.results), group_metrics(step.plan.rewards)])
    sums.pop("skipped_steps", None)
    loss = sums.pop(LOSS, 0.0)
    hint = "if it goes on, look at policy/grad_norm and */ratio/max, and lower learner.optimizer.lr"
    skipped, empty = _left_out(f"step {step.version}", step.results, hint)
    metrics = finish(sums) | {
        "policy/loss": loss / max(len(step.results), 1),
        "policy/grad_norm": float(np.max([result.grad_norm for result in step.results], initial=0.0)),
        "policy/skipped_steps": skipped,
        "policy/empty_steps": empty,
        "policy/lr": step.results[-1].lr if step.results else 0.0,
        "weights/version": step.version,
    }
    if (expected_S := step.plan.rewards.expected_S) is not None:
        metrics["baseline/explained_variance"] = explained_variance(expected_S, step.plan.rewards.totals_S)
    metrics |= preference_metrics(step.plan.rewards) | _critic_metrics(step)
    metrics |= dict(step.coefficients) | dict(step.hook_metrics)
    metrics |= _rollout_metrics(step) | _intake_metrics(step) | _staleness_metrics(step)
    total_s = sum(step.seconds.values())
    tokens = sum(len(sequence.prompt_ids) + len(sequence.response_ids) for sequence in step.plan.sequences)
    return metrics | {
        **{f"time/{name}": value for name, value in step.seconds.items()},
        "time/step": total_s,
        "idle/learner": step.seconds.get("wait_groups", 0.0) / total_s if total_s else 0.0,
        "perf/learner_tokens_per_s": tokens / max(_working_s(step), 1e-9),
    }


def _left_out(where: str, results: Sequence[StepResult], hint: str) -> tuple[float, float]:
    """Count the optimizer steps that were left out: (not finite, without a token to train); warn of these."""
    norms = [result.grad_norm for result in results if result.metrics.get("skipped_steps")]
    if skipped := sum(not math.isfinite(norm) for norm in norms):
        message = "%s: %d of %d optimizer steps were left out, as a loss or gradient was not finite; %s"
        log.warning(message, where, skipped, len(results), hint)
    return float(skipped), float(len(norms) - skipped)


def _critic_metrics(step: Step) -> dict[str, float]:
    """Return the metrics of the critic, if there is one."""
    values_T, returns_T, results = step.plan.rewards.values_T, step.plan.returns_T, step.critic_results
    if not results or values_T is None or returns_T is None:
        return {}
    sums = merge(result.metrics for result in results)
    loss = sums.pop(LOSS, 0.0)
    hint = "if it goes on, look at critic/grad_norm, and lower critic.optimizer.lr"
    skipped, _ = _left_out(f"step {step.version}, critic", results, hint)
    return {
        **{name: value for name, value in finish(sums).items() if name.startswith("critic/")},
        "critic/loss": loss / len(results),
        "critic/grad_norm": float(np.max([result.grad_norm for result in results])),
        "critic/lr": results[-1].lr,
        "critic/skipped_steps": skipped,
        "critic/explained_variance": explained_variance(values_T, returns_T),
        **{
            f"critic/{name}_{last}": float(reduce(column_T))
            for name, column_T in (("value", values_T), ("return", returns_T))
            for last, reduce in (("mean", torch.mean), ("min", torch.min), ("max", torch.max))
        },
    }


def _rollout_metrics(step: Step) -> dict[str, float]:
    groups = step.collected.groups
    # An episode counts once: all its rollouts have its reward and ending.
    rollouts = [episode[0] for group in groups for episode in group.by_episode]
    lengths = _lengths(groups)
    metrics: dict[str, float] = {}
    for name in step.plan.rewards.parts:
        if values := [r.reward_parts[name] for r in rollouts if name in r.reward_parts]:
            metrics[f"reward/{name}/mean"] = float(np.mean(values))
    if votes := votes_of(groups):  # a reward function reads answers from responses
        answered = [bool(answer) for answers, _ in votes for answer in answers]
        majority = [maj_at_k(answers, solved, len(answers)) for answers, solved in votes]
        metrics["completions/answered_share"] = float(np.mean(answered))
        metrics["group/majority"] = float(np.mean(majority))
    return metrics | {
        "completions/length_mean": float(np.mean(lengths)),
        "completions/length_max": float(np.max(lengths)),
        "completions/truncated_share": float(np.mean([r.truncated for r in rollouts])),
        **episode_metrics(groups),
        "time/sampling_s": float(np.mean([group.sampling_s for group in groups])),
        "time/reward_s": float(np.mean([group.reward_s for group in groups])),
    }


def episode_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the means over episodes, or nothing if no group was played in turns."""
    episodes = [episode for group in groups for episode in group.by_episode]
    if all(len(episode) == 1 and episode[0].turns is None for episode in episodes):
        return {}
    turns = [
        sum(int(one.actions > 0) if one.turns is None else len(one.turns.ends) for one in episode)
        for episode in episodes
    ]
    endings = Counter(episode[0].finish_reason for episode in episodes)
    shares = {ending: endings.pop(ending, 0) for ending in ENDINGS} | {"other": endings.total()}
    rollouts = [rollout for episode in episodes for rollout in episode]
    states = [one.turns.states for one in rollouts if one.turns is not None and one.turns.states is not None]
    with_state = sum(int(np.count_nonzero(column)) for column in states)
    tokens = sum(len(one.prompt_ids) + len(one.response_ids) for one in rollouts)
    repeated = sum(_repeated(episode) for episode in episodes if len(episode) > 1)
    return {
        "episodes/turns_mean": float(np.mean(turns)),
        "episodes/turns_max": float(np.max(turns)),
        "episodes/sequences_mean": float(np.mean([len(episode) for episode in episodes])),
        **{f"episodes/ended_share/{ending}": count / len(episodes) for ending, count in shares.items()},
        "episodes/stateless_turn_share": 1 - with_state / max(sum(turns), 1),
        "sequences/duplicate_share": repeated / tokens,
        **_environment_metrics(groups),
    }


def _repeated(episode: Sequence[Rollout]) -> int:
    """Return the number of tokens that the learner computes again, after the same tokens as before.

    In lexicographic order, no earlier sequence shares a longer prefix with a sequence than the one before it.
    """
    ids = [np.concatenate([one.prompt_ids, one.response_ids]) for one in episode]
    ids.sort(key=lambda one: one.astype(">i4").tobytes())  # the order of these bytes is that of the tokens
    repeated = 0
    for one, other in pairwise(ids):
        length = min(len(one), len(other))
        differing = np.flatnonzero(one[:length] != other[:length])
        repeated += int(differing[0]) if differing.size else length
    return repeated


def _environment_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the mean of each metric over the episodes that have it; of too many, the commonest."""
    values: dict[str, list[float]] = {}
    for group in groups:
        for name, column in group.episode_metrics.items():
            values.setdefault(name, []).extend(column[~np.isnan(column)].tolist())
    commonest = Counter({name: len(found) for name, found in values.items() if found}).most_common(MOST_PARTS)
    return {f"environment/{name}": float(np.mean(values[name])) for name, _ in commonest}


def source_metrics(groups: Sequence[Group], source_of: Callable[[int], str]) -> dict[str, float]:
    """Return the mean reward of each source of data.train, of which `source_of` names that of a ticket."""
    rewards: dict[str, list[float]] = {}
    for group in groups:
        found = rewards.setdefault(source_of(group.ticket_id), [])
        found += [episode[0].reward for episode in group.by_episode]
    return {f"reward/{name}/mean": float(np.mean(values)) for name, values in rewards.items()}


def _lengths(groups: Sequence[Group]) -> list[int]:
    """Return the sampled tokens of each episode."""
    return [sum(rollout.actions for rollout in episode) for group in groups for episode in group.by_episode]


def _intake_metrics(step: Step) -> dict[str, float]:
    """Return the numbers of groups taken, rejected and with equal rewards, and lengths of rejected ones."""
    collected = step.collected
    rejected: dict[str, list[Group]] = {UNTRAINABLE: [], DEADLY: []}  # alarms need these two, also when 0
    for group, reason in collected.rejected:
        rejected.setdefault(kind_of(reason), []).append(group)
    taken = (*collected.groups, *(group for group, _ in collected.rejected))
    collapsed = Counter(_collapsed(group) for group in taken)
    missing: Counter[str] = Counter()
    for group in taken:
        missing.update(group.missing)
    metrics: dict[str, float] = {
        "groups/trained": len(collected.groups),
        "groups/takes": collected.takes,
        **{f"groups/collapsed_{where}": collapsed[where] for where in COLLAPSED},
        **{f"episodes/missing/{reason}": episodes for reason, episodes in missing.most_common(MOST_PARTS)},
    }
    for reason, groups in rejected.items():
        metrics[f"groups/rejected_{reason}"] = len(groups)
        if lengths := _lengths(groups):
            metrics[f"groups/length_rejected_{reason}"] = float(np.mean(lengths))
    return metrics


def _collapsed(group: Group) -> str | None:
    """Return where the rewards of a group lie if they are all equal: it then has no signal."""
    rewards = [episode[0].reward for episode in group.by_episode]
    played = len(rewards) + sum(group.missing.values())
    if not rewards or played < 2 or max(rewards) - min(rewards) > EQUAL:
        return None
    for where, value in (("at_0", 0.0), ("at_1", 1.0)):
        if abs(rewards[0] - value) <= EQUAL:
            return where
    return "below_0" if rewards[0] < 0 else "between" if rewards[0] < 1 else "above_1"


def _staleness_metrics(step: Step) -> dict[str, float]:
    """Return the lag of action tokens, split into sampling and waiting, and the shares that were masked."""
    trained = step.version - 1
    lag, in_queue = [], []
    for group in step.collected.groups:
        for rollout in group.rollouts:
            actions = rollout.action_mask
            lag.append(trained - rollout.versions[actions])
            in_queue.append(np.full(int(actions.sum()), trained - group.finished_version))
    lag_T, in_queue_T = np.concatenate(lag), np.concatenate(in_queue)
    if not lag_T.size:
        return {}
    metrics = {"staleness/mean": float(lag_T.mean()), "staleness/max": float(lag_T.max())}
    for name, steps_T in (("in_queue", in_queue_T), ("in_flight", lag_T - in_queue_T)):
        metrics[f"staleness/{name}"] = float(steps_T.mean())
        for steps, count in enumerate(np.bincount(np.clip(steps_T, 0, LONGEST_LAG))):
            metrics[f"staleness/{name}/{steps}"] = float(count) / steps_T.size  # a share of the tokens
    return {**metrics, **step.plan.masked}


def usage_metrics(step: Step, usage: Sequence[Usage]) -> dict[str, float]:
    """Return speed and memory of the learner in this step, from what each rank has used."""
    metrics = {
        f"memory/{name}/rank{rank}": float(size_bytes)
        for rank, one in enumerate(usage)
        for name, size_bytes in one.memory.items()
    }
    flops = [one.flops for one in usage if one.flops is not None]
    if flops and len(flops) == len(usage):
        per_s = sum(flops) / max(_working_s(step), 1e-9)
        metrics["perf/learner_tflops_per_s"] = per_s / 1e12
        peaks = [one.peak_flops_per_s for one in usage if one.peak_flops_per_s is not None]
        if len(peaks) == len(usage):
            metrics["perf/mfu"] = per_s / sum(peaks)
    return metrics


def _working_s(step: Step) -> float:
    return sum(step.seconds.values()) - step.seconds.get("wait_groups", 0.0)
