"""Commands that watch, scale and stop a run."""

import json
from typing import Annotated

import typer

from asyncrl.cli.arguments import Json, RunArgument, StoreOption

app = typer.Typer()


@app.command()
def status(
    run: RunArgument = None,
    as_json: Json = False,
    watch: Annotated[bool, typer.Option(help="Keep showing the dashboard while the run is up.")] = False,
) -> None:
    """Show the progress and health of a run."""
    from rich.console import Console

    from asyncrl.commands.inspect import status_values
    from asyncrl.run.directory import find_run
    from asyncrl.telemetry import live
    from asyncrl.telemetry.dashboard import render
    from asyncrl.telemetry.state import read_state

    directory = find_run(run)
    if watch:
        live.watch(directory.path, over=lambda: not directory.is_up)
    elif as_json:
        typer.echo(json.dumps(status_values(directory)))
    else:
        console = Console()
        console.print(render(read_state(directory.path), console.width))


@app.command()
def logs(
    run: RunArgument = None,
    name: Annotated[
        str | None,
        typer.Argument(
            help="A process or host, such as g0 or generators-1: the last MiB that it printed. "
            "Default: warnings and errors of all processes.",
            show_default=False,
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Show new lines until the run ends.")
    ] = False,
) -> None:
    """Show what the processes and hosts of a run have logged."""
    from asyncrl.results.recorded import logs_of

    for text in logs_of(run, name, follow=follow):
        typer.echo(text, nl=False)


@app.command()
def samples(
    run: RunArgument = None,
    count: Annotated[int, typer.Option(min=1)] = 5,
    step: Annotated[int | None, typer.Option(help="Only of this step.")] = None,
    kind: Annotated[
        str | None,
        typer.Option(help="train, dropped, or eval: all of one evaluation, by default the newest."),
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="Highest rewards instead of the newest.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Lowest rewards instead of the newest.")] = False,
    dropped: Annotated[bool, typer.Option("--dropped", help="Only untrained ones, with the reason.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show new ones until the run ends.")] = False,
    pairs: Annotated[
        bool, typer.Option("--pairs", help="Print all preferences as JSON lines, for TRL.")
    ] = False,
) -> None:
    """Show rollouts: prompt, response, reward parts, versions of the tokens."""
    from asyncrl.cli.screens import show_samples
    from asyncrl.results.recorded import pairs_of, samples_of, wanted

    if pairs:
        for line in pairs_of(run):
            typer.echo(line)
        return
    chosen = wanted(count, step, kind, best=best, worst=worst, dropped=dropped)
    show_samples(samples_of(run, chosen, follow=follow))


@app.command()
def audit(run: RunArgument = None, store: StoreOption = None) -> None:
    """Show where each issued id is, which proves that no group was lost or trained twice."""
    from asyncrl.commands.inspect import audit_run, require_whole
    from asyncrl.telemetry.jsonl import to_json

    found = audit_run(run, store_url=store)
    typer.echo(json.dumps(to_json(found), indent=1))
    require_whole(found)


@app.command()
def scale(
    change: Annotated[
        str, typer.Argument(help="generators=+2, generators=-1 or generators=4.", metavar="CHANGE")
    ],
    run: RunArgument = None,
) -> None:
    """Start or drain generators of a run that is up; those that leave give their tickets back."""
    from asyncrl.commands.scale import scale_run

    before, wanted, came, went = scale_run(change, run)
    started = f"; started: {', '.join(came)} (the model is loaded first)" if came else ""
    left = f"; left: {', '.join(went)} (their tickets are given back)" if went else ""
    typer.echo(f"generators: {before} -> {wanted}{started}{left}")


@app.command()
def down(run: RunArgument = None) -> None:
    """Let a run finish its step and save; end all of its processes. Ctrl-C ends them without saving."""
    from asyncrl.commands.down import end_run, what_is_saved
    from asyncrl.run.directory import find_run

    directory = find_run(run)
    killed = end_run(directory, report=lambda text: typer.echo(f"{directory.path}: {text}"))
    result = "was not up" if killed is None else "stopped"
    by_force = f" ({killed} had to be killed)" if killed else ""
    saved = f"; {found}" if killed is not None and (found := what_is_saved(directory)) else ""
    typer.echo(f"{directory.path}: {result}, no process is left{by_force}{saved}")
