"""One HTML file with tables, charts and samples that needs no network, no server and no other files.

The template escapes text and shows control characters as signs. If a model's text became markup all the same,
the page's Content-Security-Policy would run no script except the two that it names by hash, and load nothing.
"""

import base64
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources

import jinja2

from asyncrl.errors import from_extra
from asyncrl.results.charts import Chart
from asyncrl.results.recorded import sample_head
from asyncrl.telemetry.base import SampleRecord
from asyncrl.telemetry.jsonl import to_json
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
    """Return the whole file. Raises MissingLibrary without plotly."""
    with from_extra("report"):
        from plotly.offline import get_plotlyjs
    plotly = get_plotlyjs()
    # The page may run these two scripts and style itself, and nothing else.
    digests = (hashlib.sha256(script.encode()).digest() for script in (plotly, DRAW))
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    own = "style-src 'unsafe-inline'; img-src data: blob:"
    # Control characters are signs in what the template inserts, before it is escaped.
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: visible(value) if type(value) is str else value,
    )
    environment.filters["lines"] = lambda text: _Lines(visible_lines(text))
    template = resources.files("asyncrl.results").joinpath("page.html").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        title=title,
        subtitle=subtitle,
        sections=sections,
        sample_head=sample_head,
        next_number=partial(next, itertools.count()),
        charts=[to_json(chart) for section in sections for chart in section.charts],
        policy=f"default-src 'none'; script-src {allowed}; {own}; base-uri 'none'; form-action 'none'",
        plotly=plotly,
        draw=DRAW,
    )


class _Lines(str):
    """Text whose control characters are signs already, except for the ends of its lines."""
