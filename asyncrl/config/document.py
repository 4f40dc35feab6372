"""YAML in which every value keeps its place, so that a message can name file and line.

Scalars follow YAML 1.2: `1e-6` is a number; `on`, `off`, `yes` and `no` are text. A key given twice is an
error. PyYAML parses and gives the lines; its scalars follow YAML 1.1, so they are replaced here.
"""

import functools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from asyncrl.config.base import Keys, Mistake, Part
from asyncrl.config.outline import default_name, kind_at, named_by
from asyncrl.config.wording import closest
from asyncrl.errors import ConfigError

NULL = r"~|null|Null|NULL|"
BOOL = r"true|True|TRUE|false|False|FALSE"
INT = r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"
FLOAT = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
# Shipped configs in an installed package, and in a clone of the repository.
SHIPPED = (Path(__file__).parents[1] / "configs", Path(__file__).parents[2] / "configs")
# Limit for a document with its aliases expanded: a few lines of nested aliases could fill any memory.
MOST_VALUES = 100_000
# A table's head or a key of TOML, in which other trainers have their configs, alone on its line.
TOML = re.compile(r"""^(?:\[\[?[\w.-]+\]\]?|[\w.-]+\s*=\s*(?:["'\[{\d-]|true|false).*)$""", re.MULTILINE)
IS_TOML = (
    "is TOML; a config is YAML: write a table `[run]` as `run:`, and its keys below it as `  name: first`"
)
# Scalars of the YAML 1.2 core schema; the first pattern that matches decides.
SCALARS = {"null": NULL, "bool": BOOL, "int": INT, "float": FLOAT}


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of a config: its place, its key, and a text that says what was found and what to do."""

    place: str
    keys: Keys
    text: str
    misplaced: bool = False
    """True if the key is unknown: its value belongs elsewhere, where a default took its place."""
    replaced: bool = False
    """True if the value has a wrong type: a default took its place."""

    def __str__(self) -> str:
        key = ".".join(map(str, self.keys))
        text = f"{key}: {self.text.removeprefix(f'{key} ')}" if key else self.text
        return f"{self.place}  {text}" if self.place else text


@dataclass(frozen=True, slots=True)
class Node:
    """A value and the place where it was written. The children of a section have their own places."""

    value: "dict[str | int, Node] | list[Node] | str | int | float | bool | None"
    place: str

    def plain(self) -> Any:
        """Return the value without places."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    @property
    def children(self) -> "dict[str | int, Node]":
        """The nodes of a section by key, those of a list by index; none of a plain value."""
        if isinstance(self.value, list):
            return dict(enumerate(self.value))
        return self.value if isinstance(self.value, dict) else {}

    def nearest(self, keys: Keys) -> "Node":
        """Return the node at `keys`, or the deepest existing node above it."""
        child = self.children.get(keys[0]) if keys else None
        return child.nearest(keys[1:]) if child else self

    def has(self, keys: Keys) -> bool:
        """Return whether something was written at `keys`."""
        child = self.children.get(keys[0]) if keys else self
        return child is not None and (child is self or child.has(keys[1:]))

    def walk(self, keys: Keys = ()) -> Iterator[tuple[Keys, "Node"]]:
        """Yield this node and every node below it, with its keys."""
        yield keys, self
        for key, child in self.children.items():
            yield from child.walk((*keys, key))


def keys_of(name: str) -> Keys:
    """Split a dotted name, such as `reward.functions.0`, into keys."""
    return tuple(int(part) if part.isdecimal() else part for part in name.split("."))


def placed(mistake: Mistake, root: Node) -> Problem:
    """Place a mistake at the first of its keys that the user wrote; if there is none, at its first key."""
    candidates = [keys_of(name) for name in mistake.keys]
    keys = next((keys for keys in candidates if root.has(keys)), candidates[0])
    return Problem(root.nearest(keys).place, keys, mistake.text)


class _Loader(yaml.SafeLoader):
    """PyYAML's parser with the scalars of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's name; ours, not the parent's


for _tag, _pattern in SCALARS.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), None)


def parse(text: str, *, file: str, line_numbers: bool = True) -> tuple[Node, list[Problem]]:
    """Return the document, and a problem for each duplicate or malformed key.

    Args:
        text: YAML.
        file: name of the document in places.
        line_numbers: False for overrides, which have one line.

    Raises:
        ConfigError: the text is not YAML, or it is larger than any config. The message names the line.
    """
    try:
        root = yaml.compose(text, Loader=_Loader)
    except RecursionError as error:
        raise ConfigError(f"{file}  is nested too deeply for a config; remove brackets") from error
    except yaml.MarkedYAMLError as error:
        if line_numbers and TOML.search(text):
            raise ConfigError(f"{file}  {IS_TOML}") from error
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark and line_numbers else ""
        said, advice = f"{error.problem} {error.context}", "check indentation, quotes and brackets on this "
        advice += "line and the one above"
        if "\\t" in said:
            advice = "indent with spaces, not tabs"
        elif "mapping values are not allowed" in said:
            advice = "put text that holds `: ` in quotes, or check the indentation"
        found = error.problem or error.context
        raise ConfigError(f"{file}{line}  is not YAML: {found}; {advice}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}  is not YAML: {error}; save it as plain UTF-8 text") from error
    build = _Build(file, line_numbers)
    return (build.node(root, file, ()) if root else Node(None, file)), build.problems


class _Build:
    """Converts PyYAML's nodes to ours."""

    def __init__(self, file: str, line_numbers: bool) -> None:
        self.file = file
        self.line_numbers = line_numbers
        self.problems: list[Problem] = []
        self._open: set[int] = set()
        self._values = 0
        self._construct = _Loader("")

    def node(self, node: Any, place: str, keys: Keys) -> Node:
        """Convert one node. Raises ConfigError if the document exceeds `MOST_VALUES`."""
        self._values += 1
        if self._values > MOST_VALUES:
            text = f"makes the config longer than {MOST_VALUES} values, with aliases written out"
            raise ConfigError(f"{place}  {text}; shorten it")
        if id(node) in self._open:
            text = "found an anchor that contains itself; write the value out"
            self.problems.append(Problem(place, keys, text))
            return Node(None, place)
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return Node(self._section(node, keys), place)
            if isinstance(node, yaml.SequenceNode):
                items = enumerate(node.value)
                return Node([self.node(one, self._place(one), (*keys, index)) for index, one in items], place)
            return Node(self._scalar(node, place, keys), place)
        finally:
            self._open.discard(id(node))

    def _section(self, node: Any, keys: Keys) -> dict[str | int, Node]:
        section: dict[str | int, Node] = {}
        for key_node, value_node in node.value:
            place, key = self._place(key_node), key_node.value
            if not isinstance(key_node, yaml.ScalarNode):
                self.problems.append(Problem(place, keys, "found a list or section as key; allowed is text"))
            elif key in section:
                first = section[key].place
                text = f"found the key twice, first at {first}; allowed is once; delete one of them"
                self.problems.append(Problem(place, (*keys, key), text))
            else:
                section[key] = self.node(value_node, place, (*keys, key))
        return section

    def _scalar(self, node: Any, place: str, keys: Keys) -> Any:
        try:
            if node.tag == "tag:yaml.org,2002:int":
                return int(node.value, 0 if node.value.startswith(("0o", "0x")) else 10)
            if node.tag == "tag:yaml.org,2002:float" and "." not in node.value.lower().lstrip("+-")[:1]:
                return float(node.value)
            return self._construct.construct_object(node)
        except (yaml.YAMLError, ValueError, LookupError, AttributeError):
            text = f"found the tag {node.tag}; allowed are plain values; remove the tag"
            self.problems.append(Problem(place, keys, text))
            return None

    def _place(self, node: Any) -> str:
        return f"{self.file}:{node.start_mark.line + 1}" if self.line_numbers else self.file


def merge(model: type[Part], base: Node, over: Node, keys: Keys = ()) -> Node:
    """Merge `over` onto `base`: sections key by key, every other value as a whole.

    If a choice names another function, the parameters of the old function are dropped: they would not fit.
    """
    if not isinstance(over.value, dict):
        return over
    old, new = base.children.get("name"), over.children.get("name")
    if kind_at(model, keys) and new and new.value != (old.value if old else default_name(model, keys)):
        return over
    is_list = any(isinstance(key, int) for key in over.value)
    merged = dict(base.children) if isinstance(base.value, list if is_list else dict) else {}
    for key, child in over.value.items():
        if is_list and key not in merged:
            allowed = f"0 to {len(merged) - 1}" if merged else "the whole list"
            raise ConfigError(
                str(Problem(over.place, (*keys, key), f"found no such item; allowed is {allowed}"))
            )
        merged[key] = merge(model, merged.get(key, Node(None, over.place)), child, (*keys, key))
    return Node([*merged.values()], base.place) if is_list else Node(merged, over.place)


def override(model: type[Part], text: str) -> Node:
    """Return the document for `key.path=value`. A number in the path selects an item of a list.

    Raises ConfigError if the text does not have that form, or the value is not YAML.
    """
    place = f"override `{text}`"
    path, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", path):
        raise ConfigError(f"{place}  found no `key.path=value`; write for example `batch.groups=16`")
    node, problems = parse(value, file=place, line_numbers=False)
    if problems:
        raise ConfigError("\n".join(map(str, problems)))
    read = yaml.compose(value, Loader=_Loader) if {"#", "\n"} & {*value.strip()} else None
    is_plain = isinstance(read, yaml.ScalarNode) and read.style is None
    is_cut = read and read.end_mark.index < len(value.rstrip())
    if value.lstrip()[:1] == "#" or is_cut or (is_plain and "\n" in value):
        if read and not is_plain:
            raise ConfigError(f"{place}  found text behind the value, beginning with `#`; leave it out")
        node = Node(value.strip(), place)  # a command line has no comments, and folds no lines
    for part in reversed(path.split(".")):
        node = Node({int(part) if part.isdecimal() else part: node}, place)
    return _spelled_out(model, node)


def _spelled_out(model: type[Part], node: Node, keys: Keys = ()) -> Node:
    """Return the document with names as sections.

    `advantage: rloo` becomes `advantage: {name: rloo}`, and a reward function `math` `{function: math}`.
    """
    if isinstance(node.value, str) and (key := named_by(model, keys)):
        return Node({key: node}, node.place)
    if not isinstance(node.value, dict | list):
        return node
    spelled = {key: _spelled_out(model, child, (*keys, key)) for key, child in node.children.items()}
    return Node([*spelled.values()] if isinstance(node.value, list) else spelled, node.place)


def read(
    model: type[Part], path: Path, *, asked_by: str = "", above: tuple[Path, ...] = ()
) -> tuple[Node, list[Problem]]:
    """Read a file and merge it onto the files that its key `extends` names.

    `extends` is a path or a list of paths, relative to the file. If no such file exists, `configs/NAME.yaml`
    means the shipped one. `asked_by` is the place of the key that names this file, and `above` the files that
    extend it. Raises ConfigError if a file cannot be read, is not YAML, or extends itself.
    """
    if path.parts[:1] == ("configs",):
        path = _base(Path(), str(path))
    where = f"{asked_by}  extends: " if asked_by else ""
    if path.resolve() in above:
        raise ConfigError(f"{where}{path} extends itself; remove one `extends`")
    try:
        if path.is_fifo():
            raise ValueError("it is a pipe, and a config is read more than once")
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        text = "found bytes that are not UTF-8; save the file as UTF-8"
        raise ConfigError(f"{where}{path}:{line}  {text}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}cannot read {path}: {_reason(path, error)}") from error
    node, problems = parse(text, file=str(path))
    if not isinstance(node.value, dict):
        if TOML.search(text):
            raise ConfigError(f"{path}  {IS_TOML}")
        found = "nothing" if node.value is None else "no section"
        allowed = "allowed are `key: value` lines, such as `run: {name: first}`"
        raise ConfigError(f"{path}:1  found {found}; {allowed}")
    own = dict(node.value)
    extends = own.pop("extends", None)
    layers = [_spelled_out(model, Node(own, str(path)))]
    asked_by, above = extends.place if extends else "", (*above, path.resolve())
    for base_path in reversed(_paths(extends)):
        base, more = read(model, _base(path.parent, base_path), asked_by=asked_by, above=above)
        layers, problems = [base, *layers], more + problems
    return functools.reduce(functools.partial(merge, model), layers), problems


def _base(directory: Path, given: str) -> Path:
    """Return the file that `extends` names: relative to the extending file, else a shipped config."""
    relative = directory / given
    if relative.exists() or Path(given).is_absolute():
        return relative
    shipped = (place / given.removeprefix("configs/") for place in SHIPPED)
    return next((file for file in shipped if file.is_file()), relative)


def _reason(path: Path, error: OSError | ValueError) -> str:
    """Say why a config cannot be read, and what to do."""
    if os.path.isdir(path):  # it takes a name that is too long
        inside = path / "config.yaml"
        wanted = f"its config, {inside}" if inside.is_file() else "the path of a YAML file"
        return f"it is a directory; give {wanted}"
    others = path.parent.glob("*.y*ml") if path.parent.is_dir() else ()
    near = {other.stem: other for other in others if other != path}
    close = closest(path.stem, near)
    hint = f"; did you mean `{near[close]}`?" if close else "; give the path of a YAML file"
    expanded = "; write ~ and variables out" if str(path).startswith("~") or "$" in str(path) else ""
    return f"{error.strerror if isinstance(error, OSError) else error}{expanded}{hint}"


def _paths(extends: Node | None) -> list[str]:
    value = extends.plain() if extends else []
    paths = [value] if isinstance(value, str) else value
    if extends and not (isinstance(paths, list) and paths and all(isinstance(path, str) for path in paths)):
        allowed = "the path of a YAML file or a list of paths"
        raise ConfigError(f"{extends.place}  extends: found {value!r}; allowed is {allowed}")
    return list(paths)
