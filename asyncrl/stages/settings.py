"""The config of a stage, and its mistakes that show without reading a row of data."""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, JsonValue, WithJsonSchema

from asyncrl.algo.ranges import PositiveInt
from asyncrl.config import named_files
from asyncrl.config.algorithm import ANY_SETTINGS, ReferenceConfig
from asyncrl.config.base import OTHER_RUN, Mistake, Part, Root, broken, marked
from asyncrl.config.load import checked, read_draft
from asyncrl.config.model_files import Unusable, read_settings
from asyncrl.config.run_fields import RunConfig
from asyncrl.config.schema import OTHER_NAMES
from asyncrl.config.sections import LoraConfig, ModelConfig, TelemetryConfig
from asyncrl.errors import ConfigError, install_command
from asyncrl.hosting.gpus import count_gpus
from asyncrl.lora import SETTINGS, require_usable
from asyncrl.stages.trl_settings import fields_of, trl_takes_the_settings

_ROWS = (OTHER_RUN, "the stage is measured on and trains on these rows")


class StageData(Part):
    """The rows that a stage trains on, with the columns that TRL gives them (stages.md)."""

    train: Annotated[str, marked(stand_in="no/data", resume=_ROWS)]
    """File or pattern of files, as in `data.train` of a run, or Hugging Face dataset (`owner/name` or
    `owner/name:config`)."""
    eval: Annotated[str | None, marked(resume=_ROWS)] = None
    """Held-out rows, in the same formats; measured before and after training."""
    split: str = "train"
    """Split of a Hugging Face dataset."""
    eval_split: str = "test"
    """Split of `eval`, if it is a Hugging Face dataset."""


def _is_for_the_stage(config: "StageConfig") -> Iterator[Mistake]:
    """Find a teacher, an adapter, and settings of TRL that another stage has."""
    stage, lora = config.stage, config.model.lora
    if stage == "distil" and (config.teacher is None or config.teacher.path is None):
        key = "teacher" if config.teacher is None else "teacher.path"
        text = f"{key} is missing, and distil needs one; add teacher: {{path: ...}}"
        yield broken(f"{key} stage", text)
    elif stage != "distil" and config.teacher is not None:
        text = f"teacher is given, but stage is {stage}, and only distil has a teacher; drop it"
        yield broken("teacher stage", text)
    if stage == "rm" and lora and lora.start:
        text = "is the adapter of a language model, and stage rm trains a model of scores; drop it (in a"
        cure = "pipeline: drop model.lora of the stage before, or rm, which may be trained by itself)"
        yield broken("model.lora.start stage", f"model.lora.start {text} {cure}")
    yield from trl_takes_the_settings(stage, config.trl)


def _is_read(config: "StageConfig") -> Iterator[Mistake]:
    """Find settings that only a run with generators reads."""
    for section, part, names in (
        ("model", config.model, ("chat_template", "tool_parser", "reasoning_parser", "router_replay")),
        ("model.lora", config.model.lora or LoraConfig(), ("sync", "load_in_4bit")),
        ("teacher", config.teacher or ReferenceConfig(), ("template", "scorers", "gpus")),
        ("telemetry", config.telemetry, ("prometheus_port", "samples_per_step")),
    ):
        for name in names:
            if getattr(part, name) != type(part).model_fields[name].default:
                key = f"{section}.{name}"
                yield broken(key, f"{key} is for `asyncrl up`; a stage does not read it; drop it")


class StageConfig(Root):
    """One stage."""

    RULES = (_is_for_the_stage, _is_read)
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
    teacher: ReferenceConfig | None = None
    """The model whose distribution a stage `distil` learns; it must have the tokenizer of model.path."""
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
    from asyncrl.run.saved import moved  # heavy libraries, which a run's validation need not load

    draft = read_draft(StageConfig, path, overrides)
    if (config := draft.config) is not None:
        for mistake in (*_file_problems(config), *moved(path, config.run, draft.root)):
            draft.add(mistake)
    return checked(draft)


def _file_problems(config: StageConfig) -> Iterator[Mistake]:
    if find_spec("trl") is None:
        yield Mistake(("stage",), f"found no package trl, which trains; run: {install_command('stages')}")
    yield from named_files.policy_problems(config.model)
    yield from named_files.data_problems({"data.train": config.data.train, "data.eval": config.data.eval})
    yield from named_files.tracker_problems(config.telemetry)
    if (lora := config.model.lora) and lora.start:
        found = "" if (lora.start / SETTINGS).is_file() else named_files.misused_stage(lora.start)
        try:
            require_usable(lora, config.model.path)
        except ConfigError as error:
            key, _, text = str(error).partition(": ")
            yield Mistake((key,), found or text)
    if (teacher := config.teacher) and teacher.path is not None:
        for keys, text in named_files.policy_problems(
            ModelConfig(path=teacher.path, revision=teacher.revision)
        ):
            if keys == ("model.path",):
                yield Mistake(("teacher.path",), text)
        words, ours = _words(teacher.path), _words(config.model.path)
        if None not in (words, ours) and words != ours:
            text = f"found {teacher.path}, whose vocabulary is not that of {config.model.path}: their"
            text += " distributions cannot be compared; give another teacher"
            yield Mistake(("teacher.path", "model.path"), text)
    if 0 < (gpus := count_gpus()) < config.ranks and not config.trl.get("use_cpu"):
        yield Mistake(("ranks",), f"found {config.ranks}, and this host has {gpus} GPUs; use at most {gpus}")


def _words(model: str) -> tuple[object, object] | None:
    """Return what must be the same where distributions are compared; None if unknown."""
    try:
        size, words = read_settings(Path(model)).get("vocab_size"), named_files.vocabulary(Path(model))
    except Unusable:
        return None
    return (size, words) if any(words) else None
