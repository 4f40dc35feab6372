"""Commands for the results of a run."""

import json
from pathlib import Path
from typing import Annotated

import typer

from asyncrl.cli.arguments import ConfigOption, RunArgument, Words, config_and_overrides

app = typer.Typer()

BestOption = Annotated[
    bool, typer.Option("--best", help="The checkpoint that checkpoint.best keeps, not the newest.")
]


@app.command("eval")
def evaluate(
    model: Annotated[str, typer.Argument(help="A run (its newest checkpoint) or a model directory.")],
    words: Words = None,
    config: ConfigOption = None,
    best: BestOption = False,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="A set of data.eval by its name; by default all.")
    ] = None,
) -> None:
    """Evaluate a checkpoint or model on held-out prompts: of the given config, or of the run's own."""
    from asyncrl.config.data_section import error_of
    from asyncrl.results.evaluate import evaluate_model
    from asyncrl.telemetry.history import score

    metrics = evaluate_model(model, *config_and_overrides(words, config), best=best, only=only or ())
    for name in metrics:
        if error_of(name) in metrics:
            typer.echo(f"{name}: {score(metrics, name)}", err=True)
    typer.echo(json.dumps(metrics, indent=1))


@app.command()
def report(
    run: RunArgument = None,
    to: Annotated[Path | None, typer.Option("--to", help="HTML file; default: RUN/report.html.")] = None,
) -> None:
    """Write one HTML page with all metrics, samples and settings of a run; it opens without a network."""
    from asyncrl.results.run_page import write_report

    path = write_report(run, to)
    typer.echo(f"{path} ({path.stat().st_size / 1e6:.1f} MB); it needs no network and no other file")


@app.command()
def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="Two or more run directories or names.", show_default=False)
    ],
    to: Annotated[Path | None, typer.Option("--to", help="HTML file with the curves of all runs.")] = None,
) -> None:
    """Compare runs: results, time, and the settings in which they differ."""
    from asyncrl.cli.screens import show_tables
    from asyncrl.results.compare import compare_runs

    show_tables(compare_runs(runs, to))
    if to:
        typer.echo(to)


@app.command()
def export(
    run: RunArgument = None,
    to: Annotated[Path, typer.Option("--to", help="New directory.")] = Path("export"),
    merge: Annotated[bool, typer.Option("--merge", help="Add the adapter to the model's weights.")] = False,
    best: BestOption = False,
) -> None:
    """Copy the newest checkpoint as a Hugging Face model directory, with a model card."""
    from asyncrl.results.export import export_model, serve_command
    from asyncrl.run.directory import find_run

    source = export_model(find_run(run), to, merge=merge, best=best)
    done = "merged into" if merge else "copied to"
    typer.echo(f"{source} {done} {to}; serve it with: {serve_command(to, str(to))}")
