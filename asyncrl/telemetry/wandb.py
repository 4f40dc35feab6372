"""Weights & Biases, online or offline: metrics by step, distributions, and tables of samples."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from asyncrl.extras import from_extra
from asyncrl.telemetry.base import COLUMNS, SampleRecord, SampleTables, split

INIT_TIMEOUT_S = 60.0
# Shown in the run's summary next to the last value; the largest value of an alarm says if it was ever active.
HIGHEST, LOWEST = ("reward/mean", "eval/accuracy", "alarm/*"), ("policy/entropy", "mismatch/ess")
# Logged a second time under one prefix, because W&B makes one section of a workspace for each prefix.
# `deploy/wandb_overview.py` makes a report of them.
OVERVIEW = (
    "reward/mean", "eval/accuracy", "completions/length_mean", "policy/entropy", "policy/grad_norm",
    "mismatch/k3", "mismatch/ess", "staleness/mean", "weights/probe_max", "idle/learner", "time/step",
    "perf/learner_tokens_per_s", "perf/mfu", "weights/transfer_gb_per_s",
)  # fmt: skip


class WandbTracker:
    """A W&B run with our run's name, continued by a resume."""

    def __init__(
        self,
        *,
        mode: Literal["online", "offline"],
        project: str,
        name: str,
        run_id: str,
        directory: Path,
        config: Mapping[str, Any],
    ) -> None:
        """Open the run. W&B identifies it by `run_id` and keeps its own files in `directory`."""
        with from_extra("wandb"):
            import wandb

        if mode == "online" and not (os.environ.get("WANDB_API_KEY") or wandb.api.api_key):
            # Without this check, W&B would prompt on an unattended terminal.
            raise RuntimeError(
                "no W&B API key: run `wandb login`, set WANDB_API_KEY, or set telemetry.wandb to offline"
            )
        directory.mkdir(parents=True, exist_ok=True)
        self._wandb = wandb
        self._tables = SampleTables()
        self._run = wandb.init(
            mode=mode,
            project=project,
            name=name,
            id=run_id,
            resume="allow" if mode == "online" else None,
            dir=str(directory),
            config=dict(config),
            settings=wandb.Settings(init_timeout=INIT_TIMEOUT_S, silent=True, console="off"),
        )
        # W&B's own step can only grow, but ours goes back when a run resumes from a checkpoint.
        self._run.define_metric("*", step_metric="step")
        for best, names in (("max", HIGHEST), ("min", LOWEST)):
            for metric in names:
                self._run.define_metric(metric, step_metric="step", summary=f"last,{best}")

    def log(self, metrics: Mapping[str, float], *, step: int | None = None) -> None:
        """Log by step; without a step, by time."""
        numbers, histograms = split(metrics)
        shown = [name for name in OVERVIEW if name in numbers]
        overview = {f"overview/{name.replace('/', ' ')}": numbers[name] for name in shown}
        draw = self._wandb.Histogram
        drawn = {name: draw(np_histogram=(one.counts, one.edges)) for name, one in histograms.items()}
        self._run.log(numbers | overview | drawn | ({} if step is None else {"step": step}))

    def samples(self, records: Sequence[SampleRecord]) -> None:
        """Show rollouts as a table, every few steps."""
        if rows := self._tables.rows(records):
            table = self._wandb.Table(columns=list(COLUMNS), data=rows)
            self._run.log({"step": records[-1].step, f"samples/{records[-1].kind}": table})

    def close(self) -> None:
        """Upload what is pending and close the run."""
        self._run.finish()
