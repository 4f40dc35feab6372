"""deploy/compose.yaml as Docker Compose reads it, variables filled in: enough of its rules for our file."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
VARIABLE = re.compile(r"\$(?:(?P<dollar>\$)|\{(?P<name>\w+)(?::(?P<kind>[-?])(?P<rest>[^}]*))?\})")


def env_file(path: Path = DEPLOY / ".env.example") -> dict[str, str]:
    """The variables of an env file."""
    lines = [
        line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")
    ]
    return dict(line.split("=", 1) for line in lines)


def compose(variables: Mapping[str, str]) -> dict[str, Any]:
    """The file with `variables` in it. KeyError for one that must be set."""
    return yaml.safe_load(filled((DEPLOY / "compose.yaml").read_text(encoding="utf-8"), variables))


def words(service: Mapping[str, Any]) -> list[str]:
    """Its command: a list, or a text as a shell splits it."""
    command = service["command"]
    return shlex.split(command) if isinstance(command, str) else [str(word) for word in command]


class Mount(NamedTuple):
    """What a container sees at `target`."""

    source: str
    """A path of the host, as the file names it, or a named volume."""
    target: str
    read_only: bool


def mounts(service: Mapping[str, Any]) -> list[Mount]:
    """In the order in which a later one lies over an earlier one."""
    found = [volume.split(":") for volume in service["volumes"]]
    return sorted(
        (Mount(source, target, "ro" in mode) for source, target, *mode in found),
        key=lambda mount: mount.target,
    )


def filled(text: str, variables: Mapping[str, str]) -> str:
    """`${NAME}`, `${NAME:-default}`, `${NAME:?message}` and `$$`."""

    def value(match: re.Match[str]) -> str:
        if match["dollar"]:
            return "$"
        found = variables.get(match["name"], "")
        if found:
            return found
        if match["kind"] == "-":
            return match["rest"]
        raise KeyError(f"{match['name']}: {match['rest'] or 'not set'}")

    return VARIABLE.sub(value, text)


def used_variables() -> set[str]:
    """Every variable that the file reads."""
    text = (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
    passed_on = re.findall(r"^      (\w+):$", text.partition("\nservices:")[2], re.MULTILINE)
    return {match["name"] for match in VARIABLE.finditer(text) if match["name"]} | {
        name for name in passed_on if name.isupper()
    }
