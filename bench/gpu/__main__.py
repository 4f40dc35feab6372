"""Measures the GPUs of this machine: engine, copies, transfers, generator, learner, a loop (docs/gpu.md).

    python -m bench.gpu [--device cpu] [--model DIRECTORY] [--json]

The exit status is 1 if a row failed.
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from asyncrl.cli.screens import VERDICT_STYLES
from asyncrl.errors import AsyncRLError
from asyncrl.telemetry.text import visible
from bench.gpu.kit import Result, check, open_place


def show(result: Result, console: Console) -> None:
    """Print a row: a line for each figure, with its limit."""
    style = VERDICT_STYLES[result.verdict]
    took = f"{result.seconds:.0f} s of at most {result.limit_s:.0f} s"
    console.print(Text.assemble((result.name, f"bold {style}"), f"  {took}"), soft_wrap=True)
    for figure in result.figures:
        value = "" if figure.value is None else f"{figure.value:.4g} {figure.unit}".strip()
        line = Text.assemble(
            (f"  {figure.verdict:<10}", VERDICT_STYLES.get(figure.verdict, "dim")),
            f"{figure.name:<58}{value:<18}",
            (f"{figure.limit:<16}", "dim"),
        )
        console.print(line.append(visible(figure.note), "dim"), soft_wrap=True)
    if result.problem:
        console.print(
            Text(f"  failed    {visible(result.problem)}", VERDICT_STYLES["failed"]), soft_wrap=True
        )


def main(words: list[str] | None = None) -> int:
    """Run the check; return the exit status."""
    parser = argparse.ArgumentParser("python -m bench.gpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal")
    parser.add_argument("--model", type=Path, help="a model's directory; default: random weights")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    given = parser.parse_args(words)
    place = open_place(given.device, given.model)
    console, results = Console(highlight=False), []
    for result in check(place):
        results.append(result)
        if not given.json:
            show(result, console)
    file = place.directory / "result.json"
    failed = [result.name for result in results if result.verdict == "failed"]
    if given.json:
        print(file.read_text())
    else:
        said = f"failed: {', '.join(failed)}" if failed else f"all {len(results)} rows passed"
        console.print(f"{said}; figures and logs: {file}", style="bold", soft_wrap=True)
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AsyncRLError as error:
        sys.exit(f"{type(error).__name__}: {error}")
