"""What a learner resumes from, and checks before that: may the config go on, and are steps left to train?"""

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from asyncrl.buffer.store_data import DATA
from asyncrl.config.base import Mistake
from asyncrl.config.document import Node
from asyncrl.config.load import panel
from asyncrl.config.named_files import EXPORT
from asyncrl.config.outline import resume_findings
from asyncrl.config.run_fields import RunConfig
from asyncrl.config.schema import Config
from asyncrl.data.data_files import DataFiles
from asyncrl.errors import ConfigError, DataError, RunError
from asyncrl.lineage import INITIAL, History
from asyncrl.run.best import read_ended, why_ended
from asyncrl.run.checkpoint import CheckpointStore, Saveable
from asyncrl.run.directory import BEGAN_WITH, RunDirectory, first_weights, needing
from asyncrl.run.lock import RunLock
from asyncrl.telemetry.status import read_status

# Lineages are drawn: a learner cannot know how many learners died before it without a checkpoint.
MAX_LINEAGE = (1 << 32) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerState:
    """Everything that the learner needs to continue from a checkpoint."""

    version: int = 0
    ledger: Mapping[str, Any] = field(default_factory=dict)  # `settled` of the training lane's intake
    history: History = INITIAL  # lineages of the weights
    evaluation: dict[str, Any] = field(default_factory=dict)  # `Evaluation.state` of each set by its name
    # Values that must not change: `Config.fixed_values`, and `BEGAN_WITH`.
    fixed: dict[str, Any] = field(default_factory=dict)
    coefficients: dict[str, float] = field(default_factory=dict)  # adaptive coefficients of KL and entropy
    curriculum: dict[str, Any] = field(default_factory=dict)  # `Curricula.state`; empty without one
    tracker: dict[str, list[float]] = field(default_factory=dict)  # `Tracker.state`; empty without one
    stop: dict[str, Any] = field(default_factory=dict)  # `Record` of `learner.stop_when`; empty without one

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for the checkpoint's JSON."""
        return {each.name: getattr(self, each.name) for each in fields(self)} | {"history": str(self.history)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The inverse of `to_dict`; an empty dict is the beginning."""
        if not values:
            return cls()
        # A checkpoint of an earlier release has no curriculum, tracker or record.
        found = {each.name: values[each.name] for each in fields(cls) if each.name in values}
        return cls(**found | {"history": History.parse(values["history"])})

    def begun(self, config: Config, *, rows: str) -> Self:
        """Return the state with which a learner continues: with a lineage of its own, and this config."""
        history = self.history.resumed(
            self.version, lineage=secrets.randbelow(MAX_LINEAGE) + 1, longest_lag=config.lag_bound
        )
        fixed = config.fixed_values(rows=rows) | {BEGAN_WITH: first_weights(config.model)[1]}
        return replace(self, history=history, fixed=fixed)


def resume(
    config: Config, directory: RunDirectory, trainer: Saveable
) -> tuple[CheckpointStore, LearnerState]:
    """Load the newest checkpoint into the trainer, if there is one. Raises CheckpointError."""
    checkpoints = CheckpointStore(directory.checkpoints, directory.checkpoint_key(), config.checkpoint.keep)
    return checkpoints, LearnerState.from_dict(checkpoints.load(trainer) or {})


class Saved(NamedTuple):
    """The newest checkpoint of a run."""

    path: Path
    state: dict[str, Any]
    is_exported: bool  # whether its Hugging Face model is written


def read_saved(directory: RunDirectory) -> Saved | None:
    """Return the newest checkpoint; None before the first one."""
    with needing(directory.path):
        # Without the secret no checkpoint can be verified; `up` reports that if there are any.
        if not os.path.lexists(directory.secret_path):
            return None
        checkpoints = CheckpointStore(directory.checkpoints, directory.checkpoint_key(), keep=1)
        newest = checkpoints.newest_state()
        return Saved(*newest, checkpoints.is_exported(newest[1]["version"])) if newest else None


def go_back(directory: RunDirectory, step: int) -> None:
    """Set the checkpoints after `step` aside, and drop the store with its many ids. Raises RunError."""
    if step not in (kept := directory.saved_steps()):
        found = ", ".join(map(str, sorted(kept))) or "none"
        text = f"{directory.checkpoints} has no checkpoint of step {step}; it has {found}"
        raise RunError(f"{text} (checkpoint.keep, checkpoint.keep_every)")
    with needing(directory.path), RunLock(directory.supervisor_lock):
        CheckpointStore(directory.checkpoints, directory.checkpoint_key(), keep=1).go_back(step)
        shutil.rmtree(directory.store / DATA, ignore_errors=True)


def changes(config: Config, saved: Saved | None, data: DataFiles) -> Iterator[Mistake]:
    """Find changes of the config or its data files that a resume does not allow."""
    if saved is None:
        return
    fixed = saved.state["fixed"]
    try:
        rows = data.train
    except DataError as error:
        rows = fixed["data.train"]
        yield Mistake(("data.train",), str(error))
    weights = str(saved.path / EXPORT)
    if fixed.get("model.lora.rank"):
        weights = "DIRECTORY of `asyncrl export --merge`"
    _, made = first_weights(config.model)
    if fixed.get(BEGAN_WITH, made) != made:
        found = "the stage there was trained again, and made other weights than this run began with"
        yield Mistake(("model.path",), f"{found}; begin another run (another run.name, or --fresh)")
    yield from resume_findings(Config, fixed, config.fixed_values(rows=rows), weights=weights)


def refuse_changes(config: Config, directory: RunDirectory, saved: Saved | None, data: DataFiles) -> None:
    """Raise ConfigError with all changes that a resume does not allow."""
    if found := [f"{keys[0]}: {text}" for keys, text in changes(config, saved, data)]:
        raise ConfigError(panel(found, title=f"the config with which {directory.path} is to be resumed"))


def nothing_left(config: Config, directory: RunDirectory, saved: Saved | None) -> str:
    """Say why no step is left; empty if one, an export or an evaluation may be left. Raises DataError."""
    if saved and not saved.is_exported:
        return ""
    trained, steps = saved.state["version"] if saved else 0, config.learner.steps
    stop, ended = config.learner.stop_when, read_ended(directory.checkpoints, trained)
    asked = DataFiles(config).asked(stop.metric) if stop and ended else ""
    status = read_status(directory.status)
    is_evaluated = not config.data.eval or (status is not None and status.state == "finished")
    if is_evaluated and (why := why_ended(stop, ended, asked)):
        return (
            f"{directory.path} has ended after step {trained}: {why}. Another learner.stop_when, or none, "
            "goes on; --fresh begins again"
        )
    if trained < steps or (trained == steps and not is_evaluated):
        return ""
    return (
        f"{directory.path} has trained {trained} steps, and learner.steps is {steps}: nothing is left to do. "
        f"A higher learner.steps goes on, such as learner.steps={2 * trained}; --fresh begins again"
    )


def moved(path: Path, run: RunConfig, root: Node) -> Iterator[Mistake]:
    """Report a config whose run directory has moved, so that it would begin another run, or stage."""
    found, meant = path.parent.resolve(), run.directory.resolve()
    is_asked_for = any(root.nearest(("run", key)).place.startswith("override") for key in ("name", "root"))
    if path.name != "config.yaml" or not (found / "checkpoints").is_dir() or found == meant or is_asked_for:
        return
    cure = f"set run.root={found.parent}"
    if found.name != run.name:
        cure = f"give the directory its name back ({found.with_name(run.name)}) and {cure}"
    yield Mistake(
        ("run.root",),
        f"found the config of the run in {found}, but with run.name it leads to {meant}, which would be "
        f"another run; to go on with the one in {found.name}, {cure}; to begin another one, give run.name "
        "as an override",
    )
