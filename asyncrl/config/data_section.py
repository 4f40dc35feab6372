"""The section `data` of a config."""

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import PurePath
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, field_serializer

from asyncrl.algo.ranges import Positive, PositiveInt, Samples
from asyncrl.config.base import OTHER_RUN, Part, marked, refused
from asyncrl.config.environment_section import EnvironmentConfig
from asyncrl.config.reward_section import Functions

# Marks of keys, also in other sections.
PROMPT = marked(resume=(OTHER_RUN, "it is part of every prompt"))
TICKET = marked(resume=(OTHER_RUN, "it decides which prompt a ticket means"))
_ROWS = (
    OTHER_RUN,
    "its rows and their order decide which prompt a ticket means, so none may be appended either",
)
MOST_VOTES = 64  # largest k of maj@k, except for the number of all samples: the cost grows faster than k


class CurriculumConfig(Part):
    """Skips prompts that the policy always or never solves."""

    floor: Annotated[
        Annotated[float, Field(gt=0, le=0.5)] | None, refused("it decides which prompt a ticket means")
    ] = None
    """Share of tickets that retry a skipped prompt; null skips nothing."""
    solved: float = 1.0
    """Reward from which a response counts as solved."""


class Task(Part):
    """Rows with a name, and how responses to their prompts are scored and played."""

    model_config = ConfigDict(json_schema_extra={"named_by": "path"})
    path: str
    """Rows, as in `data.train`."""
    system: str | None = None
    """`data.system` of these prompts."""
    filter: str | None = None
    """`data.filter` of these rows."""
    map: str | None = None
    """`data.map` of these rows."""
    name: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")] | None = None
    """Name in metrics; by default the file's."""
    reward: Functions | None = None
    """`reward.functions` of these prompts."""
    environment: EnvironmentConfig | None = None
    """Keys of `environment` that differ; `{uses: []}` plays single responses."""

    @property
    def label(self) -> str:
        """The name under which the rows are reported."""
        for part in reversed(PurePath(self.path.partition(":")[0]).parts):
            if found := re.sub(r"[^\w.-]", "", part.partition(".")[0]).strip("-_"):
                return self.name or found
        return self.name or "source"

    @field_serializer("environment")
    def _as_given(self, environment: EnvironmentConfig | None) -> Any:
        return environment and environment.model_dump(mode="json", exclude_unset=True)


class DataSource(Task):
    """One of several sources of prompts. A text is its `path`; null takes the key that the row names."""

    path: Annotated[str, marked(resume=_ROWS)]
    """Rows, as in `data.train`."""
    weight: Annotated[Positive, TICKET] = 1.0
    """Relative share of the tickets."""
    limit: Annotated[PositiveInt | None, TICKET] = None
    """Most rows used, from the first; null uses all."""
    system: Annotated[str | None, PROMPT] = None
    """`data.system` of these prompts."""


class EvalSet(Task):
    """One of several sets of held-out prompts. A text is its `path`; null takes the key that the row
    names."""

    split: str | None = None
    """`data.eval_split` of this set."""
    limit: PositiveInt | None = None
    """`eval.prompts` of this set."""
    every: PositiveInt | None = None
    """`eval.every` of this set."""
    samples: Samples | None = None
    """`eval.samples` of this set."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """`eval.temperature` of this set."""


def _as_sources(value: Any) -> Any:
    return ({"path": value},) if isinstance(value, str) else value


def prefix_of(name: str) -> str:
    """Return how the metrics of an evaluation set begin; "" is the name of the only set."""
    return f"eval/{name}/" if name else "eval/"


def error_of(metric: str) -> str:
    """Return the name of the standard error of a metric of an evaluation."""
    kind, _, name = metric.rpartition("/")
    return f"{kind}/se/{name}"


def drawn(samples: int) -> dict[str, list[int]]:
    """Return each k of pass@k, best@k and maj@k of so many samples of a prompt."""
    best = [k for k in range(2, samples + 1) if k == samples or k.bit_count() == 1]
    # A majority of two is a coin toss.
    votes = [k for k in best if k > 2 and (k <= MOST_VOTES or k == samples)]
    return {"pass": [samples], "best": best, "maj": votes}


class DataConfig(Part):
    """Source of the prompts."""

    train: Annotated[
        tuple[DataSource, ...],
        Field(min_length=1, max_length=64),
        BeforeValidator(_as_sources, json_schema_input_type=str | tuple[DataSource, ...]),
        marked(stand_in="no/data", resume=_ROWS),
    ]
    """File (.jsonl, .json, .csv, .parquet, .jsonl.gz, .csv.gz), pattern of files (`data/part-*.jsonl`),
    directory (of which Hugging Face reads files of one format, by names of splits; `data/*` is every file),
    or Hugging Face dataset: `owner/name`, `owner/name:config` or `owner/name@revision`. `seeds:N` makes rows
    with a column `seed` from 0 to N - 1, for an environment that makes its tasks. A list mixes sources."""
    eval: Annotated[
        tuple[EvalSet, ...],
        Field(max_length=64),
        BeforeValidator(
            lambda value: _as_sources(value) or (), json_schema_input_type=str | tuple[EvalSet, ...] | None
        ),
    ] = ()
    """Held-out prompts, in the same formats, or a list of sets."""
    prompt_field: Annotated[str, PROMPT] = "prompt"
    """Column with the prompt: text, or chat messages in OpenAI's form or ShareGPT's."""
    last_answer: Annotated[Literal["take", "continue"], PROMPT] = "take"
    """An assistant's last message: `take` takes it off the prompt, as the column `answer` if the row has
    none; `continue` lets the model continue it."""
    template: Annotated[str | None, PROMPT] = None
    """Text with {column} placeholders, in place of `prompt_field`."""
    system: Annotated[str | None, PROMPT] = None
    """System message; needs `model.chat_template`."""
    images_key: Annotated[str | None, PROMPT] = None
    """Column with images: paths relative to the data file or directory, or mappings with `bytes` or `path`;
    needs `model.chat_template`."""
    filter: str | None = None
    """Function of a row (`path.py:function` or `module:function`); True keeps the row."""
    map: str | None = None
    """Function that returns the row in place of a kept one."""
    split: Annotated[str, TICKET] = "train"
    """Split of a Hugging Face dataset, or a slice such as `train[:1000]`."""
    eval_split: str = "test"
    """Split of `eval`, if it is a Hugging Face dataset."""
    shuffle: Annotated[bool, TICKET] = True
    """True draws a new order for each epoch from `run.seed`."""
    long_prompts: Annotated[Literal["refuse", "drop", "truncate"], TICKET] = "refuse"
    """Prompts above `sampling.max_prompt_tokens`: `refuse` does not start the run, `drop` leaves out their
    rows, `truncate` keeps their last tokens."""
    curriculum: CurriculumConfig = CurriculumConfig()

    @property
    def shares(self) -> list[Fraction]:
        """The share of the tickets that each source has, exact for the weights as they are written."""
        weights = [Fraction(repr(source.weight)) for source in self.train]
        return [weight / sum(weights) for weight in weights]

    @property
    def tasks(self) -> Mapping[str, DataSource | EvalSet]:
        """Every source of data.train, and then every set of data.eval, by its key."""
        lists: dict[str, Sequence[DataSource | EvalSet]] = {"data.train": self.train, "data.eval": self.eval}
        return {
            key if _is_plain(parts) else f"{key}.{i}": one
            for key, parts in lists.items()
            for i, one in enumerate(parts)
        }

    @property
    def functions(self) -> dict[str, str]:
        """Key and name of every function that chooses or makes rows."""
        owners: dict[str, Part] = {"data": self, **self.tasks}
        named = {f"{at}.{key}": getattr(one, key) for at, one in owners.items() for key in ("filter", "map")}
        return {key: name for key, name in named.items() if name is not None}

    @property
    def sets(self) -> Mapping[str, EvalSet]:
        """The sets of data.eval by name, which is "" for the only one if it has none."""
        return {"" if len(self.eval) == 1 and not one.name else one.label: one for one in self.eval}

    def set_of(self, metric: str) -> EvalSet | None:
        """Return the set that has a metric."""
        return next((one for name, one in self.sets.items() if metric.startswith(prefix_of(name))), None)

    def split_of(self, task: DataSource | EvalSet) -> str:
        """Return the split from which the rows of a task are read."""
        return self.split if isinstance(task, DataSource) else task.split or self.eval_split

    def of(self, task: DataSource | EvalSet) -> Self:
        """Return the section with which the prompts of a task are read."""
        own = {key: getattr(task, key) for key in ("system", "filter", "map")}
        return self.model_copy(update={key: value for key, value in own.items() if value is not None})

    @field_serializer("train", "eval")
    def _as_written(self, parts: tuple[DataSource | EvalSet, ...]) -> Any:
        if _is_plain(parts):
            return parts[0].path
        return [one.model_dump(mode="json") for one in parts] or None


def _is_plain(parts: Sequence[DataSource | EvalSet]) -> bool:
    """Whether the only part is given by its path alone."""
    return len(parts) == 1 and parts[0] == type(parts[0])(path=parts[0].path)
