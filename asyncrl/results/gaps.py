"""Differences between evaluations of runs, and whether each is larger than its error.

If two runs answered the same prompts, they are compared prompt by prompt. What makes a prompt easy or hard
for both then cancels out, and the error is smaller than that of two independent draws of prompts.

Source: Miller 2024, Adding Error Bars to Evals (arXiv:2411.00640).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np

from asyncrl.algo.ranges import is_solved
from asyncrl.config.data_section import error_of
from asyncrl.evaluation import standard_error
from asyncrl.results.archive import Archive, read_samples
from asyncrl.results.page import Table
from asyncrl.telemetry.history import Row, Series, highest, of_sets, set_of
from asyncrl.telemetry.text import number

# Scores, and how `evaluation.summarise` makes each from the reward of a sample.
SCORES: Mapping[str, Callable[[float], float]] = {
    "eval/accuracy": lambda reward: float(is_solved(reward)),
    "eval/reward_mean": float,
}
CHOICES: Mapping[str, Callable[[Series], int]] = {
    "last": lambda series: series[-1][0],
    "best": lambda series: highest(series)[0],
}
CERTAIN = 2.0  # times the error: chance alone makes 19 of 20 differences smaller


@dataclass(slots=True)
class Answered:
    """A prompt of an evaluation, and the reward of each of its samples."""

    prompt: str
    rewards: dict[int, float] = field(default_factory=dict)


def gaps(archives: Mapping[str, Archive]) -> list[Table]:
    """Return a table with the differences of each two runs; none if no two were evaluated."""
    read, rows = cache(answered), []
    for (before, one), (after, other) in combinations(archives.items(), 2):
        both = [name for name in one.names if name in other.names]
        for name, score in {each: one for one in SCORES for each in of_sets(one, both)}.items():
            for which, choose in CHOICES.items():
                steps = [(run, choose(run.series(name))) for run in (one, other)]
                files = (run.directory.evaluation(step, set_of(name)) for run, step in steps)
                pairs = paired(score, *map(read, files))
                scored = (run.history.rows[step] for run, step in steps)
                shown = _of_pairs(pairs) if len(pairs) > 1 else _of_scores(name, *scored)
                rows.append((f"{name}, {which}", f"{after} - {before}", *shown))
    head = ("score", "runs", "difference", "error of", "larger than twice its error")
    return [Table(head, rows, "differences of evaluations")] if rows else []


def answered(path: Path) -> dict[int, Answered]:
    """Return the prompts in a file of all samples of an evaluation, by their numbers; empty without one."""
    found: dict[int, Answered] = {}
    for sample in read_samples(path):
        if sample.kind == "eval":
            # An episode may be several records, of which the first begins with the prompt.
            of = found.setdefault(sample.prompt_number, Answered(sample.prompt))
            of.rewards.setdefault(sample.sample_number, sample.reward)
    return found


def paired(name: str, before: Mapping[int, Answered], after: Mapping[int, Answered]) -> list[float]:
    """Return the difference of a score on each prompt that both runs answered; empty if prompts differ."""
    common = before.keys() & after.keys()
    if any(before[place].prompt != after[place].prompt for place in common):
        return []
    return [_mean(name, after[place]) - _mean(name, before[place]) for place in sorted(common)]


def _mean(name: str, one: Answered) -> float:
    return float(np.mean([SCORES[name](reward) for reward in one.rewards.values()]))


def _of_pairs(pairs: list[float]) -> tuple[str, str, str]:
    return _shown(float(np.mean(pairs)), standard_error(pairs), f"{len(pairs):,} prompts in pairs")


def _of_scores(name: str, before: Row, after: Row) -> tuple[str, str, str]:
    """Compare as if the prompts of the two runs were drawn independently."""
    errors = [row.get(error_of(name)) for row in (before, after)]
    known = [error for error in errors if error is not None]
    error = math.hypot(*known) if len(known) == 2 else None
    return _shown(after[name] - before[name], error, "both scores, not in pairs")


def _shown(gap: float, error: float | None, way: str) -> tuple[str, str, str]:
    sign = "+" if gap > 0 else ""
    if error is None:
        return f"{sign}{number(gap)}", way, "unknown: a score has no error"
    verdict = "yes" if abs(gap) > CERTAIN * error else "no: it may be chance"
    return f"{sign}{number(gap)} ± {number(error, 2)}", way, verdict
