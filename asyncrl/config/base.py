"""Base classes of the configuration's models, and the type of a mistake in a config."""

from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue

# The path to a value: keys of sections and indices of lists.
Keys = tuple[str | int, ...]


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


class Mistakes(ValueError):
    """Mistakes with their keys, raised by a validator."""

    def __init__(self, *mistakes: Mistake) -> None:
        super().__init__("\n".join(mistake.text for mistake in mistakes))
        self.mistakes = mistakes
