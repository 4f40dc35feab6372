"""A curve in characters."""

import re

from rich.text import Text

from asyncrl.telemetry.history import Series
from asyncrl.telemetry.text import number, one_line

COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def curve(title: str, series: Series, *, width: int, height: int, style: str) -> list[Text]:
    """`height` lines of at most `width` cells: a title with the newest value, then the curve."""
    newest = number(series[-1][1]) if series else "no values yet"
    head = one_line(Text.assemble((title, "bold"), " ", newest), width)
    if len(series) < 2 or height < 5:
        return [head]
    import plotext  # 0.15 s: not needed by who only reads states

    steps, values = _thinned(series, 2 * width)
    low, high = min(values), max(values)
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    figure = plotext.figure
    figure.clear()
    figure.plot_size(width, height - 1)
    figure.draw(figure.signal(steps, values, marker="braille"))
    # Its own limits and ticks misplace a flat curve.
    marks = [low, (low + high) / 2, high]
    figure.ruler("y").lim(low, high)
    figure.ruler("y").ticks(marks, [number(mark, 2) for mark in marks])
    figure.ruler("x").lim(steps[0], steps[-1])
    figure.ruler("x").ticks([steps[0], steps[-1]], [str(steps[0]), str(steps[-1])])
    lines = COLOUR.sub("", str(figure.build())).rstrip("\n").split("\n")
    return [head, *(one_line(Text(line, style=style), width) for line in lines)]


def _thinned(series: Series, most: int) -> tuple[list[int], list[float]]:
    """At most `most` points: means of equal runs, between the first step and the last."""
    size = -(-len(series) // most)
    runs = [series[start : start + size] for start in range(0, len(series), size)]
    return [series[0][0], *(run[-1][0] for run in runs[1:])], [sum(value for _, value in run) / len(run) for run in runs]
