"""Rewrites the tables of docs/reliability.md from bench/results: `python -m reliability.chaos.page`."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from . import attacks, designs, tables

ROOT = Path(__file__).resolve().parents[2]
PAGE, RESULTS = ROOT / "docs" / "reliability.md", ROOT / "bench" / "results"
REGION = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
TABLES: Mapping[str, Callable[[Any], Iterable[str]]] = {
    "attacks": attacks.attacks,
    "designs": lambda found: designs.table(found["runs"]),
    "real": tables.real,
    "pace": tables.pace,
    "bounds": tables.bounds,
}


def results() -> dict[str, Any]:
    """The parts of faults.json by table; faults_NAME.json and the simulations as a whole; `attacks`: all."""
    parts: dict[str, Any] = json.loads((RESULTS / "faults.json").read_text())
    whole = [*RESULTS.glob("faults_*.json"), RESULTS / "simulation.json", RESULTS / "mutants.json"]
    parts |= {path.stem.removeprefix("faults_"): json.loads(path.read_text()) for path in whole}
    return parts | {"attacks": parts}


def rewritten(page: str, found: Mapping[str, Any]) -> str:
    """The page with every table as the results make it."""

    def region(match: re.Match[str]) -> str:
        start, kind, end = match.groups()
        return "\n".join([start.strip(), *TABLES[kind](found[kind]), end]) if kind in found else match.group()

    return REGION.sub(region, page)


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(), results()))
