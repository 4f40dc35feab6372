"""RUN/stage.json: what a stage was begun with, its measures before and after, whether it is finished."""

import json
from collections.abc import Mapping
from typing import Any

from asyncrl.config.report import panel
from asyncrl.config.resume import kept_values, resume_findings
from asyncrl.errors import ConfigError
from asyncrl.files import read_record, replace_text
from asyncrl.run.directory import RunDirectory
from asyncrl.stages.settings import StageConfig


def read_stage(directory: RunDirectory) -> dict[str, Any]:
    """Return the record; empty before the stage is begun."""
    return read_record(directory.stage) or {}


def is_finished(directory: RunDirectory) -> bool:
    """Whether the stage has made its model."""
    return bool(read_stage(directory).get("finished")) and directory.model.is_dir()


def write_stage(directory: RunDirectory, **values: Any) -> None:
    """Add values to the record. Raises OSError."""
    text = json.dumps(read_stage(directory) | values, indent=1)
    replace_text(directory.stage, text, durable=True)


def refuse_changed_stage(config: StageConfig, directory: RunDirectory, rows: Mapping[str, str]) -> None:
    """Raise ConfigError with all that has changed since the stage was begun: its settings and its rows."""
    begun = read_stage(directory)
    if not begun:
        return
    findings = resume_findings(StageConfig, begun["fixed"], kept_values(config), weights=str(directory.model))
    found = [f"{keys[0]}: {text}" for keys, text in findings]
    for key in sorted(rows.keys() | begun["data"].keys()):
        if (now := rows.get(key)) != (then := begun["data"].get(key)):
            cure = "restore the file, give another run.name, or delete this one by --fresh"
            found.append(f"data.{key}: found {now}; the stage was begun with {then}; {cure}")
    if found:
        raise ConfigError(panel(found, title=f"the config with which {directory.path} is to be resumed"))


def begin_stage(config: StageConfig, directory: RunDirectory, rows: Mapping[str, str]) -> None:
    """Record what the stage is begun with, unless it was begun before."""
    if not read_stage(directory):
        write_stage(directory, stage=config.stage, finished=False, data=dict(rows), fixed=kept_values(config))
