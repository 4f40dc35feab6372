"""Looking at a run before it is resumed: whether its config may go on with it, and whether anything is left to do."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.config.base import Mistake
from asyncrl.config.document import Node
from asyncrl.config.report import panel
from asyncrl.config.resume import fixed_values, resume_findings
from asyncrl.config.schema import Config
from asyncrl.data.dataset import DataFiles
from asyncrl.errors import ConfigError, DataError
from asyncrl.run.checkpoint import EXPORT, CheckpointStore
from asyncrl.run.directory import RunDirectory, needing
from asyncrl.telemetry.status import read_status


class Saved(NamedTuple):
    """The newest checkpoint of a run."""

    path: Path
    state: dict[str, Any]


def read_saved(directory: RunDirectory) -> Saved | None:
    """None before the first checkpoint: such a run begins from the start."""
    with needing(directory.path):
        if not os.path.lexists(directory.secret_path):  # nothing can be verified, and `up` says so where something was saved
            return None
        newest = CheckpointStore(directory.checkpoints, directory.checkpoint_key(), keep=1).newest_state()
        return Saved(*newest) if newest else None


def changes(config: Config, saved: Saved | None, data: DataFiles) -> Iterator[Mistake]:
    """What the config, or the file that it names, has changed that had to stay. `data` are the config's files."""
    if saved is None:
        return
    fixed = saved.state["fixed"]
    try:
        rows = data.train
    except DataError as error:
        rows = fixed["data.train"]
        yield Mistake(("data.train",), str(error))
    yield from resume_findings(fixed, fixed_values(config, rows=rows), weights=saved.path / EXPORT)


def refuse_changes(config: Config, directory: RunDirectory, saved: Saved | None, data: DataFiles) -> None:
    """Raises ConfigError with all `changes`."""
    if found := [f"{keys[0]}: {text}" for keys, text in changes(config, saved, data)]:
        raise ConfigError(panel(found, title=f"the config with which {directory.path} is to be resumed"))


def nothing_left(config: Config, directory: RunDirectory, saved: Saved | None) -> str:
    """Why there is nothing to train; empty when there is something, or the last weights may have to be evaluated yet."""
    trained, steps = saved.state["version"] if saved else 0, config.learner.steps
    status = read_status(directory.status)
    is_evaluated = config.data.eval is None or (status is not None and status.state == "finished")
    if trained < steps or (trained == steps and not is_evaluated):
        return ""
    return (
        f"{directory.path} has trained {trained} steps, and learner.steps is {steps}: nothing is left to do. "
        f"A higher learner.steps goes on, such as learner.steps={2 * trained}; --fresh begins again"
    )


def moved(path: Path, config: Config, root: Node) -> Iterator[Mistake]:
    """When `path` is the config of a run that its own run.root and run.name do not lead to: with it, another run would begin."""
    found, meant = path.parent.resolve(), config.run.directory.resolve()
    is_asked_for = any(root.nearest(("run", key)).place.startswith("override") for key in ("name", "root"))
    if path.name != "config.yaml" or not (found / "checkpoints").is_dir() or found == meant or is_asked_for:
        return
    cure = f"set run.root={found.parent}"
    if found.name != config.run.name:
        cure = f"give the directory its name back ({found.with_name(config.run.name)}) and {cure}"
    yield Mistake(
        ("run.root",),
        f"found the config of the run in {found}, but with run.name it leads to {meant}, which would be another run; to go on "
        f"with the one in {found.name}, {cure}; to begin another one, give run.name as an override",
    )
