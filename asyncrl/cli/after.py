"""Commands for what a run leaves behind."""

from pathlib import Path
from typing import Annotated

import typer

from asyncrl.cli.arguments import ConfigOption, MaybeWords, config_and_overrides
from asyncrl.cli.options import RunArgument

app = typer.Typer()


@app.command("eval")
def evaluate(
    model: Annotated[str, typer.Argument(help="A run (its newest checkpoint) or a model directory.")],
    words: MaybeWords = None,
    config: ConfigOption = None,
) -> None:
    """Evaluate a checkpoint or model on the held-out prompts of a config, which a run has and a model directory has not."""
    from asyncrl.results.evaluate import evaluate_model

    raise typer.Exit(evaluate_model(model, *config_and_overrides(words, config)))


@app.command()
def report(
    run: RunArgument = None,
    to: Annotated[Path | None, typer.Option("--to", help="HTML file; default: report.html in the run directory.")] = None,
) -> None:
    """Write one HTML page with all there is to see of a run; it opens without a network."""
    from asyncrl.results.run_page import write_report

    write_report(run, to)


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Two or more run directories or names.", show_default=False)],
    to: Annotated[Path | None, typer.Option("--to", help="HTML file with the curves of all runs.")] = None,
) -> None:
    """Compare runs: results, time, and the settings in which they differ."""
    from asyncrl.results.compare import compare_runs

    compare_runs(runs, to)


@app.command()
def analyze(
    run: RunArgument = None,
    names: Annotated[
        list[str] | None, typer.Argument(help="Metrics or globs; default: list what there is.", show_default=False)
    ] = None,
    to: Annotated[Path | None, typer.Option("--to", help=".html with curves or .csv with all values.")] = None,
) -> None:
    """Statistics, values and curves of any metrics of a run."""
    from asyncrl.results.analyze import analyze_run

    analyze_run(run, names or [], to)


@app.command()
def export(run: RunArgument = None, to: Annotated[Path, typer.Option("--to", help="New directory.")] = Path("export")) -> None:
    """Copy the newest checkpoint as a Hugging Face model directory, with a model card."""
    from asyncrl.results.export import export_run

    export_run(run, to)
