"""Weights & Biases, online or offline: one run, metrics by step, a table of samples now and then."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from asyncrl.telemetry.base import SampleRecord

COLUMNS = ("step", "kind", "prompt", "response", "reward", "parts", "advantage", "versions", "finish_reason", "generator_id")
INIT_TIMEOUT_S = 60.0


class WandbTracker:
    """A W&B run of the same name as ours; a resumed run goes on in it."""

    def __init__(
        self,
        *,
        mode: Literal["online", "offline"],
        project: str,
        name: str,
        directory: Path,
        config: Mapping[str, Any],
        samples_every: int = 10,
    ) -> None:
        """Open the run. `directory` gets W&B's own files; samples are shown every `samples_every` steps."""
        import wandb

        if mode == "online" and not (os.environ.get("WANDB_API_KEY") or wandb.api.api_key):
            # Without this, W&B would ask on a terminal that nobody looks at.
            raise RuntimeError("no W&B API key: run `wandb login`, set WANDB_API_KEY, or set telemetry.wandb to offline")
        directory.mkdir(parents=True, exist_ok=True)
        self._table = wandb.Table
        self._samples_every = samples_every
        self._shown_step = -samples_every
        self._run = wandb.init(
            mode=mode,
            project=project,
            name=name,
            id=name,
            resume="allow" if mode == "online" else None,
            dir=str(directory),
            config=dict(config),
            settings=wandb.Settings(init_timeout=INIT_TIMEOUT_S, silent=True, console="off"),
        )
        # Their own step only grows; ours goes back when a run resumes from a checkpoint.
        self._run.define_metric("*", step_metric="step")

    def log(self, metrics: Mapping[str, float], *, step: int | None = None) -> None:
        """Log by step; without a step, by time."""
        self._run.log(dict(metrics) if step is None else {"step": step, **metrics})

    def samples(self, records: Sequence[SampleRecord]) -> None:
        """Show rollouts as a table, at most every `samples_every` steps."""
        if not records or records[0].step - self._shown_step < self._samples_every:
            return
        self._shown_step = records[0].step
        rows = [[_cell(getattr(record, column)) for column in COLUMNS] for record in records]
        self._run.log({"step": records[0].step, "samples": self._table(columns=list(COLUMNS), data=rows)})

    def close(self) -> None:
        """Upload what is left."""
        self._run.finish()


def _cell(value: Any) -> str | int | float:
    return value if isinstance(value, (str, int, float)) else str(value)
