"""Everything that the learner shows of its run: metrics, samples, timeline. A failure here fails no step."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.best_effort import BestEffort
from asyncrl.buffer.base import kind_of
from asyncrl.config.schema import Config
from asyncrl.data.prompts import PromptSource, load_tokenizer
from asyncrl.data.sample_plan import Shares
from asyncrl.evaluation import EvalResult
from asyncrl.files import replace_text
from asyncrl.hosting.progress import beat
from asyncrl.learner import Step
from asyncrl.report.step_metrics import source_metrics, step_metrics, usage_metrics
from asyncrl.report.timeline import Timeline
from asyncrl.run.directory import RunDirectory
from asyncrl.telemetry.base import SampleRecord
from asyncrl.telemetry.exporter import Exporter, open_exporter
from asyncrl.telemetry.fanout import Trackers, open_trackers
from asyncrl.telemetry.jsonl import Lines, Tail, to_json
from asyncrl.trainer.base import Usage
from asyncrl.types import Group, Rollout
from asyncrl.weights.base import UpdateReport

Decode = Callable[[Sequence[int]], str]
# The messages or text of each row of the data by its token ids (int32), as bytes.
Asked = Mapping[bytes, Sequence[Mapping[str, Any]] | str]
SHOWN = 4  # of an evaluation: prompts, and failed prompts, that trackers and samples.jsonl get


class PairsFile:
    """JSON lines with TRL's columns `prompt`, `chosen`, `rejected`, and the step."""

    def __init__(self, path: Path, prompts: Asked, decode: Decode, *, step: int) -> None:
        """Append to the file, without the pairs of steps after `step`, which will be trained again.

        Lines broken by a crash or a full disk are removed, too.
        """
        if path.exists():
            with path.open("rb+") as file:  # in place, behind what is read: there may be no room for a copy
                for record in Tail(path):
                    if record["step"] > step:
                        break
                    file.write(json.dumps(record).encode() + b"\n")
                file.truncate()
        self._lines, self._prompts, self._decode = Lines(path), prompts, decode

    def write(self, step: Step) -> None:
        """Append a line for each group of the step whose rewards, after shaping, differ."""
        pairs, rewards = [], iter(step.plan.rewards.rewards_S.tolist())
        for group in step.collected.groups:
            scored = [(next(rewards), rollout) for rollout in group.rollouts]
            (most, best), (least, worst) = (of(scored, key=lambda one: one[0]) for of in (max, min))
            if most == least:
                continue
            asked = self._prompts[best.prompt_ids.tobytes()]
            answers = [one.response_ids.tolist() for one in (best, worst)]
            chosen, rejected = (
                [{"role": "assistant", "content": self._decode(ids)}]
                if not isinstance(asked, str)
                else _text_after(self._decode, best.prompt_ids.tolist(), ids)
                for ids in answers
            )
            pairs.append({"step": step.version, "prompt": asked, "chosen": chosen, "rejected": rejected})
        self._lines.write(pairs)

    def close(self) -> None:
        self._lines.close()


def _text_after(decode: Decode, before: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text that the tokens add to those before them.

    Tokenizers such as Llama 2's drop a leading blank: a response decoded alone would be glued to its prompt.
    """
    start, whole = decode(before), decode([*before, *ids])
    return whole[len(start) :] if whole.startswith(start) else decode(ids)


@dataclass(slots=True)
class Reporting:
    """Trackers and timeline behind one guard."""

    trackers: Trackers
    timeline: Timeline
    decode: Decode
    directory: RunDirectory
    _: KW_ONLY
    samples_per_step: int
    exporter: Exporter | None = None  # one of the trackers, which also shows the status
    pairs: PairsFile | None = None  # the file of `telemetry.pairs`
    source_of: Callable[[int], str] | None = None  # names the source of a ticket, if there are several
    guard: BestEffort = field(default_factory=BestEffort)
    # Called with every metric.
    watch: Callable[[Mapping[str, float], int], None] = lambda metrics, step: None

    def step(self, step: Step, usage: Sequence[Usage], counters: Mapping[str, float]) -> None:
        """Report a step and each rank's use. `counters` are logged even if metrics cannot be computed."""
        metrics: dict[str, float] = {}
        with self.guard("metrics"):
            metrics = step_metrics(step) | usage_metrics(step, usage)
            if self.source_of:
                metrics |= source_metrics(step.collected.groups, self.source_of)
        with self.guard("timeline"):
            self.timeline.step(step)
        with self.guard("samples"):
            dropped = dropped_records(step, self.decode, self.samples_per_step)
            trained = sample_records(step, self.decode, self.samples_per_step)
            self.trackers.samples([*dropped, *trained])  # the last one names a tracker's table
        if self.pairs is not None:
            with self.guard("pairs"):
                self.pairs.write(step)
        failed = self.guard.failures.total() + self.trackers.failed
        self.log({**metrics, **counters, "telemetry/failed": failed}, step=step.version)

    def evaluation(self, results: Sequence[EvalResult], alive: Callable[[], object] = beat) -> None:
        """Report complete rounds and write all of their samples; call `alive` often in the meantime."""
        for result in results:
            self.log(result.metrics, step=result.version)
            with self.guard("samples of an evaluation"):
                records = eval_records(result.groups, result.version, self.decode, alive)
                records = [replace(record, eval_set=result.name) for record in records]
                self.trackers.samples(few(records))
                path = self.directory.evaluation(result.version, result.name)
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_text(path, "".join(json.dumps(to_json(asdict(one))) + "\n" for one in records))

    def checkpoint(self, version: int, seconds: float) -> None:
        self.log({"time/checkpoint": seconds}, step=version)
        with self.guard("timeline"):
            self.timeline.checkpoint(version, seconds)

    def update(self, generator_id: str, report: UpdateReport) -> None:
        with self.guard("timeline"):
            self.timeline.update(generator_id, report)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        with self.guard("trackers and alarms"):
            self.trackers.log(metrics, step=step)
        self.watch(metrics, step)

    def close(self) -> None:
        with self.guard("trackers and alarms"):
            self.trackers.close()
        with self.guard("timeline"):
            self.timeline.close()
        if self.pairs is not None:
            self.pairs.close()


def open_reporting(config: Config, directory: RunDirectory, *, key_id: str, step: int) -> Reporting:
    """Open trackers, timeline and samples. `key_id` and `step` as in `open_trackers`."""
    exporter = open_exporter(config, "learner", directory.target("learner"))
    values = config.model_dump(mode="json")
    trackers = open_trackers(
        config.telemetry, config.run.name, directory.path, values, key_id=key_id, step=step, also=exporter
    )
    pairs = None
    if config.telemetry.pairs:
        source = PromptSource.of(config)
        asked = {np.array(one.token_ids, np.int32).tobytes(): one.messages or one.text for one in source}
        pairs = PairsFile(directory.pairs, asked, source.decode, step=step)
    sources, shares = config.data.train, Shares(config.data.shares)
    return Reporting(
        trackers,
        Timeline(directory.trace if config.telemetry.trace else None),
        partial(load_tokenizer(config.model).decode, skip_special_tokens=True),
        directory,
        samples_per_step=config.telemetry.samples_per_step,
        exporter=exporter,
        pairs=pairs,
        source_of=(lambda ticket: sources[shares.source(ticket)].label) if len(sources) > 1 else None,
    )


def sample_records(step: Step, decode: Decode, count: int) -> list[SampleRecord]:
    """Return `count` rollouts of the step, spread over its groups: the best and the worst of each."""
    records: list[SampleRecord] = []
    sequences = iter(step.plan.sequences)
    for group in step.collected.groups:
        owned = [next(sequences) for _ in group.rollouts]
        ranked = sorted(zip(group.rollouts, owned, strict=True), key=lambda pair: -pair[0].reward)
        for rollout, sequence in ranked[:1] + ranked[1:][-1:]:
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


def eval_records(
    groups: Sequence[Group], version: int, decode: Decode, alive: Callable[[], object] = beat
) -> list[SampleRecord]:
    """Return all rollouts of an evaluation, and a record for each failed prompt; call `alive` for each."""
    records: list[SampleRecord] = []
    for number, group in enumerate(groups, start=1):
        alive()  # thousands of long answers take longer than a process may be silent
        if group.dead_reason is not None:
            reason = f"held-out, {group.dead_reason}"
            records.append(_dropped(group, reason, version, decode, prompt_number=number))
        for sample, episode in enumerate(group.by_episode, start=1):
            of = {"kind": "eval", "advantage": 0.0, "prompt_number": number, "sample_number": sample}
            records += [_record(group, rollout, version, decode, **of) for rollout in episode]
    return records


def few(records: Sequence[SampleRecord]) -> list[SampleRecord]:
    """Return the first rollout of a few prompts of an evaluation, after a few prompts that failed."""
    scored = [record for record in records if record.kind == "eval"]
    firsts = [next(same) for _, same in groupby(scored, key=lambda record: record.prompt_number)]
    return [record for record in records if record.kind == "dropped"][:SHOWN] + firsts[:SHOWN]


def _dropped(group: Group, reason: str, step: int, decode: Decode, prompt_number: int = 0) -> SampleRecord:
    """Return a record of the group's best rollout; a dead group has no rollouts, but a reason."""
    more: dict[str, Any] = {"kind": "dropped", "reason": reason, "prompt_number": prompt_number}
    if group.rollouts:
        best = max(group.rollouts, key=lambda rollout: rollout.reward)
        return _record(group, best, step, decode, **more)
    return SampleRecord(step=step, ticket_id=group.ticket_id, generator_id=group.generator_id, **more)


def _record(group: Group, rollout: Rollout, step: int, decode: Decode, **more: Any) -> SampleRecord:
    prompt_ids = rollout.prompt_ids.tolist()
    if rollout.action_mask.all():
        response = _text_after(decode, prompt_ids, rollout.response_ids.tolist())
    else:  # with marks before what its environment wrote and before the next answer
        changes = np.flatnonzero(np.diff(rollout.action_mask)) + 1
        speakers = rollout.action_mask[[0, *changes]]
        response = "".join(
            ("\n[model] " if is_model else "\n[environment] ") + decode(ids.tolist())
            for is_model, ids in zip(speakers, np.split(rollout.response_ids, changes), strict=True)
        ).lstrip("\n")
    return SampleRecord(
        step=step,
        ticket_id=group.ticket_id,
        prompt=decode(prompt_ids),
        response=response,
        reward=rollout.reward,
        parts=dict(rollout.reward_parts),
        versions=[(span.version, span.tokens) for span in rollout.version_spans],
        finish_reason=rollout.finish_reason,
        generator_id=group.generator_id,
        answer=rollout.answer or "",
        judgements=_judgements(group, rollout),
        **more,
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
