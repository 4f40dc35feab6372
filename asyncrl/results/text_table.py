"""A table of text, for a terminal here and for a page by `page`."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table as TerminalTable
from rich.text import Text

from asyncrl.telemetry.text import visible


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under a head."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""


def terminal_table(table: Table) -> TerminalTable:
    """For a rich console. Cells are never markup, and what could move the cursor is shown as a sign."""
    shown = TerminalTable(title=table.title or None, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(table.head):
        shown.add_column(Text(visible(name)), overflow="fold", no_wrap=index == 0)
    for row in table.rows:
        shown.add_row(*(Text(visible(cell)) for cell in row))
    return shown
