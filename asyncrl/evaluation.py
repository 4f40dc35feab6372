"""Held-out evaluation while training goes on: the generators do it, through a lane of their own.

The lane is the buffer protocol once more. Round r asks for the first N held-out prompts, answered by weights of
version min(r * every, steps) or newer; it is one take of N groups, so nothing is lost or counted twice.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from asyncrl.buffer.base import LearnerBuffer
from asyncrl.buffer.ledger import Ledger
from asyncrl.errors import BufferGap
from asyncrl.types import Group

log = logging.getLogger(__name__)


def round_version(index: int, *, every: int, steps: int) -> int:
    """Policy version that round `index` (from 0) evaluates."""
    return min(index * every, steps)


def rounds_due(version: int, *, every: int, steps: int) -> int:
    """Rounds that are open once the learner has reached `version`."""
    return version // every + 1 + (version == steps and steps % every != 0)


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """Probability that one of k samples drawn without replacement is correct: 1 - C(n - c, k) / C(n, k).

    Source: Chen et al. 2021 (arXiv:2107.03374), equation 1.
    """
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """One finished round."""

    version: int
    metrics: dict[str, float]
    groups: tuple[Group, ...]


def summarise(groups: Sequence[Group], version: int) -> EvalResult:
    """Mean reward, share of solved samples (reward >= 1), pass@k, and which versions really answered."""
    scored = [group for group in groups if group.dead_reason is None]
    rewards = [[rollout.reward for rollout in group.rollouts] for group in scored]
    solved = [sum(reward >= 1.0 for reward in group) for group in rewards]
    metrics: dict[str, float] = {"eval/dead_groups": len(groups) - len(scored)}
    if scored:
        samples = len(rewards[0])
        metrics |= {
            "eval/reward_mean": float(np.mean([np.mean(group) for group in rewards])),
            "eval/accuracy": float(np.mean([count / samples for count in solved])),
            f"eval/pass@{samples}": float(np.mean([pass_at_k(count, samples, samples) for count in solved])),
            "eval/length_mean": float(np.mean([len(r.response_ids) for group in scored for r in group.rollouts])),
            "eval/newest_version": max(group.finished_version for group in scored),
        }
    return EvalResult(version=version, metrics=metrics, groups=tuple(groups))


@dataclass(slots=True, kw_only=True)
class Evaluation:
    """The learner's end of the evaluation lane."""

    buffer: LearnerBuffer
    ledger: Ledger
    decode: Callable[[bytes], Group]
    prompts: int
    """N; 0 when there is no held-out data: then no round is ever due."""
    every: int
    steps: int
    _opened: int = field(default=0)

    def recover(self, version: int) -> None:
        """Make the lane agree with the ledger and open the rounds due at `version`."""
        self._opened = self._due(version)
        self._recover()

    def _recover(self) -> None:
        self.buffer.recover(self.ledger, version=max(self._opened - 1, 0), limit=self._opened * self.prompts)

    @contextmanager
    def _healing(self) -> Iterator[None]:
        """A store that was wiped or rolled back is brought up to date from the ledger; the caller asks again later."""
        try:
            yield
        except BufferGap as gap:
            log.warning("the store forgot part of the evaluation and is brought up to date: %s", gap)
            self._recover()

    def open(self, version: int) -> None:
        """Open the rounds that are due once `version` is published."""
        due = self._due(version)
        if due > self._opened:
            self._opened = due
            with self._healing():
                self.buffer.set_version(due - 1, limit=due * self.prompts)

    def _due(self, version: int) -> int:
        return rounds_due(version, every=self.every, steps=self.steps) if self.prompts else 0

    def poll(self) -> list[EvalResult]:
        """The rounds that have become complete, oldest first."""
        results: list[EvalResult] = []
        with self._healing():
            while self.ledger.takes < self._opened:
                take = self.buffer.take(self.ledger, self.prompts, window=self.prompts)
                if take is None:
                    break
                groups = [self.decode(frame) for frame in self.buffer.frames(take.ids)]
                version = round_version(self.ledger.takes, every=self.every, steps=self.steps)
                self.ledger.consume(take.ids)
                results.append(summarise(groups, version))
                self.buffer.commit(self.ledger.takes, self.ledger.chain)
        return results

    def wait(self, wait_s: float) -> list[EvalResult]:
        """Poll until every open round is complete or `wait_s` has passed."""
        results, until_s = self.poll(), time.monotonic() + wait_s
        while self.ledger.takes < self._opened and time.monotonic() < until_s:
            time.sleep(0.05)
            results += self.poll()
        return results
