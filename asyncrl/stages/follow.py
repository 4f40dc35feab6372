"""What a stage shows while TRL trains: metrics, status, signs of progress; and signed checkpoints."""

import threading
import time
from dataclasses import replace
from typing import Any, Self

import torch
from torch import distributed
from transformers import TrainerCallback, TrainerControl, TrainerState

from asyncrl.best_effort import BestEffort
from asyncrl.buffer.run_record import key_id
from asyncrl.hosting.progress import Pace, beat, begin, doing
from asyncrl.run.checkpoint import CheckpointStore
from asyncrl.run.directory import RunDirectory
from asyncrl.stages.settings import StageConfig
from asyncrl.telemetry.fanout import Trackers, open_trackers
from asyncrl.telemetry.status import StatusSnapshot, write_status

EVERY_S = 1.0  # between two writes of the status
EVALUATION = "evaluate"  # the part before and after training


class Follow(TrainerCallback):  # type: ignore[misc]
    """Rank 0 reports for all. As a context manager it closes the trackers and shows the last state."""

    def __init__(
        self,
        config: StageConfig,
        directory: RunDirectory,
        store: CheckpointStore,
        stop: threading.Event,
        *,
        leads: bool,
    ) -> None:
        """`stop` is set when the stage is asked to save and leave; rank 0 `leads`."""
        self._directory, self._store, self._stop = directory, store, stop
        # A step of distillation samples whole answers.
        self._pace = Pace.SLOW if config.stage == "distil" else Pace.NORMAL
        self._may_fail, self._shown_at_s, self._logged = BestEffort(), 0.0, (0, time.monotonic())
        now = time.time()
        self._now = StatusSnapshot(
            run=config.run.name, state="starting", step=0, total_steps=0, version=0, started_at=now,
            updated_at=now, pid=0, ranks=config.ranks,
        )  # fmt: skip
        self._trackers: Trackers | None = None
        if leads:
            values, key = config.model_dump(mode="json"), key_id(directory.keys().join.record)
            step = max(directory.saved_steps(), default=0)
            self._trackers = open_trackers(
                config.telemetry, config.run.name, directory.path, values, key_id=key, step=step
            )

    def __enter__(self) -> Self:
        self._show(state="starting")
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        state = "finished" if error is None else "stopped" if isinstance(error, SystemExit) else "failed"
        said = {"finished": "the training is done", "stopped": "asked to stop"}
        self._show(state=state, message=said.get(state, str(error)))
        if self._trackers:
            self._trackers.close()

    def _show(self, **changes: Any) -> None:
        self._now = replace(self._now, **changes, updated_at=time.time(), doing=doing())
        is_due = time.monotonic() - self._shown_at_s >= EVERY_S or "state" in changes
        if self._trackers and is_due:
            self._shown_at_s = time.monotonic()
            with self._may_fail("the status"):
                write_status(self._directory.status, self._now)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        begin("train", self._pace)
        self._logged = state.global_step, time.monotonic()
        self._show(state="training", step=state.global_step, total_steps=state.max_steps)

    def on_substep_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        beat()

    def on_prediction_step(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Show progress of an evaluation. Before and after training it changes nothing to be saved."""
        beat()
        if self._stop.is_set() and doing() == EVALUATION:
            raise SystemExit(143)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Show progress, and let TRL save and leave if the ranks are asked to; then all do so together."""
        self._show(step=state.global_step)
        beat()
        asked = torch.tensor(float(self._stop.is_set()), device=args.device)
        if distributed.is_initialized():
            distributed.all_reduce(asked, distributed.ReduceOp.MAX)
        if asked:
            self._stop.set()
            control.should_save = control.should_training_stop = True

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Sign the checkpoint, once every rank has written its part, and only then remove older ones."""
        if not self._trackers:
            begin("train", self._pace)  # a rank that waits for one in a slow part does not count as silent
        if distributed.is_initialized():
            distributed.barrier()
        if self._trackers:
            self._store.keeps = lambda step: step == state.best_global_step
            self._store.seal(state.global_step)
        begin("train", self._pace)

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **_: Any
    ) -> None:
        """Pass TRL's numbers to the trackers, those of held-out rows as `eval/`, others as `train/`."""
        found = {
            f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}": value
            for name, value in logs.items()
            if not name.startswith("train_")  # a summary of the whole training is in no step
        }
        (before, at_s), now_s = self._logged, time.monotonic()
        if "train/loss" in found and state.global_step > before:
            found["time/step"] = (now_s - at_s) / (state.global_step - before)
            self._logged = state.global_step, now_s
        if self._trackers:
            self._trackers.log(found, step=state.global_step)
