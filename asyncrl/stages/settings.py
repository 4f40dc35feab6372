"""The config of a stage, and its mistakes that show without reading a row of data."""

import json
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, JsonValue, WithJsonSchema

from asyncrl.algo.ranges import PositiveInt
from asyncrl.config.base import Mistake, Part, Root, marked
from asyncrl.config.load import checked, read_draft
from asyncrl.config.model_files import Unusable, read_settings
from asyncrl.config.named_files import (
    data_problems,
    is_local,
    misused_stage,
    policy_problems,
    tracker_problems,
)
from asyncrl.config.resume import OTHER_RUN
from asyncrl.config.schema import OTHER_NAMES, RunConfig
from asyncrl.config.sections import ANY_SETTINGS, LoraConfig, ModelConfig, TelemetryConfig
from asyncrl.errors import ConfigError
from asyncrl.extras import install_command
from asyncrl.hosting.gpus import count_gpus
from asyncrl.lora import SETTINGS, require_usable
from asyncrl.stages.trl_settings import fields_of, trl_takes_the_settings


class StageData(Part):
    """The rows that a stage trains on, with the columns that TRL gives them (stages.md)."""

    train: Annotated[str, marked(stand_in="no/data")]
    """JSONL or parquet file, or Hugging Face dataset (`owner/name` or `owner/name:config`)."""
    eval: str | None = None
    """Held-out rows, in the same formats; measured before and after training."""
    split: str = "train"
    """Split of a Hugging Face dataset."""
    eval_split: str = "test"
    """Split of `eval`, if it is a Hugging Face dataset."""


class TeacherConfig(Part):
    """The model whose distribution a stage `distil` learns."""

    path: str
    """A Hugging Face directory or hub name; it must have the tokenizer of model.path."""
    revision: str | None = None
    """Hub revision."""


def _is_for_distil(stage: str, teacher: TeacherConfig | None) -> Iterator[Mistake]:
    if (stage == "distil") != (teacher is not None):
        found = (
            "is missing, and distil needs one; add teacher: {path: ...}" if teacher is None else "is given"
        )
        only = "" if teacher is None else f", but stage is {stage}, and only distil has a teacher; drop it"
        yield Mistake(("teacher", "stage"), f"teacher {found}{only}")


def _is_read(model: ModelConfig, telemetry: TelemetryConfig) -> Iterator[Mistake]:
    """Find settings that only a run with generators reads."""
    for section, part, names in (
        ("model", model, ("chat_template", "tool_parser", "reasoning_parser", "router_replay")),
        ("model.lora", model.lora or LoraConfig(), ("sync",)),
        ("telemetry", telemetry, ("prometheus_port", "samples_per_step")),
    ):
        for name in names:
            if getattr(part, name) != type(part).model_fields[name].default:
                key = f"{section}.{name}"
                yield Mistake((key,), f"{key} is for `asyncrl up`; a stage does not read it; drop it")


def _begins_with_an_adapter(stage: str, model: ModelConfig) -> Iterator[Mistake]:
    if stage == "rm" and model.lora and model.lora.start:
        text = "is the adapter of a language model, and stage rm trains a model of scores; drop it"
        yield Mistake(("model.lora.start", "stage"), f"model.lora.start {text}")


class StageConfig(Root):
    """One stage."""

    RULES = (trl_takes_the_settings, _is_for_distil, _is_read, _begins_with_an_adapter)
    OTHER_NAMES = {name: f"trl.{name}" for name in fields_of("dpo") or ()} | {
        name: key
        for name, key in OTHER_NAMES.items()
        if key.startswith(("run.", "model.", "data.", "telemetry."))
    }

    run: RunConfig
    stage: Annotated[
        Literal["sft", "rm", "dpo", "kto", "distil"],
        marked(stand_in="sft", resume=(OTHER_RUN, "it is what is trained")),
    ]
    """What is trained: answers (sft), scores (rm), preferences (dpo, kto), or a teacher's distribution."""
    model: ModelConfig
    data: StageData
    teacher: TeacherConfig | None = None
    trl: Annotated[
        dict[str, JsonValue],
        WithJsonSchema(ANY_SETTINGS),
        Field(default_factory=dict),
        marked(resume=(OTHER_RUN, "the order of the rows and the schedule of the steps follow from it")),
    ]
    """Fields of the stage's config class in TRL, such as `learning_rate`; stages.md has the refused ones."""
    ranks: Annotated[PositiveInt, marked(resume=(OTHER_RUN, "the rows of a step are divided among them"))] = 1
    """Processes, one GPU each, on this host; each holds the whole model."""
    telemetry: TelemetryConfig = TelemetryConfig()


def validated_stage(path: Path, overrides: Sequence[str] = ()) -> StageConfig:
    """Return the config after checking its files and libraries on this machine.

    Raises ConfigError, whose text lists every mistake with its line.
    """
    draft = read_draft(StageConfig, path, overrides)
    for mistake in _file_problems(draft.config) if draft.config else ():
        draft.add(mistake)
    return checked(draft)


def _file_problems(config: StageConfig) -> Iterator[Mistake]:
    if find_spec("trl") is None:
        yield Mistake(("stage",), f"found no package trl, which trains; run: {install_command('stages')}")
    yield from policy_problems(config.model)
    yield from data_problems(config.data.train, config.data.eval)
    yield from tracker_problems(config.telemetry)
    if config.model.lora and config.model.lora.start:
        yield from _start_problems(config.model.path, config.model.lora, config.model.lora.start)
    if config.teacher:
        yield from _teacher_problems(config.teacher, Path(config.model.path))
    if 0 < (gpus := count_gpus()) < config.ranks and not config.trl.get("use_cpu"):
        yield Mistake(("ranks",), f"found {config.ranks}, and this host has {gpus} GPUs; use at most {gpus}")


def _start_problems(path: str, lora: LoraConfig, start: Path) -> Iterator[Mistake]:
    found = "" if (start / SETTINGS).is_file() else misused_stage(start)
    try:
        require_usable(lora, path)
    except ConfigError as error:
        key, _, text = str(error).partition(": ")
        yield Mistake((key,), found or text)


def _teacher_problems(teacher: TeacherConfig, student: Path) -> Iterator[Mistake]:
    key, directory = "teacher.path", Path(teacher.path)
    if found := misused_stage(directory):
        yield Mistake((key,), found)
    elif not directory.is_dir() and is_local(teacher.path):
        yield Mistake((key,), f"found no {teacher.path}; give a Hugging Face directory or hub name")
    elif directory.is_dir() and student.is_dir() and (_words(directory) != _words(student)):
        text = f"found {teacher.path}, whose vocabulary is not that of {student}: their distributions"
        yield Mistake((key, "model.path"), f"{text} cannot be compared; give a teacher with its tokenizer")


def _words(model: Path) -> tuple[object, object]:
    """Return what must be the same in two models whose distributions are compared."""
    try:
        size = read_settings(model).get("vocab_size")
        return size, json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))["model"].get("vocab")
    except (Unusable, OSError, ValueError, KeyError):
        return None, None
