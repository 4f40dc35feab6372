"""One HTML file with tables, charts and samples that needs no network, no server and no other files.

The template escapes text and shows control characters as signs. If a model's text became markup all the same,
the page's Content-Security-Policy would run no script except the two that it names by hash, and load nothing.
"""

import base64
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import jinja2

from asyncrl.extras import from_extra
from asyncrl.results.charts import Chart
from asyncrl.results.samples import sample_head
from asyncrl.telemetry.base import SampleRecord
from asyncrl.telemetry.text import visible, visible_lines

DRAW = """
JSON.parse(document.getElementById("charts").textContent).forEach((chart, index) =>
  Plotly.newPlot("chart-" + index, chart.data, chart.layout, {responsive: true, displayModeBar: false}));
"""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under a head."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the page. Empty fields are left out."""

    title: str
    note: str = ""
    facts: Sequence[tuple[str, str]] = ()  # (name, value)
    tables: Sequence[Table] = ()
    charts: Sequence[Chart] = ()
    samples: Sequence[SampleRecord] = ()
    text: str = ""  # shown verbatim, folded behind `text_title`
    text_title: str = ""


def render_page(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """The whole file. Raises MissingLibrary without plotly."""
    with from_extra("report"):
        from plotly.offline import get_plotlyjs
    charts = [chart for section in sections for chart in section.charts]
    plotly = get_plotlyjs()
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    numbers = itertools.count()
    template = resources.files("asyncrl.results").joinpath("page.html").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        title=visible(title),
        subtitle=visible(subtitle),
        sections=[_plain(section, numbers) for section in sections],
        charts=[json.loads(chart.figure.to_json()) for chart in charts],
        policy=_policy(plotly, DRAW),
        plotly=plotly,
        draw=DRAW,
    )


def _policy(*scripts: str) -> str:
    """A policy that lets the page run these scripts and style itself; the browser refuses everything else."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _plain(section: Section, numbers: Iterator[int]) -> dict[str, Any]:
    """The section for the template: its text made visible, its charts as their numbers on the page."""
    return {
        "title": visible(section.title),
        "note": visible(section.note),
        "facts": [(visible(name), visible(value)) for name, value in section.facts],
        "tables": [
            {
                "title": visible(table.title),
                "head": list(map(visible, table.head)),
                "rows": [list(map(visible, row)) for row in table.rows],
            }
            for table in section.tables
        ],
        "charts": [(next(numbers), visible(chart.title)) for chart in section.charts],
        "samples": [
            {
                "head": visible(head),
                "details": visible(details),
                "prompt": visible_lines(sample.prompt),
                "response": visible_lines(sample.response),
            }
            for sample in section.samples
            for head, details in [sample_head(sample)]
        ],
        "text": visible_lines(section.text),
        "text_title": visible(section.text_title),
    }
