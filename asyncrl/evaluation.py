"""Held-out evaluation during training: the generators answer, through further lanes of the buffer.

Each set of data.eval has a lane. Round r asks its first N prompts, answered by weights of version
min(r * every, steps) or newer. Its ids are r N + 1 .. (r + 1) N, taken in strict order: none is lost or
counted twice. An id's meaning depends on the rules (`Rounds`), so each combination of them has its own lane.
A run resumed with other rules begins with the next round that its version has not passed (`resume_ledger`).
"""

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np

from asyncrl.algo.draws import best_at_k, maj_at_k, pass_at_k
from asyncrl.algo.ranges import is_solved
from asyncrl.buffer.base import LearnerBuffer
from asyncrl.buffer.judge import DISCARDED_LINEAGE, Gate
from asyncrl.buffer.ledger import Ledger
from asyncrl.config.data_section import drawn, error_of, prefix_of
from asyncrl.config.resolved import eval_digest
from asyncrl.config.schema import Config
from asyncrl.errors import BufferGap
from asyncrl.hosting.progress import beat
from asyncrl.lineage import INITIAL, History
from asyncrl.types import Group

log = logging.getLogger(__name__)


class Rounds(NamedTuple):
    """The rules of all rounds. Learner and generators must use the same."""

    prompts: int  # N
    every: int
    steps: int
    asked: str  # identifies the prompts and how answers are sampled and scored

    @classmethod
    def of(cls, config: Config, rows: Sequence[tuple[int, str]]) -> dict[str, Self]:
        """Return the rules of each set by its name; `rows` has the number and fingerprint of its rows."""
        found = {}
        for (name, task), (count, fingerprint) in zip(config.data.sets.items(), rows, strict=True):
            asked, digest = config.of(task).eval, eval_digest(config, task, fingerprint)
            found[name] = cls(min(asked.prompts, count), asked.every, config.learner.steps, digest)
        return found

    @property
    def lane(self) -> str:
        return f"eval-{self.prompts}-{self.every}-{self.steps}-{self.asked}"

    def version(self, index: int) -> int:
        """Return the policy version that round `index` (from 0) evaluates."""
        return min(index * self.every, self.steps)

    def due(self, version: int) -> int:
        """Return the number of rounds that are open once the learner has reached `version`."""
        is_last = version == self.steps and self.steps % self.every != 0
        return version // self.every + 1 + is_last


def resume_ledger(state: Mapping[str, Any], rounds: Rounds, *, version: int) -> Ledger:
    """Return the ledger with which evaluation continues from `Evaluation.state`; `{}` is the beginning.

    If the rules have changed, the ledger is new, and all rounds that `version` has passed are over in it.
    """
    rules = rounds._asdict()
    if state and state["rules"] == rules:
        return Ledger.from_dict(state["ledger"])
    first = -(-version // rounds.every)
    if state:
        log.warning(
            "evaluation was resumed with %s, before it was %s; it goes on with the round of version %d",
            *(rules, state["rules"], rounds.version(first)),
        )
    return Ledger(watermark=first * rounds.prompts)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """One finished round."""

    version: int
    metrics: dict[str, float]
    groups: tuple[Group, ...]
    name: str = ""  # of the set


def standard_error(values: Sequence[float]) -> float | None:
    """Return the standard error of the mean of one value per prompt; None for a single prompt.

    The unit is the prompt, because prompts were drawn: samples of one prompt are averaged before. Where each
    value is 0 or 1, with a share p of 1, this is the binomial error sqrt(p (1 - p) / (n - 1)).

    Source: Miller 2024, Adding Error Bars to Evals (arXiv:2411.00640).
    """
    return float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None


def summarise(groups: Sequence[Group], version: int, name: str = "") -> EvalResult:
    """Return the metrics of a round of a set; a sample counts as solved if its reward is 1 or more.

    `eval/se/<metric>` is the standard error of `eval/<metric>` over the `eval/prompts` prompts with a score.
    With `name` they begin with `eval/<name>/`. The log has the reason of the first prompt that failed.
    """
    scored = [group for group in groups if group.dead_reason is None]
    if failed := [group.dead_reason for group in groups if group.dead_reason is not None]:
        where = f"step {version}, data.eval{f' {name}' if name else ''}"
        message = "%s: %d of %d held-out prompts failed and are in no mean; mend what failed first: %s"
        log.warning(message, where, len(failed), len(groups), failed[0])
    rewards = [[episode[0].reward for episode in group.by_episode] for group in scored]
    solved = [sum(map(is_solved, group)) for group in rewards]
    metrics: dict[str, float] = {"eval/prompts": len(scored), "eval/dead_groups": len(failed)}
    if scored:
        samples = len(rewards[0])
        counts = drawn(samples)
        votes = votes_of(scored)
        by_prompt = {
            "eval/reward_mean": [_mean(group) for group in rewards],
            "eval/accuracy": [count / samples for count in solved],
            f"eval/pass@{samples}": [pass_at_k(count, samples, samples) for count in solved],
            **{f"eval/best@{k}": [best_at_k(group, k) for group in rewards] for k in counts["best"]},
        }
        for k in counts["maj"] if votes else ():
            by_prompt[f"eval/maj@{k}"] = [maj_at_k(answers, solved, k) for answers, solved in votes]
        for metric, values in by_prompt.items():
            metrics[metric] = _mean(values)
            if (error := standard_error(values)) is not None:
                metrics[error_of(metric)] = error
        if votes:
            metrics["eval/answered_share"] = _mean(bool(one) for answers, _ in votes for one in answers)
        metrics |= {
            "eval/length_mean": _mean(
                sum(one.actions for one in episode) for group in scored for episode in group.by_episode
            ),
            "eval/newest_version": max(group.finished_version for group in scored),
        }
    named = {f"{prefix_of(name)}{metric.removeprefix('eval/')}": one for metric, one in metrics.items()}
    return EvalResult(name=name, version=version, metrics=named, groups=tuple(groups))


def _mean(values: Iterable[float]) -> float:
    return float(np.mean([*values]))


def votes_of(groups: Sequence[Group]) -> list[tuple[list[str | None], list[bool]]]:
    """Return (answers, whether each is solved) by group; empty if no reward function extracts answers."""
    episodes = [[episode[0] for episode in group.by_episode] for group in groups]
    votes = [([one.answer for one in group], [is_solved(one.reward) for one in group]) for group in episodes]
    return votes if any(answer is not None for answers, _ in votes for answer in answers) else []


@dataclass(slots=True, kw_only=True)
class Evaluation:
    """The learner's side of the lane of one set."""

    name: str = ""
    buffer: LearnerBuffer
    ledger: Ledger
    gate: Gate
    rounds: Rounds
    history: History = INITIAL  # history of the weights that may answer
    _opened: int = field(default=0, init=False)  # number of rounds that may be answered, since the first
    # Groups of the current round that were taken already: fewer than N after a frame was refused.
    _round: list[Group] = field(default_factory=list, init=False)
    # The ledger after the last whole round: after a crash, the groups of an incomplete round are taken again.
    _finished: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self._finished = self.ledger.to_dict()

    def state(self) -> dict[str, Any]:
        """Return plain values for the checkpoint; see `resume_ledger`."""
        return {"rules": self.rounds._asdict(), "ledger": self._finished}

    @property
    def _done(self) -> int:
        """Number of rounds that are over: the index of the current round."""
        return self.ledger.consumed // self.rounds.prompts

    @property
    def missing(self) -> int:
        """Number of rounds that are open and not complete."""
        return max(0, self._opened - self._done)

    def recover(self, version: int) -> None:
        """Make the lane agree with the ledger and open the rounds due at `version`."""
        self._opened = self.rounds.due(version)
        self._recover()

    def _recover(self) -> None:
        version, limit = max(self._opened - 1, 0), self._opened * self.rounds.prompts
        self.buffer.recover(self.ledger, version=version, limit=limit, history=self.history)

    @contextmanager
    def _healing(self) -> Iterator[None]:
        """If the store was wiped or rolled back, repair it from the ledger; the caller tries again later."""
        try:
            yield
        except BufferGap as gap:
            log.warning("the store forgot part of the evaluation and is brought up to date: %s", gap)
            self._recover()

    def open(self, version: int) -> None:
        """Open the rounds that are due once `version` is published."""
        due = self.rounds.due(version)
        if due > self._opened:
            self._opened = due
            with self._healing():
                self.buffer.set_version(due - 1, limit=due * self.rounds.prompts)

    def poll(self) -> list[EvalResult]:
        """Return the rounds that have become complete, oldest first."""
        results: list[EvalResult] = []
        with self._healing():
            while self._done < self._opened and self._take():
                if len(self._round) == self.rounds.prompts:
                    version = self.rounds.version(self._done - 1)
                    groups, self._round, self._finished = self._round, [], self.ledger.to_dict()
                    ordered = sorted(groups, key=lambda group: group.ticket_id)
                    results.append(summarise(ordered, version, self.name))
                    self.buffer.commit(self.ledger.takes, self.ledger.chain)
        return results

    def _take(self) -> bool:
        """Take the missing groups of the current round: several times if a frame is refused."""
        take = self.buffer.take(self.ledger, self.rounds.prompts - len(self._round), window=1)
        groups = self.gate.groups(self.buffer, take) if take is not None else None
        if take is None or groups is None:
            return False
        rest = take
        for ticket_id, (group, frame) in zip(take.ids, groups, strict=True):
            spans = [span for rollout in group.rollouts for span in rollout.version_spans]
            if not all(span.weights in self.history for span in spans):
                rest = self.buffer.reject_frame(rest, ticket_id, frame, DISCARDED_LINEAGE, old=True)
        if rest is not take:
            return True
        self.ledger.consume(take.ids)
        self._round += [group for group, _ in groups]
        return True

    def wait(self, wait_s: float) -> list[EvalResult]:
        """Poll until every open round is complete or `wait_s` has passed."""
        results, until_s = self.poll(), time.monotonic() + wait_s
        while self._done < self._opened and time.monotonic() < until_s:
            time.sleep(0.05)
            beat()
            results += self.poll()
        return results
