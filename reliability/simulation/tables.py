"""The tables of docs/reliability.md that are of simulated runs."""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .campaign import SIMULATES


def campaigns(found: Mapping[str, Any]) -> Iterator[str]:
    """What the seeds of all campaigns have seen. Raises ValueError when a seed would count twice."""
    runs = sorted(found["campaigns"], key=lambda run: (run["simulates"] == SIMULATES, run["first"]))
    yield (
        "| what was simulated | seeds | with four shards | simulated hours | calls | faults | "
        "seeds that failed |"
    )
    yield "|---|---|---|---|---|---|---|"
    for what, campaigns_of_it in itertools.groupby(runs, key=lambda run: run["simulates"]):
        yield f"| {what} | {_summed(list(campaigns_of_it))} |"


def _summed(runs: Sequence[Mapping[str, Any]]) -> str:
    """The cells of a row."""
    for run, following in itertools.pairwise(runs):
        if run["first"] + run["seeds"] > following["first"]:
            raise ValueError(
                f"the campaigns that start at {run['first']} and {following['first']} overlap: remove one "
                "of them"
            )
    total = Counter[str]()
    for run in runs:
        total.update({name: run[name] for name in ("seeds", "calls", "simulated_s")})
        total.update(
            failed=len(run["failures"]), faults=sum(run["faults"].values()), cluster=run["shards"].get("4", 0)
        )
    hours = total["simulated_s"] / 3600
    return (
        f"{total['seeds']:,} | {total['cluster']:,} | {hours:,.0f} | {total['calls']:,} | "
        f"{total['faults']:,} | {total['failed']}"
    )
