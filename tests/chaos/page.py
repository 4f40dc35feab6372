"""Rewrites the tables of docs/reliability.md from bench/results/faults.json: `python -m tests.chaos.page`."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from . import designs, outcome

ROOT = Path(__file__).resolve().parents[2]
PAGE, RESULTS = ROOT / "docs" / "reliability.md", ROOT / "bench" / "results" / "faults.json"
REGION = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def rewritten(page: str, results: Mapping[str, Any]) -> str:
    """The page with every table as the results make it."""

    def region(match: re.Match[str]) -> str:
        start, kind, end = match.groups()
        if kind not in results:
            return match.group()
        rows = {
            "volume": lambda: outcome.table(results["volume"]["runs"]),
            "designs": lambda: designs.table(results["designs"]["runs"]),
            "real": lambda: real(results["real"]),
        }[kind]()
        return "\n".join([start.strip(), *rows, end])

    return REGION.sub(region, page)


def real(run: Mapping[str, Any]) -> Iterator[str]:
    """Of the run with a model."""
    yield "| process killed | times | median seconds to the next step |"
    yield "|---|---|---|"
    for kind, times in sorted(run["killed"].items()):
        yield f"| {kind} | {times} | {run['to_next_step_s'].get(kind, 'none: the run ends, and is started again')} |"
    yield ""
    yield (
        f"{run['steps']} steps, {run['groups']} groups, {run['unaccounted']} not accounted for, {run['missing_in_audit']} "
        f"missing in the audit; steps in a row: {_yes(run['steps_in_a_row'])}. The supervisor was killed, and "
        f"{run['nothing_left_after_supervisor_s']} s later no process was left. `asyncrl down` leaves nothing: "
        f"{_yes(run['down_leaves_nothing'])}. A crash loop ends the run: {_yes(run['crash_loop_ends_the_run'])}."
    )
    yield ""
    yield (
        f"{sum(run['killed'].values()) - 1} kills in {run['seconds'] / 60:.0f} minutes: steps that lasted took "
        f"{100 * run['share_of_lasting_steps']:.0f} % of that time (F13; aimed at 90 % with a kill a minute)."
    )


def _yes(value: bool) -> str:
    return "yes" if value else "no"


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(), json.loads(RESULTS.read_text())))
