"""deploy/compose.yaml as Docker Compose reads it: variables filled in. Enough of its rules for our own file."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
VARIABLE = re.compile(r"\$(?:(?P<dollar>\$)|\{(?P<name>\w+)(?::(?P<kind>[-?])(?P<rest>[^}]*))?\})")


def env_file(path: Path = DEPLOY / ".env.example") -> dict[str, str]:
    """The variables of an env file."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def compose(variables: Mapping[str, str]) -> dict[str, Any]:
    """The file with `variables` in it. KeyError for one that must be set."""
    return yaml.safe_load(filled((DEPLOY / "compose.yaml").read_text(encoding="utf-8"), variables))


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
    return {match["name"] for match in VARIABLE.finditer(text) if match["name"]} | {name for name in passed_on if name.isupper()}
