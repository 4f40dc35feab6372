"""A curve drawn with characters."""

import functools
import re

import numpy as np
from rich.text import Text

from asyncrl.telemetry.history import Series, thinned
from asyncrl.telemetry.text import number, one_line

COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def curve(title: str, series: Series, *, width: int, height: int, style: str) -> list[Text]:
    """Return `height` lines of at most `width` cells: a title with the newest value, then the curve."""
    return [line.copy() for line in _drawn(title, series, width, height, style)]


@functools.lru_cache(maxsize=8)
def _drawn(title: str, series: Series, width: int, height: int, style: str) -> tuple[Text, ...]:
    """Cached, because drawing dominates the cost of a dashboard and nothing changes between two steps."""
    newest = number(series[-1][1]) if series else "no values yet"
    head = one_line(Text.assemble((title, "bold"), " ", newest), width)
    if len(series) < 2 or height < 5 or width < 10:
        return (head,)
    import plotext  # takes 0.15 s, which commands that draw no curve need not spend

    # Two points per column: on straight lines between few values, means of equal runs of many.
    known_steps, known = zip(*thinned(series, 2 * width), strict=True)
    places = np.linspace(series[0][0], known_steps[-1], 2 * width)
    steps, values = places.tolist(), np.interp(places, known_steps, known).tolist()
    low, high = min(values), max(values)
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    figure = plotext.figure
    figure.clear()
    figure.plot_size(width, height - 1)
    figure.draw(figure.signal(steps, values, marker="braille"))
    # plotext's default limits and ticks misplace a flat curve.
    marks = [low, (low + high) / 2, high]
    figure.ruler("y").lim(low, high)
    figure.ruler("y").ticks(marks, [number(mark, 2) for mark in marks])
    figure.ruler("x").lim(steps[0], steps[-1])
    figure.ruler("x").ticks([steps[0], steps[-1]], [f"{steps[0]:.0f}", f"{steps[-1]:.0f}"])
    lines = COLOUR.sub("", str(figure.build())).rstrip("\n").split("\n")
    return (head, *(one_line(Text(line, style=style), width) for line in lines))
