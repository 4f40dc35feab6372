"""Stages in order, and at their end a run of `asyncrl up`: each begins with the model of the one before."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from asyncrl.config.base import Mistake, Root
from asyncrl.config.load import checked, load, read_draft
from asyncrl.config.named_files import is_stage
from asyncrl.config.resolved import dump_values
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.run.directory import RunDirectory
from asyncrl.stages.settings import StageConfig


class PipelineConfig(Root):
    """A pipeline."""

    pipeline: Annotated[tuple[str, ...], Field(min_length=1)]
    """Configs of stages in order, relative to this file; the last one may be that of a run."""


@dataclass(frozen=True, slots=True)
class Link:
    """A part of a pipeline, and what it takes from those before it."""

    file: Path
    is_stage: bool
    overrides: list[str]


def planned(path: Path, overrides: Sequence[str] = ()) -> list[Link]:
    """Check all configs, but no files that earlier parts make; return the parts. Raises ConfigError."""
    draft = read_draft(PipelineConfig, path, overrides)
    files = [path.parent / name for name in draft.config.pipeline] if draft.config else []
    for index, file in enumerate(files):
        if not file.is_file():
            text = f"found no {file}; give the configs relative to {path.parent}"
            draft.add(Mistake((f"pipeline.{index}",), text))
    checked(draft)
    links, given, directories = list[Link](), list[str](), set[Path]()
    for file in files:
        link = Link(file, is_stage(file), given)
        kind: type[StageConfig | Config] = StageConfig if link.is_stage else Config
        config = load(kind, file, link.overrides)
        directory = RunDirectory(config.run.directory)
        if links and not links[-1].is_stage:
            text = f"{links[-1].file} is no stage; only the last of a pipeline may be a run"
            raise ConfigError(f"{path}: {text}")
        if directory.path in directories:
            raise ConfigError(f"{path}: two parts have the run directory {directory.path}; set run.name")
        directories.add(directory.path)
        links.append(link)
        if isinstance(config, StageConfig) and config.stage != "rm":  # scores are no policy to go on with
            given = _handed_on(config)
    return links


def _handed_on(config: StageConfig) -> list[str]:
    """Return the overrides with which the next part begins where this stage ends."""
    model, made = config.model, RunDirectory(config.run.directory).model
    found: dict[str, Any] = {"model.path": str(made), "model.revision": None}
    if model.lora is not None:
        lora = model.lora.model_dump(mode="json", exclude={"sync", "load_in_4bit"}) | {"start": str(made)}
        found = {"model.path": model.path, "model.revision": model.revision, "model.lora": lora}
    return [f"{key}={dump_values(value, in_a_line=True)}" for key, value in found.items()]
