"""Trackers: JSON lines, Weights & Biases, and event files of TensorBoard. `exporter.py` has Prometheus."""

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config.sections import TelemetryConfig
from asyncrl.errors import from_extra
from asyncrl.telemetry.base import SampleRecord
from asyncrl.telemetry.history import of_sets, score
from asyncrl.telemetry.jsonl import Lines, finite, to_json

# `NAME/3`: the share of the distribution NAME at the value 3. A larger number, as of a time, is a part of the
# name: a distribution has an entry for each value up to its largest.
BIN = re.compile(r"(?P<name>.+)/(?P<at>[0-9]{1,2})")
COLUMNS = (
    "step", "kind", "prompt", "response", "reward", "parts", "advantage", "versions", "finish_reason",
    "generator_id", "reason", "answer",
)  # fmt: skip
SAMPLES_EVERY = 10  # steps between two tables of one kind: a table at every step would dominate the upload
FLUSH_S = 10
INIT_TIMEOUT_S = 60.0
FINISH_S = 300.0  # for the last uploads; without a limit W&B waits until the learner is taken to hang
# Shown in the run's summary next to the last value; the largest value of an alarm says if it was ever active.
HIGHEST, LOWEST = ("reward/mean", "eval/*", "alarm/*"), ("policy/entropy", "mismatch/ess")
# In the summary also as `0.412 ± 0.014 (n 1,319)`.
SCORES = ("eval/accuracy", "eval/reward_mean")
# Logged a second time under one prefix, because W&B makes one section of a workspace for each prefix.
# `deploy/wandb_overview.py` makes a report of them.
OVERVIEW = (
    "reward/mean", "eval/accuracy", "completions/length_mean", "policy/entropy", "policy/grad_norm",
    "mismatch/k3", "mismatch/ess", "staleness/mean", "weights/probe_max", "idle/learner", "time/step",
    "perf/learner_tokens_per_s", "perf/mfu", "weights/transfer_gb_per_s",
)  # fmt: skip


class JsonlTracker:
    """Each line is `{"step": 3, "time": 1.7e9, "reward/mean": 0.5, ...}`; generators write `"step": null`.

    JSON has no NaN and no infinity: such a value becomes null.
    """

    def __init__(self, metrics: Path, samples: Path | None = None) -> None:
        """Append metrics to the file `metrics` and, if it is given, rollouts to the file `samples`."""
        self._metrics = Lines(metrics)
        self._samples = Lines(samples) if samples else None

    def log(self, metrics: Mapping[str, float], *, step: int | None = None) -> None:
        values = {name: finite(value) for name, value in metrics.items()}
        # Its own fields come first in a line, and win.
        own = {"step": step, "time": round(time.time(), 3)}
        self._metrics.write([own | values | own])

    def samples(self, records: Sequence[SampleRecord]) -> None:
        if self._samples:
            self._samples.write([to_json(asdict(record)) for record in records])

    def close(self) -> None:
        self._metrics.close()
        if self._samples:
            self._samples.close()


class WandbTracker:
    """A W&B run with our run's name, continued by a resume."""

    def __init__(
        self, telemetry: TelemetryConfig, run: str, directory: Path, values: Mapping[str, Any], run_id: str
    ) -> None:
        """Open the run. W&B identifies it by `run_id` and keeps its own files in `directory`."""
        with from_extra("wandb"):
            import wandb

        is_online = telemetry.wandb == "online"
        if is_online and not (os.environ.get("WANDB_API_KEY") or wandb.api.api_key):
            # Without this check, W&B would prompt on an unattended terminal.
            raise RuntimeError(
                "no W&B API key: run `wandb login`, set WANDB_API_KEY, or set telemetry.wandb to offline"
            )
        directory.mkdir(parents=True, exist_ok=True)
        self._wandb = wandb
        self._shown = dict[str, int]()
        end = {"finish_timeout": FINISH_S, "finish_timeout_raises": True}
        self._run = wandb.init(
            mode="online" if is_online else "offline",
            project=telemetry.wandb_project,
            name=run,
            id=run_id,
            resume="allow" if is_online else None,
            dir=str(directory),
            config=dict(values),
            settings=wandb.Settings(init_timeout=INIT_TIMEOUT_S, silent=True, console="off", **end),
        )
        # W&B's own step can only grow, but ours goes back when a run resumes from a checkpoint.
        self._run.define_metric("*", step_metric="step")
        for best, names in (("max", HIGHEST), ("min", LOWEST)):
            for metric in names:
                self._run.define_metric(metric, step_metric="step", summary=f"last,{best}")

    def log(self, metrics: Mapping[str, float], *, step: int | None = None) -> None:
        """Log by step; without a step, by time."""
        numbers, histograms = split(metrics)
        shown = [name for wanted in OVERVIEW for name in of_sets(wanted, numbers)]
        overview = {f"overview/{name.replace('/', ' ')}": numbers[name] for name in shown}
        draw = self._wandb.Histogram
        edges = {name: (bins, np.arange(len(bins) + 1.0)) for name, bins in histograms.items()}
        drawn = {name: draw(np_histogram=bins) for name, bins in edges.items()}
        self._run.log(numbers | overview | drawn | ({} if step is None else {"step": step}))
        for name in (name for wanted in SCORES for name in of_sets(wanted, numbers)):
            self._run.summary[f"{name} with error"] = score(numbers, name)

    def samples(self, records: Sequence[SampleRecord]) -> None:
        """Show rollouts as a table, every few steps."""
        if rows := table_rows(records, self._shown):
            table = self._wandb.Table(columns=list(COLUMNS), data=rows)
            self._run.log({"step": records[-1].step, _table_of(records[-1]): table})

    def close(self) -> None:
        """Upload what is pending and close the run. Raises TimeoutError after `FINISH_S`."""
        try:
            self._run.finish()
        except TimeoutError:
            files = Path(self._run.dir).parent
            raise TimeoutError(f"W&B lacks the end of the run; `wandb sync {files}` uploads it") from None


class TensorBoardTracker:
    """Look with `tensorboard --logdir RUNS`."""

    def __init__(self, directory: Path, config: Mapping[str, Any], step: int) -> None:
        """Begin a new event file in `directory` that replaces everything after `step`."""
        with from_extra("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

        self._shown = dict[str, int]()
        self._writer = SummaryWriter(log_dir=str(directory), purge_step=step + 1, flush_secs=FLUSH_S)
        self._writer.add_text("config", _code(json.dumps(config, indent=1)), global_step=step)

    def log(self, metrics: Mapping[str, float], *, step: int | None = None) -> None:
        """Log by step. TensorBoard has no other axis, so metrics without a step are left out."""
        if step is None:
            return
        numbers, histograms = split(metrics)
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, global_step=step)
        for name, weights in histograms.items():
            counts, edges = np.array(weights), np.arange(len(weights) + 1.0)
            self._writer.add_histogram_raw(
                name,
                min=0.0,
                max=edges[-1],
                num=counts.sum(),
                sum=(counts * edges[:-1]).sum(),
                sum_squares=(counts * edges[:-1] ** 2).sum(),
                bucket_limits=edges[1:].tolist(),
                bucket_counts=list(weights),
                global_step=step,
            )

    def samples(self, records: Sequence[SampleRecord]) -> None:
        """Show rollouts as text, every few steps."""
        if rows := table_rows(records, self._shown):
            lines = [[f"{name}: {cell}" for name, cell in zip(COLUMNS, row, strict=True)] for row in rows]
            text = _code("\n\n".join(map("\n".join, lines)))
            self._writer.add_text(_table_of(records[-1]), text, global_step=records[-1].step)

    def close(self) -> None:
        self._writer.close()


def _code(text: str) -> str:
    """Return Markdown that shows a model's text verbatim; half an emoji, which UTF-8 lacks, is escaped."""
    return "\n".join(f"    {line}" for line in text.encode(errors="backslashreplace").decode().splitlines())


def split(metrics: Mapping[str, float]) -> tuple[dict[str, float], dict[str, tuple[float, ...]]]:
    """Return (plain numbers, distributions by name): the weights of the values 0, 1, 2, ...

    The metrics have one number for each value with a weight; values are at most 99.
    """
    numbers: dict[str, float] = {}
    bins: dict[str, dict[int, float]] = {}
    for name, value in metrics.items():
        if found := BIN.fullmatch(name):
            bins.setdefault(found["name"], {})[int(found["at"])] = float(value)
        else:
            numbers[name] = value
    return numbers, {
        f"{name}/histogram": tuple(at.get(index, 0.0) for index in range(max(at) + 1))
        for name, at in bins.items()
    }


def _table_of(record: SampleRecord) -> str:
    """Return the name of the table: `samples/train`, `samples/eval`, of a named set `samples/eval/NAME`."""
    return "/".join(filter(None, ("samples", record.kind, record.eval_set)))


def table_rows(records: Sequence[SampleRecord], shown: dict[str, int]) -> list[list[str | int | float]]:
    """Return a row of `COLUMNS` per record; no rows within `SAMPLES_EVERY` steps after the last ones.

    `shown` keeps the step of these by table.
    """
    if not records:
        return []
    step, table = records[-1].step, _table_of(records[-1])
    if 0 <= step - shown.get(table, -SAMPLES_EVERY) < SAMPLES_EVERY:
        return []
    shown[table] = step
    rows = [[getattr(record, column) for column in COLUMNS] for record in records]
    return [[cell if isinstance(cell, (str, int, float)) else str(cell) for cell in row] for row in rows]
