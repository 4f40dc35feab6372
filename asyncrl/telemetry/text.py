"""Text and numbers for a terminal. A model's text is never read as markup; its control codes are visible."""

import math
import unicodedata

from rich.text import Text

SIGNS = {chr(code): chr(0x2400 + code) for code in range(32)} | {"\n": "↵", "\t": "⇥", "\x7f": "␡"}
# Cc: C1 controls; Cf: bidirectional overrides, zero widths; Cs: half an emoji; Zl, Zp: line separators.
HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def visible(text: str) -> str:
    """Replace every character that could move the cursor, colour or reorder text by a sign."""
    return "".join(
        SIGNS.get(one) or (f"\\u{ord(one):04x}" if unicodedata.category(one) in HIDDEN else one)
        for one in text
    )


def visible_lines(text: str) -> str:
    """`visible` for each line of a text."""
    return "\n".join(visible(line) for line in text.split("\n"))


def one_line(text: Text, width: int) -> Text:
    """Cut a line to `width` cells, with an ellipsis where text is missing."""
    text.no_wrap = True
    text.truncate(width, overflow="ellipsis")
    return text


def number(value: float | None, digits: int = 3) -> str:
    """Return a number in short form: 0.512, 12.3, 1.2e-05; `-` when unknown."""
    if value is None or math.isnan(value):
        return "-"
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.{digits}g}" if abs(value) < 10**digits - 0.5 else f"{value:,.0f}"
    return f"{value:.2g}"


def share(value: float | None) -> str:
    """Return a share as a percentage; `-` when unknown."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.1%}" if 0 < value < 0.1 else f"{value:.0%}"


def duration(seconds: float | None) -> str:
    """Return a time span such as 5s, 3m07s, 2h05m or 3d04h; `-` when unknown."""
    if seconds is None:
        return "-"
    whole = int(seconds)
    for unit, small, size in (("d", "h", 86400), ("h", "m", 3600), ("m", "s", 60)):
        if whole >= size:
            rest = whole % size // 3600 if unit == "d" else whole % size * 60 // size
            return f"{whole // size}{unit}{rest:02d}{small}"
    return f"{whole}s"


def data_size(size_bytes: float) -> str:
    """Return a size such as 12.3 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} GiB"
