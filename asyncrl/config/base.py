"""Base classes of the configuration's models, and the type of a mistake in a config."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from itertools import chain
from typing import Annotated, Any, ClassVar, NamedTuple, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    JsonValue,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue

# The path to a value: keys of sections and indices of lists.
Keys = tuple[str | int, ...]
# Context of a validation that checks each section, but not whether they agree.
SECTIONS_ONLY = "sections only"
LARGEST = 1 << 53
# Marks of a key that must not change when a run is resumed. The key defines the run: with another value it is
# another run.
OTHER_RUN = "another run"
# The weights would fit the new value, but other parts of the checkpoint would not.
REFUSED = "refused"


def marked(**marks: Any) -> Any:
    """Return marks for the annotation of a field, which `outline` finds in the JSON schema.

    Args:
        kind: kind of function that a `Choice` names (see `registry`).
        stand_in: value in place of a missing one, with which the rest of a config can be checked.
        resume: how strictly the key must not change when a run is resumed, and why.
    """
    return Field(json_schema_extra=marks)


def refused(why: str) -> Any:
    """Return the mark of a field that must not change for this reason."""
    return marked(resume=(REFUSED, why))


class Part(BaseModel):
    """Base of every section: frozen, without unknown keys, described by its attribute docstrings."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the JSON schema, with each description in one line."""
        schema = handler(core)
        section = handler.resolve_ref_schema(schema)
        for described in (section, *section.get("properties", {}).values()):
            if "description" in described:
                described["description"] = " ".join(described["description"].split())
        return schema


class Choice(Part):
    """A registered or user-supplied function: its name and its keyword arguments."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)
    # JSON has no number for .inf and .nan: a saved config would have null in their place.
    __pydantic_extra__: dict[str, Annotated[JsonValue, WithJsonSchema({})]] = Field(init=False)

    name: str
    """A registered name or `package.module:function`."""

    @property
    def params(self) -> dict[str, Any]:
        """Return the keyword arguments of the function."""
        return dict(self.model_extra or {})

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class Mistake(NamedTuple):
    """A contradiction between values of a config, or between a value and what it names."""

    keys: tuple[str, ...]
    """Dotted keys on which the mistake depends. It is shown at the first of them that the user wrote."""
    text: str
    """What was found, what is allowed, what to do. A key that stands first is not shown twice."""


def broken(keys: str, text: str) -> Mistake:
    """Return a mistake of keys that blanks divide."""
    return Mistake(tuple(keys.split()), text)


class Mistakes(ValueError):
    """Mistakes with their keys, raised by a validator."""

    def __init__(self, *mistakes: Mistake) -> None:
        super().__init__("\n".join(mistake.text for mistake in mistakes))
        self.mistakes = mistakes


class Root(Part):
    """Base of a whole config, such as that of a run. It has what can be said of several sections only."""

    RULES: ClassVar[tuple[Callable[..., Iterator[Mistake]], ...]] = ()
    """Functions of a config that yield a mistake for each violation, of the keys that it depends on."""
    OTHER_NAMES: ClassVar[Mapping[str, str]] = {}
    """Keys of other trainers, and ours with the same meaning."""
    ABSENT: ClassVar[Mapping[str, str]] = {}
    """Keys of other trainers for what asyncrl does not have, and the text that says so."""

    def disagreements(self, *, without: Container[str] = ()) -> Iterator[Mistake]:
        """Yield a mistake for every broken rule, except of keys in one of the sections `without`."""
        yield from _inexact_numbers(self, "")
        yield from judged(self, self.RULES, without)

    @model_validator(mode="after")
    def _sections_agree(self, info: ValidationInfo) -> Self:
        if info.context != SECTIONS_ONLY and (mistakes := list(self.disagreements())):
            raise Mistakes(*mistakes)
        return self


def judged(
    config: Root, rules: Iterable[Callable[..., Iterator[Mistake]]], without: Container[str]
) -> Iterator[Mistake]:
    """Yield a mistake for every broken one of `rules`, except of keys in one of the sections `without`."""
    for mistake in chain.from_iterable(rule(config) for rule in rules):
        if not any(key.partition(".")[0] in without for key in mistake.keys):
            yield mistake


def _inexact_numbers(part: Part, above: str) -> Iterator[Mistake]:
    """Lua and most JSON readers store numbers as doubles, which are exact only up to 2**53."""
    for key, value in part:
        if isinstance(value, Part):
            yield from _inexact_numbers(value, f"{above}{key}.")
        elif isinstance(value, int) and abs(value) > LARGEST:
            allowed = f"allowed is at most {LARGEST}, the last number that the store counts exactly"
            yield Mistake((f"{above}{key}",), f"{above}{key} is {value}; {allowed}")
