"""Everything that the learner shows of its run: metrics, samples, timeline. A failure here fails no step."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.best_effort import BestEffort
from asyncrl.buffer.base import kind_of
from asyncrl.config.schema import Config
from asyncrl.data.prompts import PromptSource, load_tokenizer
from asyncrl.evaluation import EvalResult
from asyncrl.learner import Step
from asyncrl.report.pairs import PairsFile, text_after
from asyncrl.report.step_metrics import step_metrics, usage_metrics
from asyncrl.report.timeline import Timeline
from asyncrl.run.directory import RunDirectory
from asyncrl.telemetry.base import SampleRecord
from asyncrl.telemetry.exporter import Exporter, open_exporter
from asyncrl.telemetry.fanout import Trackers, open_trackers
from asyncrl.trainer.base import Usage
from asyncrl.types import Group, Rollout
from asyncrl.weights.base import UpdateReport

Decode = Callable[[Sequence[int]], str]
EVAL_SAMPLES = 4


class Reporting:
    """Trackers and timeline behind one guard."""

    def __init__(
        self,
        trackers: Trackers,
        timeline: Timeline,
        decode: Decode,
        *,
        samples_per_step: int,
        exporter: Exporter | None = None,
        pairs: PairsFile | None = None,
    ) -> None:
        """`exporter` is one of the trackers, which also shows the status; None without Prometheus.

        `pairs` is the file of `telemetry.pairs`.
        """
        self.exporter = exporter
        self._trackers = trackers
        self._timeline = timeline
        self._decode = decode
        self._samples_per_step = samples_per_step
        self._pairs = pairs
        self.guard = BestEffort()
        # Called with every metric; it may raise ConfigError.
        self.watch: Callable[[Mapping[str, float], int], None] = lambda metrics, step: None

    def step(self, step: Step, usage: Sequence[Usage], counters: Mapping[str, float]) -> None:
        """Report a finished step, with what each rank used in it.

        `counters` are logged even if the metrics of the step cannot be computed.
        """
        metrics: dict[str, float] = {}
        with self.guard("metrics"):
            metrics = step_metrics(step) | usage_metrics(step, usage)
        with self.guard("timeline"):
            self._timeline.step(step)
        with self.guard("samples"):
            dropped = dropped_records(step, self._decode, self._samples_per_step)
            trained = sample_records(step, self._decode, self._samples_per_step)
            self._trackers.samples([*dropped, *trained])  # the last one names a tracker's table
        if self._pairs is not None:
            with self.guard("pairs"):
                self._pairs.write(step)
        self.log({**metrics, **counters, "telemetry/failed": self.guard.failures.total()}, step=step.version)

    def evaluation(self, results: Sequence[EvalResult]) -> None:
        """Report rounds that have become complete."""
        for result in results:
            self.log(result.metrics, step=result.version)
            with self.guard("samples of an evaluation"):
                records = eval_records(result.groups, result.version, self._decode, EVAL_SAMPLES)
                self._trackers.samples(records)

    def checkpoint(self, version: int, seconds: float) -> None:
        """Report a checkpoint that has just been saved."""
        self.log({"time/checkpoint": seconds}, step=version)
        with self.guard("timeline"):
            self._timeline.checkpoint(version, seconds)

    def update(self, generator_id: str, report: UpdateReport) -> None:
        """Report an update that a generator has just finished."""
        with self.guard("timeline"):
            self._timeline.update(generator_id, report)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Report numbers by name."""
        with self.guard("trackers and alarms"):
            self._trackers.log(metrics, step=step)
        self.watch(metrics, step)

    def close(self) -> None:
        """Close trackers and timeline."""
        with self.guard("trackers and alarms"):
            self._trackers.close()
        with self.guard("timeline"):
            self._timeline.close()
        if self._pairs is not None:
            self._pairs.close()


def open_reporting(config: Config, directory: RunDirectory, *, key_id: str, step: int) -> Reporting:
    """Open trackers, timeline and samples. `key_id` and `step` as in `open_trackers`."""
    exporter = open_exporter(config, "learner", directory.target("learner"))
    trackers = open_trackers(
        config.telemetry,
        run=config.run.name,
        key_id=key_id,
        directory=directory.path,
        metrics=directory.metrics / "learner.jsonl",
        samples=directory.samples,
        resolved=config.model_dump(mode="json"),
        step=step,
    )
    if exporter:
        trackers.add(exporter)
    return Reporting(
        trackers,
        Timeline(directory.trace if config.telemetry.trace else None),
        partial(load_tokenizer(config.model).decode, skip_special_tokens=True),
        samples_per_step=config.telemetry.samples_per_step,
        exporter=exporter,
        pairs=_open_pairs(config, directory.pairs, step) if config.telemetry.pairs else None,
    )


def _open_pairs(config: Config, path: Path, step: int) -> PairsFile:
    source = PromptSource(config.data, config.model, config.sampling, seed=config.run.seed)
    return PairsFile(path, {one.token_ids: one for one in source.train}, source.decode, step=step)


def sample_records(step: Step, decode: Decode, count: int) -> list[SampleRecord]:
    """Return `count` rollouts of the step, spread over its groups: the best and the worst of each."""
    records: list[SampleRecord] = []
    sequences = iter(step.plan.sequences)
    for group in step.collected.groups:
        owned = [next(sequences) for _ in group.rollouts]
        ranked = sorted(zip(group.rollouts, owned, strict=True), key=lambda pair: -pair[0].reward)
        for rollout, sequence in (ranked[0], ranked[-1]):
            if len(records) == count:
                return records
            actions = sequence.advantages[rollout.action_mask]
            advantage = float(actions[0]) if actions.size else 0.0
            records.append(_record(group, rollout, step.version, decode, kind="train", advantage=advantage))
    return records


def dropped_records(step: Step, decode: Decode, count: int) -> list[SampleRecord]:
    """Return a record for each of at most `count` groups that were taken and not trained.

    Each reason comes once before any reason comes twice: the most frequent one must not hide the others.
    """
    by_reason: dict[str, list[tuple[Group, str]]] = {}
    for group, reason in step.collected.rejected:
        by_reason.setdefault(kind_of(reason), []).append((group, reason))
    turns = [(turn, *item) for found in by_reason.values() for turn, item in enumerate(found)]
    chosen = sorted(turns, key=lambda item: item[0])[:count]
    return [_dropped(group, reason, step.version, decode) for _, group, reason in chosen]


def eval_records(groups: Sequence[Group], version: int, decode: Decode, count: int) -> list[SampleRecord]:
    """Return the first rollout of `count` evaluated prompts, after at most `count` prompts that failed."""
    lost = [(group, f"held-out, {group.dead_reason}") for group in groups if group.dead_reason is not None]
    records = [_dropped(group, reason, version, decode) for group, reason in lost[:count]]
    scored = [group for group in groups if group.rollouts][:count]
    return records + [
        _record(group, group.rollouts[0], version, decode, kind="eval", advantage=0.0) for group in scored
    ]


def _dropped(group: Group, reason: str, step: int, decode: Decode) -> SampleRecord:
    """Return a record of the group's best rollout; a dead group has no rollouts, but a reason."""
    if group.rollouts:
        best = max(group.rollouts, key=lambda rollout: rollout.reward)
        return _record(group, best, step, decode, kind="dropped", reason=reason)
    return SampleRecord(
        step=step, ticket_id=group.ticket_id, generator_id=group.generator_id, kind="dropped", reason=reason
    )


def _record(
    group: Group,
    rollout: Rollout,
    step: int,
    decode: Decode,
    *,
    kind: str,
    advantage: float = math.nan,
    reason: str = "",
) -> SampleRecord:
    return SampleRecord(
        step=step,
        ticket_id=group.ticket_id,
        prompt=decode(rollout.prompt_ids.tolist()),
        response=_conversation(rollout, decode),
        reward=rollout.reward,
        parts=dict(rollout.reward_parts),
        advantage=advantage,
        versions=[(span.version, span.tokens) for span in rollout.version_spans],
        finish_reason=rollout.finish_reason,
        generator_id=group.generator_id,
        kind=kind,
        reason=reason,
        answer=rollout.answer or "",
        judgements=_judgements(group, rollout),
    )


def _judgements(group: Group, rollout: Rollout) -> list[dict[str, Any]]:
    """Return what judges said about the rollout's episode."""
    column = group.recorded.get("judgements")
    if column is None:
        return []
    episodes = group.by_episode
    place = next(i for i, episode in enumerate(episodes) if any(one is rollout for one in episode))
    try:
        return [
            {name: str(one[name]) for name in ("part", "prompt", "answer")} | {"score": float(one["score"])}
            for one in json.loads(column.tobytes())[place]
        ]
    except (ValueError, LookupError, TypeError, RecursionError):  # a frame can hold any bytes
        return []


def _conversation(rollout: Rollout, decode: Decode) -> str:
    """Return the response, with marks before what its environment wrote and before the next answer."""
    if rollout.action_mask.all():
        return text_after(decode, rollout.prompt_ids.tolist(), rollout.response_ids.tolist())
    changes = np.flatnonzero(np.diff(rollout.action_mask)) + 1
    speakers = rollout.action_mask[[0, *changes]]
    return "".join(
        ("\n[model] " if is_model else "\n[environment] ") + decode(ids.tolist())
        for is_model, ids in zip(speakers, np.split(rollout.response_ids, changes), strict=True)
    ).lstrip("\n")
