"""Commands that do one run or stage after the other."""

from pathlib import Path
from typing import Annotated

import typer

from asyncrl.cli.arguments import ConfigOption, Words, required_config
from asyncrl.cli.running import Fresh, Plain, run_stage, run_up
from asyncrl.errors import AsyncRLError, from_extra

app = typer.Typer()


@app.command()
def pipeline(
    words: Words = None, config: ConfigOption = None, fresh: Fresh = False, plain: Plain = False
) -> None:
    """Run stages in order, each from the model of the one before, and at their end a run.

    The same command goes on with the first that is not finished.
    """
    from asyncrl.stages.pipeline import planned

    links = planned(*required_config(words, config))
    for number, link in enumerate(links, start=1):
        typer.echo(f"{number} of {len(links)}: {link.file}")
        run = run_stage if link.is_stage else run_up
        if status := run(link.file, link.overrides, fresh=fresh, plain=plain):
            raise typer.Exit(status)


@app.command()
def sweep(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILE] [KEY=A,B,...]...", help="The YAML file, and values to try."),
    ] = None,
    config: ConfigOption = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs with other seeds of each combination.")] = 1,
) -> None:
    """Do one run for each combination of values, one after the other, and compare them on one page.

    The same command resumes. The other runs go on if one fails; the exit status is then 1.
    """
    from asyncrl.cli.screens import show_tables
    from asyncrl.commands.sweep import page_of, swept
    from asyncrl.preflight.validate import validated_config
    from asyncrl.results.compare import compare_runs, over_seeds

    file, overrides = required_config(words, config)
    trials, failed = swept(file, overrides, seeds), list[Path]()
    for trial in trials:
        validated_config(file, trial.overrides, resumes=True, on_hosts=True)
    with from_extra("report"):  # the page needs it, after hours
        import plotly  # noqa: F401
    for number, trial in enumerate(trials, start=1):
        typer.echo(f"{number} of {len(trials)}: {trial.directory.path}")
        try:
            status = run_up(file, trial.overrides, fresh=False, plain=False)
        except (AsyncRLError, OSError) as error:
            typer.echo(f"{trial.directory.path} failed: {error}", err=True)
            failed.append(trial.directory.path)
            continue
        if status:  # a signal has stopped it
            raise typer.Exit(status)
    begun = [trial for trial in trials if trial.directory.config.exists()]
    if len(begun) > 1:
        page, paths = page_of(trials), [trial.directory.path for trial in begun]
        means = [over_seeds([(trial.values, trial.directory) for trial in trials])] if seeds > 1 else []
        show_tables(compare_runs(paths, page, means))
        typer.echo(page)
    if failed:
        typer.echo(f"failed: {', '.join(map(str, failed))}; the same command tries them again", err=True)
        raise typer.Exit(1)
