"""The section `data` of a config."""

from typing import Annotated

from pydantic import Field

from asyncrl.config.base import Part, marked
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


class DataConfig(Part):
    """Source of the prompts."""

    train: Annotated[str, marked(stand_in="no/data", resume=_ROWS)]
    """File (.jsonl, .json, .csv, .parquet, .jsonl.gz, .csv.gz), directory, Hugging Face dataset (`owner/name`
    or `owner/name:config`), or pattern of files (`data/part-*.jsonl`), read in the order of their names.
    `seeds:N` makes rows with a column `seed` from 0 to N - 1, for an environment that makes its tasks."""
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
    curriculum: CurriculumConfig = CurriculumConfig()
