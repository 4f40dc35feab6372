"""A curve in characters."""

import functools
import re

import numpy as np
from rich.text import Text

from asyncrl.telemetry.history import Series, thinned
from asyncrl.telemetry.text import number, one_line

COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def curve(title: str, series: Series, *, width: int, height: int, style: str) -> list[Text]:
    """`height` lines of at most `width` cells: a title with the newest value, then the curve."""
    return [line.copy() for line in _drawn(title, series, width, height, style)]


@functools.lru_cache(maxsize=8)
def _drawn(title: str, series: Series, width: int, height: int, style: str) -> tuple[Text, ...]:
    """Kept, because drawing is most of what a dashboard costs, and between two steps nothing changes."""
    newest = number(series[-1][1]) if series else "no values yet"
    head = one_line(Text.assemble((title, "bold"), " ", newest), width)
    if len(series) < 2 or height < 5 or width < 10:
        return (head,)
    import plotext  # 0.15 s: not needed by who only reads states

    steps, values = _resampled(series, 2 * width)
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
    figure.ruler("x").ticks([steps[0], steps[-1]], [f"{steps[0]:.0f}", f"{steps[-1]:.0f}"])
    lines = COLOUR.sub("", str(figure.build())).rstrip("\n").split("\n")
    return (head, *(one_line(Text(line, style=style), width) for line in lines))


def _resampled(series: Series, points: int) -> tuple[list[float], list[float]]:
    """`points` points from the first step to the last, on straight lines between the values, or between means of equal runs."""
    steps, values = zip(*thinned(series, points), strict=True)
    places = np.linspace(series[0][0], steps[-1], points)
    return places.tolist(), np.interp(places, steps, values).tolist()
