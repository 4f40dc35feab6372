"""RUN/stage.json: what a stage was begun with, its measures before and after, and the model that it made."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.config.load import panel
from asyncrl.config.outline import resume_findings
from asyncrl.errors import ConfigError
from asyncrl.files import read_record, replace_text
from asyncrl.run.directory import RunDirectory, first_weights
from asyncrl.stages.settings import StageConfig


def read_stage(directory: RunDirectory) -> dict[str, Any]:
    """Return the record; empty before the stage is begun."""
    return read_record(directory.stage) or {}


def write_stage(directory: RunDirectory, **values: Any) -> None:
    """Add values to the record. Raises OSError."""
    text = json.dumps(read_stage(directory) | values, indent=1)
    replace_text(directory.stage, text, durable=True)


def is_finished(directory: RunDirectory) -> bool:
    """Whether the stage has made its model."""
    return bool(read_stage(directory).get("finished")) and directory.model.is_dir()


def digest_of(model: Path) -> str:
    """Return a digest of a model's weights. Raises OSError."""
    digest = hashlib.sha256()
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def begin_stage(config: StageConfig, directory: RunDirectory, fixed: Mapping[str, Any]) -> None:
    """Record what the stage is begun with, unless it was begun before."""
    if not read_stage(directory):
        made = first_weights(config.model)[1]
        write_stage(directory, stage=config.stage, finished=False, fixed=fixed, begins_with=made)


def refuse_changed_stage(config: StageConfig, directory: RunDirectory, fixed: Mapping[str, Any]) -> None:
    """Raise ConfigError with what has changed since the stage was begun: settings, rows, its first model."""
    if not (begun := read_stage(directory)):
        return
    findings = resume_findings(StageConfig, begun["fixed"], fixed, weights=str(directory.model))
    found = [f"{keys[0]}: {text}" for keys, text in findings]
    path, digest = first_weights(config.model)
    if not found and digest != begun["begins_with"]:
        then = f"a stage there made other weights (digest {digest}) than this one began with"
        cure = f"remove {directory.path}, and the same command trains it from the new ones"
        found.append(f"{path}: {then} ({begun['begins_with']}); {cure}")
    if found:
        raise ConfigError(panel(found, title=f"the config with which {directory.path} is to be resumed"))
