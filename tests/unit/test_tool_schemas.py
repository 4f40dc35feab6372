"""Schemas of tools equal those that Transformers makes of the functions; calls are checked against them."""

from functools import cached_property
from typing import Any, Literal, Optional, Union

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils import get_json_schema

from asyncrl.config.environment_section import EnvironmentConfig
from asyncrl.environments.base import ToolCall
from asyncrl.environments.environments import Environments
from asyncrl.environments.tool_schemas import Toolbox, tool_schema
from asyncrl.environments.user_code import describe, describe_tool
from asyncrl.errors import EnvironmentFault


def add(a: int, b: int = 0) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.

    Returns:
        Their sum.
    """
    return a + b


def look(
    place: Literal["attic", "cellar", 3],
    names: list[str],
    depth: float | None,
    mixed: Union[int, list[int]],  # noqa: UP007 - a form that users write
    note: Optional[str] = None,  # noqa: UP045
    table: dict[str, int] = {},  # noqa: B006
    pair: tuple[int, str] = (1, ""),
    anything: Any = None,
    either: int | str = 1,
):
    """Look around.

    Args:
        place: Where.
        names: Which.
        depth: How deep, in metres.
        mixed: Anything of both.
        note: A remark (choices: ["one", "two"])
        table: Numbers by name.
        pair: Two things.
        anything: What you like.
        either: One of both.
    """


@pytest.mark.parametrize("tool", [add, look])
def test_the_schema_of_a_described_tool_is_that_of_the_function(tool):
    mine, theirs = tool_schema(describe_tool(tool)), get_json_schema(tool)
    mine["function"].pop("return", None), theirs["function"].pop("return", None)
    assert mine == theirs


def test_text_annotations_are_the_same_as_types():
    code = "from __future__ import annotations\n" + "import typing\nfrom typing import *\n"
    space: dict[str, Any] = {}
    exec(code + "def add(a: int, b: typing.Optional[List[int]] = None):\n    'Add.'\n", space)
    described = describe_tool(space["add"])
    assert [one["annotation"] for one in described["parameters"]] == ["int", "typing.Optional[List[int]]"]
    described["doc"] = "Add.\n\nArgs:\n    a: One.\n    b: More."
    parameters = tool_schema(described)["function"]["parameters"]["properties"]
    assert parameters["b"]["items"] == {"type": "integer"} and parameters["b"]["nullable"]


def undocumented(a: int):
    pass


def half(a: int, b: int):
    """Do.

    Args:
        a: One.
    """


def untyped(a):
    """Do.

    Args:
        a: One.
    """


def strange(a: object):
    """Do.

    Args:
        a: One.
    """


def open_ended(**a: int):
    """Do."""


@pytest.mark.parametrize(
    ("tool", "says"),
    [
        (undocumented, "no docstring"), (half, "no description for the argument 'b'"), (untyped, "`a` has no type"),
        (strange, "the type `object`; allowed are int"), (open_ended, r"takes `\*\*a: int`"),
    ],
)  # fmt: skip
def test_a_tool_without_docstring_or_types_is_refused_with_file_and_line(tool, says):
    with pytest.raises(EnvironmentFault, match=says) as caught:
        Toolbox([describe_tool(tool)])
    line = tool.__code__.co_firstlineno
    assert (
        f"{__file__}:{line}: tool `{tool.__name__}`" in str(caught.value) and caught.value.reason == "start"
    )


def test_an_annotation_is_read_and_never_run():
    described = describe_tool(add)
    described["parameters"][0]["annotation"] = "__import__('os').abort()"
    with pytest.raises(EnvironmentFault, match="allowed are"):
        tool_schema(described)


BOX = Toolbox([describe_tool(add), describe_tool(look)])
LOOK = {"place": "attic", "names": [], "depth": None, "mixed": 1}


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("add", {"a": 1}, ""),
        ("add", {"a": 1, "b": -2}, ""),
        ("add", {"a": "x"}, 'a must be an integer, got "x"'),
        ("add", {"a": True}, "a must be an integer, got true"),
        ("add", {"a": 1.5}, "a must be an integer, got 1.5"),
        ("add", {"b": 1}, "add needs the argument a"),
        ("add", {"a": 1, "c": 2}, "add has no argument c; it has a, b"),
        ("add", "{a: 1", "the arguments of add are not a JSON object"),
        ("sub", {"a": 1}, "there is no tool sub; the tools are add, look"),
        ("look", LOOK, ""),
        ("look", LOOK | {"place": "roof"}, 'place must be one of ["attic", "cellar", 3], got "roof"'),
        ("look", LOOK | {"names": ["a", 1]}, 'names must be an array whose items are each a string, got ["a", 1]'),
        ("look", LOOK | {"depth": 3}, ""),
        ("look", LOOK | {"depth": "deep"}, 'depth must be a number, got "deep"'),
        ("look", LOOK | {"mixed": ["a"]}, 'mixed must be an integer or an array whose items are each an integer, got ["a"]'),
        ("look", LOOK | {"table": {"a": "b"}}, 'table must be an object whose values are each an integer, got {"a": "b"}'),
        ("look", LOOK | {"pair": [1]}, "pair must be an array of 2 items, got [1]"),
        ("look", LOOK | {"anything": object}, ""),
    ],
)  # fmt: skip
def test_a_mistake_of_the_model_is_a_text_that_it_can_use(name, arguments, says):
    assert BOX.mistake(ToolCall(id="1", name=name, arguments=arguments)) == says


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False).filter(lambda x: not x.is_integer()) | st.sampled_from(["attic", "one", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip


@given(st.sampled_from(sorted(BOX._parameters["look"]["properties"])), JSON)
def test_the_check_agrees_with_the_jsonschema_library(name, value):
    schema = dict(BOX._parameters["look"]["properties"][name])
    nullable = schema.pop("nullable", False)
    pair = {"minItems": 2, "maxItems": 2} if name == "pair" else {}  # prefixItems alone bounds no length
    valid = jsonschema.Draft202012Validator(schema | pair).is_valid(value) or (nullable and value is None)
    assert (BOX.mistake(ToolCall(id="1", name="look", arguments=LOOK | {name: value})) == "") == valid


def test_other_properties_are_those_without_a_schema_of_their_own():
    box = Toolbox([describe_tool(add)])
    named = {"properties": {"name": {"type": "string"}}, "additionalProperties": {"type": "integer"}}
    box._parameters["add"]["properties"]["a"] = {"type": "object", **named}
    for value, wrong in (({"name": "x", "n": 3}, False), ({"n": "x"}, True)):
        assert bool(box.mistake(ToolCall(id="1", name="add", arguments={"a": value}))) == wrong


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ({}, ""),
        (True, ""),
        ({"type": "string"}, "q must be a string, got 1"),
        (False, "look has no argument q; it has none"),
    ],
)
def test_other_arguments_are_those_that_the_schema_allows(others, says):
    parameters = {"type": "object", "properties": {}, "additionalProperties": others}
    box = Toolbox([{"type": "function", "function": {"name": "look", "parameters": parameters}}])
    assert box.mistake(ToolCall(id="1", name="look", arguments={"q": 1})) == says


class Shelf:
    """Tools with a state."""

    def reset(self, title, count: int = 1): ...

    def put(self, name: str) -> str:
        """Put.

        Args:
            name: What.
        """

    @staticmethod
    def read(self: int) -> str:
        """Read.

        Args:
            self: A name that a static method may have.
        """

    def is_done(self): ...

    def get_reward(self): ...

    def _hidden(self): ...


async def rollout(session, question, **columns): ...


def forgetful(session, question): ...


class Sorted:
    def reset(self, **columns): ...


def test_what_a_user_names_is_told_apart_by_its_shape():
    found = describe([Shelf])
    assert found["kind"] == "tool_class" and [one["name"] for one in found["tools"]] == ["put", "read"]
    assert [[one["name"] for one in tool["parameters"]] for tool in found["tools"]] == [["name"], ["self"]]
    assert (found["columns"], found["required"], found["takes_all"]) == (["title", "count"], ["title"], False)
    assert (found["rewards"], found["closes"]) == (True, False)
    played = describe([rollout])
    assert (played["kind"], played["columns"], played["takes_all"]) == ("rollout", ["question"], True)
    tools = describe([add, look])
    assert (tools["kind"], len(tools["tools"]), tools["columns"]) == ("tools", 2, [])


def test_a_column_called_like_the_first_parameter_is_left_out():
    """By name it would be a second value of that parameter."""
    played = Environments(EnvironmentConfig(uses="mine.py:rollout"))
    given = {"question": "1+1?", "session": 3, "self": 4}
    for target, name in ((rollout, "session"), (Sorted, "self")):
        played.description = describe([target])
        assert played._columns(given) == {one: given[one] for one in given if one != name}


@pytest.mark.parametrize(
    ("targets", "says"),
    [([Shelf, add], "class among several"), ([rollout, add], "rollout alone"), ([add, add], "its own name"), ([dict], "no method `reset`"),
     ([forgetful], "a rollout is an `async def`")],
)  # fmt: skip
def test_what_fits_no_shape_is_refused(targets, says):
    with pytest.raises(TypeError, match=says):
        describe(targets)


@pytest.mark.parametrize(
    ("reward", "counts"),
    [
        (lambda self: 1.0, True),
        (property(lambda self: 1.0), True),
        (cached_property(lambda self: 1.0), True),
        (0.0, False),
    ],
)
def test_a_plain_reward_of_a_text_environment_is_not_paid_behind_those_of_its_steps(reward, counts):
    methods = {"reset": lambda self: "", "reward": reward}
    assert describe([type("Tools", (), methods)])["rewards"]
    assert describe([type("Text", (), methods | {"step": lambda self, text: ""})])["rewards"] is counts
