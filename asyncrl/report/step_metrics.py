"""The published metrics of one step. Names, units and meaning are in `docs/metrics.md`."""

import logging
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.algo.draws import maj_at_k
from asyncrl.algo.metrics import finish, group_metrics, merge
from asyncrl.algo.trainable import UNTRAINABLE
from asyncrl.algo.value import explained_variance
from asyncrl.buffer.base import DEADLY, kind_of
from asyncrl.evaluation import votes_of
from asyncrl.learner import Step
from asyncrl.trainer.base import LOSS
from asyncrl.types import Group

log = logging.getLogger(__name__)

EQUAL = 1e-6
"""Rewards closer than this are the same, as for the filter `zero_variance`."""
COLLAPSED = ("below_0", "at_0", "between", "at_1", "above_1")
LONGEST_LAG = 16
"""Steps; the last bin of the histograms of lag holds all that is older."""


def step_metrics(step: Step) -> dict[str, float]:
    """Everything that is known about a step, by name."""
    sums = merge([*(result.metrics for result in step.results), group_metrics(step.plan.rewards)])
    loss = sums.pop(LOSS, 0.0)
    skipped = sums.pop("skipped_steps", 0.0)
    if skipped:
        log.warning(
            "step %d: %d of %d optimizer steps were left out, as a loss or gradient was not finite; if it "
            "goes on, look at policy/grad_norm and */ratio/max, and lower learner.optimizer.lr",
            *(step.version, skipped, len(step.results)),
        )
    metrics = finish(sums)
    metrics |= {
        "policy/loss": loss / max(len(step.results), 1),
        "policy/grad_norm": float(np.max([result.grad_norm for result in step.results], initial=0.0)),
        "policy/skipped_steps": skipped,
        "policy/lr": step.results[-1].lr if step.results else 0.0,
        "weights/version": step.version,
    }
    metrics |= _critic_metrics(step) | dict(step.coefficients) | dict(step.hook_metrics)
    return (
        metrics
        | _rollout_metrics(step)
        | _intake_metrics(step)
        | _staleness_metrics(step)
        | _time_metrics(step)
    )


def _critic_metrics(step: Step) -> dict[str, float]:
    """The metrics of a critic; none where there is none."""
    values_T, returns_T, results = step.plan.rewards.values_T, step.plan.returns_T, step.critic_results
    if not results or values_T is None or returns_T is None:
        return {}
    sums = merge(result.metrics for result in results)
    loss, skipped = sums.pop(LOSS, 0.0), sums.pop("skipped_steps", 0.0)
    if skipped:
        log.warning(
            "step %d: %d of %d optimizer steps of the critic were left out, as a loss or gradient was not "
            "finite; if it goes on, look at critic/grad_norm, and lower critic.optimizer.lr",
            *(step.version, skipped, len(results)),
        )
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
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [len(rollout.response_ids) for rollout in rollouts]
    parts = {
        name: [r.reward_parts[name] for r in rollouts if name in r.reward_parts]
        for name in step.plan.rewards.parts
    }
    return {
        **{f"reward/{name}/mean": float(np.mean(values)) for name, values in parts.items() if values},
        **_answer_metrics(groups),
        "completions/length_mean": float(np.mean(lengths)),
        "completions/length_max": float(np.max(lengths)),
        "completions/truncated_share": float(np.mean([r.finish_reason == "length" for r in rollouts])),
        "time/sampling_s": float(np.mean([group.sampling_s for group in groups])),
        "time/reward_s": float(np.mean([group.reward_s for group in groups])),
    }


def _answer_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Who has an answer, and how often the most frequent one of a group is right; if rewards say what the
    answer is."""
    if not (votes := votes_of(groups)):
        return {}
    return {
        "completions/answered_share": float(
            np.mean([bool(answer) for answers, _ in votes for answer in answers])
        ),
        "group/majority": float(
            np.mean([maj_at_k(answers, solved, len(answers)) for answers, solved in votes])
        ),
    }


def _intake_metrics(step: Step) -> dict[str, float]:
    """What was taken, what of it was rejected and how long that was, and what had nothing to compare."""
    collected = step.collected
    rejected: dict[str, list[Group]] = {UNTRAINABLE: [], DEADLY: []}  # 0 is said too: an alarm rings by them
    for group, reason in collected.rejected:
        rejected.setdefault(kind_of(reason), []).append(group)
    lengths = {
        reason: [len(rollout.response_ids) for group in groups for rollout in group.rollouts]
        for reason, groups in rejected.items()
    }
    collapsed = Counter(
        _collapsed(group) for group in (*collected.groups, *(group for group, _ in collected.rejected))
    )
    return {
        "groups/trained": len(collected.groups),
        "groups/takes": collected.takes,
        **{f"groups/rejected_{reason}": len(groups) for reason, groups in rejected.items()},
        **{
            f"groups/length_rejected_{reason}": float(np.mean(lengths[reason]))
            for reason in rejected
            if lengths[reason]
        },
        **{f"groups/collapsed_{where}": collapsed[where] for where in COLLAPSED},
    }


def _collapsed(group: Group) -> str | None:
    """Where the rewards of a group lie if they are all equal: in group-relative training it teaches
    nothing."""
    rewards = [rollout.reward for rollout in group.rollouts]
    if len(rewards) < 2 or max(rewards) - min(rewards) > EQUAL:
        return None
    for where, value in (("at_0", 0.0), ("at_1", 1.0)):
        if abs(rewards[0] - value) <= EQUAL:
            return where
    return "below_0" if rewards[0] < 0 else "between" if rewards[0] < 1 else "above_1"


def _staleness_metrics(step: Step) -> dict[str, float]:
    """Lag per action token, split into what passed while sampling and what passed while waiting; and what
    masks took out."""
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
    in_flight_T = lag_T - in_queue_T
    return {
        "staleness/mean": float(lag_T.mean()),
        "staleness/max": float(lag_T.max()),
        "staleness/in_queue": float(in_queue_T.mean()),
        "staleness/in_flight": float(in_flight_T.mean()),
        **{f"staleness/in_queue/{steps}": share for steps, share in _histogram(in_queue_T).items()},
        **{f"staleness/in_flight/{steps}": share for steps, share in _histogram(in_flight_T).items()},
        **step.plan.masked,
    }


def _histogram(steps_T: NDArray[np.int64]) -> dict[int, float]:
    """Share of the tokens by number of steps."""
    counts = np.bincount(np.clip(steps_T, 0, LONGEST_LAG))
    return {steps: float(count) / steps_T.size for steps, count in enumerate(counts)}


def _time_metrics(step: Step) -> dict[str, float]:
    seconds = step.seconds
    total_s = sum(seconds.values())
    tokens = sum(len(sequence.prompt_ids) + len(sequence.response_ids) for sequence in step.plan.sequences)
    return {
        **{f"time/{name}": value for name, value in seconds.items()},
        "time/step": total_s,
        "idle/learner": seconds.get("wait_groups", 0.0) / total_s if total_s else 0.0,
        "perf/learner_tokens_per_s": tokens / max(total_s - seconds.get("wait_groups", 0.0), 1e-9),
    }
