"""The section `data` of a config."""

import re
from collections.abc import Mapping
from fractions import Fraction
from pathlib import PurePath
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, field_serializer, model_validator

from asyncrl.algo.ranges import Positive, PositiveInt
from asyncrl.config.base import Mistake, Mistakes, Part, marked
from asyncrl.config.resume import OTHER_RUN, refused

# Marks of keys, also in other sections.
PROMPT = marked(resume=(OTHER_RUN, "it is part of every prompt, so the run would have two tasks"))
TICKET = marked(resume=(OTHER_RUN, "it decides which prompt a ticket means"))
_ROWS = (
    OTHER_RUN,
    "its rows and their order decide which prompt a ticket means, so none may be appended either",
)


class CurriculumConfig(Part):
    """Skips prompts that the policy always or never solves."""

    floor: Annotated[
        Annotated[float, Field(gt=0, le=0.5)] | None, refused("it decides which prompt a ticket means")
    ] = None
    """Share of tickets that try a skipped prompt again; null skips nothing."""
    solved: float = 1.0
    """Reward from which a response counts as solved. A prompt is always solved if all responses of its newest
    group are, and never solved if all have one equal reward below this one."""


class DataSource(Part):
    """One of several sources of prompts. A text in place of the section is its `path`."""

    model_config = ConfigDict(json_schema_extra={"named_by": "path"})
    path: Annotated[str, marked(resume=_ROWS)]
    """Rows, in one of the forms of `data.train`."""
    weight: Annotated[Positive, TICKET] = 1.0
    """Part of the tickets that take their prompt from here, in proportion to the other weights."""
    limit: Annotated[PositiveInt | None, TICKET] = None
    """Most rows that are used, from the first one; null uses all."""
    system: Annotated[str | None, PROMPT] = None
    """System message of these prompts, in place of `data.system`."""
    name: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")] | None = None
    """Name of the source in metrics; by default that of its file, without suffixes."""

    @property
    def label(self) -> str:
        """The name under which the source is reported."""
        for part in reversed(PurePath(self.path.partition(":")[0]).parts):
            if found := re.sub(r"[^\w.-]", "", part.partition(".")[0]).strip("-_"):
                return self.name or found
        return self.name or "source"


def _as_sources(value: Any) -> Any:
    return ({"path": value},) if isinstance(value, str) else value


class DataConfig(Part):
    """Source of the prompts."""

    train: Annotated[
        tuple[DataSource, ...],
        Field(min_length=1, max_length=64),
        BeforeValidator(_as_sources, json_schema_input_type=str | tuple[DataSource, ...]),
        marked(stand_in="no/data", resume=_ROWS),
    ]
    """File (.jsonl, .json, .csv, .parquet, .jsonl.gz, .csv.gz), directory, Hugging Face dataset (`owner/name`
    or `owner/name:config`), or pattern of files (`data/part-*.jsonl`), read in the order of their names.
    `seeds:N` makes rows with a column `seed` from 0 to N - 1, for an environment that makes its tasks. A list
    mixes sources."""
    eval: str | None = None
    """Held-out prompts, in the same formats."""
    prompt_field: Annotated[str, PROMPT] = "prompt"
    """Column with the prompt: text, or a list of chat messages. The model continues a last one of the
    assistant."""
    template: Annotated[str | None, PROMPT] = None
    """Text with {column} placeholders that replaces `prompt_field`."""
    system: Annotated[str | None, PROMPT] = None
    """System message; needs `model.chat_template`."""
    images_key: Annotated[str | None, PROMPT] = None
    """Column with the images of a row: paths relative to the data file, or mappings with `bytes` or `path`.
    In messages, parts of type `image` say where they stand. Without such parts, images begin the first
    message of the user. Needs `model.chat_template`."""
    split: Annotated[str, TICKET] = "train"
    """Split of a Hugging Face dataset."""
    eval_split: str = "test"
    """Split of `eval`, if it is a Hugging Face dataset."""
    shuffle: Annotated[bool, TICKET] = True
    """True draws a new order for each epoch from `run.seed`."""
    long_prompts: Annotated[Literal["refuse", "drop", "truncate"], TICKET] = "refuse"
    """Prompts of more than `sampling.max_prompt_tokens` tokens: `refuse` ends the run before it begins,
    `drop` leaves out their rows, and `truncate` keeps their last tokens. The log counts them at the start."""
    curriculum: CurriculumConfig = CurriculumConfig()

    @property
    def shares(self) -> list[Fraction]:
        """The share of the tickets that each source has, exact for the weights as they are written."""
        weights = [Fraction(repr(source.weight)) for source in self.train]
        return [weight / sum(weights) for weight in weights]

    @property
    def places(self) -> Mapping[str, str]:
        """Key and value of everything that names rows."""
        several = len(self.train) > 1
        found = {f"data.train.{i}" if several else "data.train": one.path for i, one in enumerate(self.train)}
        return found | ({} if self.eval is None else {"data.eval": self.eval})

    def of(self, source: DataSource) -> Self:
        """Return the section with which the prompts of one source are read."""
        return self if source.system is None else self.model_copy(update={"system": source.system})

    @field_serializer("train")
    def _as_written(self, train: tuple[DataSource, ...]) -> Any:
        whole = train == (DataSource(path=train[0].path),)
        return train[0].path if whole else [source.model_dump(mode="json") for source in train]

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [source.label for source in self.train]
        if len(set(names)) < len(names):
            text = (
                f"the sources have the names {', '.join(names)}, which must differ; set `name` on one of them"
            )
            raise Mistakes(Mistake(("data.train",), text))
        return self
