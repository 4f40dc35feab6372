"""The metrics that docs/metrics.md documents."""

import re
from pathlib import Path

from asyncrl.algo.metrics import BANDS, TURNS

ROOT = Path(__file__).parents[2]
GUIDE, ELSEWHERE = (
    (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").split("## The same under other names")
)


def first_column(text: str) -> set[str]:
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def documented() -> set[str]:
    names = first_column(GUIDE)
    names |= {name.replace("<pair>", pair) for name in names for pair in ("mismatch", "policy", "drift")}
    names |= {name.replace("<band>", band) for name in names for band in BANDS}
    names |= {name.replace("<turn>", turn) for name in names for turn in TURNS}
    return {re.sub(r"<\w+>", "<>", name) for name in names}


EXAMPLES = {
    "<pair>": "mismatch",
    "<band>": "short",
    "<turn>": "first",
    "<ending>": "stop",
    "<steps>": "3",
    "<samples>": "8",
    "<name>": "mine",
    "<reason>": "stale",
    "<rank>": "0",
}
BY_TIME = first_column(GUIDE.split("## Generators, by time")[1].split("\n## ")[0])


def documented_units() -> list[tuple[str, str]]:
    """(a name as it is logged, its unit in the guide) of every metric."""
    found = []
    for line in GUIDE.split("## Trackers")[0].splitlines():
        if not line.startswith("| `"):
            continue
        _, names, units, *_ = line.split("|")
        for place, name in enumerate(re.findall(r"`([^`]+)`", names)):
            known = [unit.strip() for unit in units.split(",")]
            unit = known[min(place, len(known) - 1)]
            for holder, example in EXAMPLES.items():
                name = name.replace(holder, example)
            found.append((name, "" if name.startswith("alarm/") else unit))
    return found
