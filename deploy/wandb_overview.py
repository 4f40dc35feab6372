"""Writes an overview of runs as a W&B report: the curves of `asyncrl report`, staleness, waiting, and what
the models write.

    python deploy/wandb_overview.py ENTITY/PROJECT [--run NAME] [--set NAME ...]

It needs `pip install 'asyncrl[wandb-report]'` and `wandb login`, and prints the report's address. Without
`--run` it shows all runs of the project. An offline run has to be there first: `wandb sync
RUN/wandb/offline-run-*`.
"""

import argparse
import re
from collections.abc import Sequence

import wandb_workspaces.reports.v2 as wr

from asyncrl.results.charts import CURVES, STALENESS, Curve

WAITING = (
    Curve("The learner waits for groups", ("idle/learner",), "share of the time"),
    Curve(
        "A step of the learner",
        ("time/wait_groups", "time/measure", "time/critic", "time/train", "time/publish", "time/checkpoint"),
        "s",
    ),
    Curve("The last update paused its engine", ("weights/paused_s",), "s"),
)
SECTIONS = {"Learning": CURVES, "Staleness": STALENESS, "Who waited for whom": WAITING}
# A named set of `data.eval` in a metric's name: one, three or more characters, or two that are not `se`.
# Standard errors have `se` there, and a pattern that works everywhere can only leave out characters.
SET = "(([^/]|[^/]{3,}|[^s/][^/]|[^/][^e/])/)?"
WIDTH, HEIGHT, PAGE_WIDTH = 8, 6, 24
"""Of a chart, in W&B's units; three in a row."""


def overview(entity: str, project: str, run: str | None, sets: Sequence[str] = ()) -> wr.Report:
    """The report, not saved; `run` is a run's name: all that began under it. `sets` are those with names."""
    runs = wr.Runset(
        entity=entity, project=project, name=run or "runs", filters=f"Name = '{run}'" if run else ""
    )
    blocks: list[object] = []
    for title, curves in SECTIONS.items():
        blocks += [wr.H2(title), wr.PanelGrid(runsets=[runs], panels=panels(curves))]
    held_out = [f"samples/eval/{name}" for name in sets] or ["samples/eval"]
    tables = [wr.WeavePanelSummaryTable(table_name=name) for name in ("samples/train", *held_out)]
    for row, table in enumerate(tables):
        table.layout = wr.Layout(y=10 * row, w=PAGE_WIDTH, h=10)
    blocks += [wr.H2("Samples"), wr.PanelGrid(runsets=[runs], panels=tables)]
    return wr.Report(
        entity=entity,
        project=project,
        title=f"asyncrl overview: {run or project}",
        width="fluid",
        blocks=blocks,
    )


def panels(curves: Sequence[Curve]) -> list[wr.LinePlot]:
    """One chart for each, in rows."""
    return [
        wr.LinePlot(
            title=curve.title,
            x="step",
            **metrics(curve),
            title_y=curve.y or None,
            log_y=curve.log or None,
            layout=wr.Layout(
                x=WIDTH * at % PAGE_WIDTH, y=HEIGHT * (WIDTH * at // PAGE_WIDTH), w=WIDTH, h=HEIGHT
            ),
        )
        for at, curve in enumerate(curves)
    ]


def metrics(curve: Curve) -> dict[str, object]:
    """Names where they are known, else one pattern for all: W&B takes either."""
    if not any("*" in name or name.startswith("eval/") for name in curve.names):
        return {"y": list(curve.names)}
    patterns = (re.escape(name).replace(r"\*", ".*") for name in curve.names)
    patterns = (re.sub("^eval/", f"eval/{SET}", pattern) for pattern in patterns)
    return {"metric_regex": f"^({'|'.join(patterns)})$"}


def main() -> None:
    """Save it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("project", help="ENTITY/PROJECT")
    parser.add_argument("--run", help="one run's name; default: all runs")
    parser.add_argument(
        "--set", action="append", default=[], help="a named set of data.eval, whose samples are shown; repeat"
    )
    arguments = parser.parse_args()
    entity, _, project = arguments.project.partition("/")
    if not (entity and project):
        parser.error(
            f"found {arguments.project!r}; give the entity (user or team) and the project, as in me/asyncrl"
        )
    report = overview(entity, project, arguments.run, arguments.set)
    report.save()
    print(report.url)  # noqa: T201 - the script's output


if __name__ == "__main__":
    main()
