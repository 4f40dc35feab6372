"""Charts for a page: lines, areas and bars in one style."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.extras import from_extra
from asyncrl.telemetry.history import Points, thinned
from asyncrl.telemetry.text import visible

MOST_POINTS = 1500  # points of one curve: more than a screen has pixels for
FEW_POINTS = 40  # curves with at most this many points get markers
COLOURS = ("#1f5fbf", "#d9730d", "#2a9d62", "#c03a5b", "#7a56c2", "#8a6d3b", "#0f8b8d", "#6b7280")
GRID = "#e6e9ed"


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure and its title, which stands outside the figure because a legend may need several rows."""

    title: str
    figure: Any  # a plotly figure


def lines(
    title: str, series: Mapping[str, Points], *, x: str = "step", y: str = "", log: bool = False
) -> Chart:
    """Draw a curve for each name; `x` and `y` name the axes."""
    figure = _figure(x, y)
    for index, (name, points) in enumerate(series.items()):
        shown = thinned(points, MOST_POINTS)
        figure.add_scatter(
            x=[at for at, _ in shown],
            y=[value for _, value in shown],
            name=_label(name),
            mode="lines" if len(shown) > FEW_POINTS else "lines+markers",
            line={"color": COLOURS[index % len(COLOURS)], "width": 1.8},
            marker={"size": 5},
        )
    if log:
        figure.update_yaxes(type="log", exponentformat="power")
    elif all(value >= 0 for points in series.values() for _, value in points):
        figure.update_yaxes(rangemode="nonnegative")
    return Chart(title, figure)


def areas(title: str, series: Mapping[str, Points], *, x: str = "step", y: str = "") -> Chart:
    """Draw parts of a whole as stacked areas; the axis cuts off few far larger sums, as of the first step."""
    chart = lines(title, series, x=x, y=y)
    chart.figure.update_traces(stackgroup="all", mode="lines", line={"width": 0.5})
    sums: dict[float, float] = {}
    for points in series.values():
        for at, value in points:
            sums[at] = sums.get(at, 0.0) + value
    usual = sorted(sums.values())[int(0.95 * (len(sums) - 1))] if sums else 0.0
    if usual and max(sums.values()) > 4 * usual:
        chart.figure.update_yaxes(range=[0, 2 * usual])
    return chart


def bars(title: str, series: Mapping[str, Mapping[str, float]], *, x: str = "", y: str = "") -> Chart:
    """Draw grouped bars: for each name a value by category."""
    figure = _figure(x, y)
    for index, (name, values) in enumerate(series.items()):
        marker = {"color": COLOURS[index % len(COLOURS)], "line": {"width": 0}}
        categories = list(map(_label, values))
        figure.add_bar(x=categories, y=list(values.values()), name=_label(name), marker=marker)
    figure.update_xaxes(type="category")
    figure.update_layout(bargap=0.35, bargroupgap=0.08)
    return Chart(title, figure)


def _label(name: str) -> str:
    """Return a label without tags, some of which plotly would read as markup."""
    return visible(name).replace("&", "&amp;").replace("<", "&lt;")


def _figure(x: str, y: str) -> Any:
    with from_extra("report"):
        import plotly.graph_objects as go
    colours = dict.fromkeys(("gridcolor", "linecolor", "zerolinecolor"), GRID)
    axis = colours | {"automargin": True, "title": {"standoff": 6}}
    figure = go.Figure()
    figure.update_layout(
        template="none",
        font={"family": "system-ui, sans-serif", "size": 12, "color": "#1c2430"},
        margin={"l": 8, "r": 8, "t": 8, "b": 8},
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 11}},
        showlegend=True,
        hovermode="x unified",
        xaxis=axis,
        yaxis=axis,
    )
    figure.update_xaxes(title_text=x)
    return figure.update_yaxes(title_text=y)
