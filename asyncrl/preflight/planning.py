"""`asyncrl plan`: what a config asks of its machine, each number with how it is formed, before anything is started."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from asyncrl.config.schema import Config
from asyncrl.data.dataset import load_rows
from asyncrl.errors import DataError
from asyncrl.preflight.doubts import doubts
from asyncrl.preflight.forecast import Forecast, forecast
from asyncrl.preflight.machine import read_shape, this_machine
from asyncrl.preflight.validate import validated_config


def show_plan(config_path: Path, overrides: Sequence[str], *, as_json: bool) -> None:
    """Print the table and the warnings."""
    config = validated_config(config_path, overrides)
    plan = forecast(config, read_shape(config.model), this_machine(), rows=count_rows(config))
    plan = replace(plan, warnings=(*doubts(config, config_path, overrides), *plan.warnings))
    if as_json:
        print(json.dumps({"lines": [asdict(line) for line in plan.lines], "warnings": plan.warnings}, indent=1))  # noqa: T201
        return
    console = Console(highlight=False)
    console.print(table(plan))
    for warning in plan.warnings:
        console.print(Text(f"! {warning}", "bold yellow"), soft_wrap=True)
    if not plan.warnings:
        console.print(Text("it fits this machine, as far as these numbers tell", "green"))


def table(plan: Forecast) -> Table:
    """For people."""
    made = Table(box=None, pad_edge=False, show_header=False)
    made.add_column()
    made.add_column(justify="right", no_wrap=True)
    made.add_column(style="dim")
    section = ""
    for line in plan.lines:
        if line.section != section:
            section = line.section
            made.add_row(Text(section, "bold"), "", "")
        made.add_row(f"  {line.name}", line.shown, Text(line.formed))
    return made


def count_rows(config: Config) -> int | None:
    """Rows of the training data; None where that cannot be told here."""
    try:
        return len(load_rows(config.data.train, config.data.split))
    except DataError:
        return None
