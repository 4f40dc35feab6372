"""One HTML file with tables, charts and samples that needs nothing else: no network, no server, no files beside it.

Text is escaped by the template, control characters are shown as signs. Should a model's text ever become markup all the
same, the page's own policy (Content-Security-Policy) runs no script but the two that are known by their hash, and loads nothing.
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
from asyncrl.results.sample import sample_head
from asyncrl.results.text_table import Table
from asyncrl.telemetry.base import SampleRecord
from asyncrl.telemetry.text import visible, visible_lines

DRAW = """
JSON.parse(document.getElementById("charts").textContent).forEach((chart, index) =>
  Plotly.newPlot("chart-" + index, chart.data, chart.layout, {responsive: true, displayModeBar: false}));
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the page; what is empty is left out."""

    title: str
    note: str = ""
    facts: Sequence[tuple[str, str]] = ()  # (name, value)
    tables: Sequence[Table] = ()
    charts: Sequence[Chart] = ()
    samples: Sequence[SampleRecord] = ()
    text: str = ""  # shown as it is, behind `text_title`
    text_title: str = ""


def render_page(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """The whole file. Raises MissingLibrary."""
    with from_extra("report"):
        from plotly.offline import get_plotlyjs
    charts = [chart for section in sections for chart in section.charts]
    plotly = get_plotlyjs()
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    numbers = itertools.count()
    return environment.from_string(_template()).render(
        title=visible(title),
        subtitle=visible(subtitle),
        sections=[_plain(section, numbers) for section in sections],
        charts=[json.loads(chart.figure.to_json()) for chart in charts],
        policy=_policy(plotly, DRAW),
        plotly=plotly,
        draw=DRAW,
    )


def _template() -> str:
    return resources.files("asyncrl.results").joinpath("page.html").read_text(encoding="utf-8")


def _policy(*scripts: str) -> str:
    """What the page may do: run these scripts, and style itself. Everything else is refused by the browser."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _plain(section: Section, numbers: Iterator[int]) -> dict[str, Any]:
    """The section as visible text; charts as their numbers on the page."""
    return {
        "title": visible(section.title),
        "note": visible(section.note),
        "facts": [(visible(name), visible(value)) for name, value in section.facts],
        "tables": [_plain_table(table) for table in section.tables],
        "charts": [(next(numbers), visible(chart.title)) for chart in section.charts],
        "samples": [_plain_sample(sample) for sample in section.samples],
        "text": visible_lines(section.text),
        "text_title": visible(section.text_title),
    }


def _plain_table(table: Table) -> dict[str, Any]:
    return {
        "title": visible(table.title),
        "head": [visible(cell) for cell in table.head],
        "rows": [[visible(cell) for cell in row] for row in table.rows],
    }


def _plain_sample(sample: SampleRecord) -> dict[str, str]:
    head, details = sample_head(sample)
    return {
        "head": visible(head),
        "details": visible(details),
        "prompt": visible_lines(sample.prompt),
        "response": visible_lines(sample.response),
    }
