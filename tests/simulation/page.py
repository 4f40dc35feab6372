"""Rewrites the tables of mutants in docs/reliability.md from bench/results/mutants.json: `python -m tests.simulation.page`."""

import json
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .mutant_table import MUTANTS

ROOT = Path(__file__).resolve().parents[2]
PAGE, RESULTS = ROOT / "docs" / "reliability.md", ROOT / "bench" / "results" / "mutants.json"
REGION = re.compile(r"(<!-- generated: mutants -->\n).*?(<!-- end -->)", re.DOTALL)
MOST_WAYS = 6


def rewritten(page: str, results: Mapping[str, Any]) -> str:
    """The page with the tables as the results make them."""
    return REGION.sub(lambda match: "\n".join([match[1].strip(), *tables(results), match[2]]), page)


def tables(results: Mapping[str, Any]) -> Iterator[str]:
    """How many were noticed, when and by what, and why the others were not."""
    verdicts = results["mutants"]
    killed = {what: verdict for what, verdict in verdicts.items() if verdict["how"]}
    seeds = sorted(verdict["seeds"] for verdict in killed.values())
    yield "| mutants | noticed | share | first seed that noticed: median | 90 % | last |"
    yield "|---|---|---|---|---|---|"
    share, median, most = len(killed) / len(verdicts), statistics.median_low(seeds), seeds[int(0.9 * len(seeds))]
    yield f"| {len(verdicts)} | {len(killed)} | {share:.1%} | {median} | {most} | {seeds[-1]} |"
    yield ""
    yield "| noticed by | mutants |"
    yield "|---|---|"
    ways = Counter(verdict["how"].removeprefix("Violation: ") for verdict in killed.values())
    for way, count in ways.most_common(MOST_WAYS):
        yield f"| {way} | {count} |"
    yield f"| {len(ways) - MOST_WAYS} others | {sum(ways.values()) - sum(count for _, count in ways.most_common(MOST_WAYS))} |"
    yield ""
    yield "| survivor | seeds | why nothing notices |"
    yield "|---|---|---|"
    for mutant in MUTANTS:
        if mutant.what not in killed:
            yield f"| {mutant.what} | {verdicts[mutant.what]['seeds']} | {mutant.survives} |"


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(), json.loads(RESULTS.read_text())))
