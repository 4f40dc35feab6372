"""Commands that start runs: one, its parts on several hosts, or one after the other."""

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncrl.cli.arguments import ConfigOption, StoreOption, Words, required_config
from asyncrl.errors import AsyncRLError, ConfigError, from_extra
from asyncrl.hosting.processes import module_argv

if TYPE_CHECKING:
    from asyncrl.config.schema import Config

app, series = typer.Typer(), typer.Typer()
Fresh = Annotated[bool, typer.Option(help="Delete the files of an earlier run of this name.")]
Plain = Annotated[bool, typer.Option(help="Lines instead of the dashboard.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="With cluster.kind: print what each host would run.")]


def _run(
    file: Path,
    overrides: list[str],
    *,
    fresh: bool,
    generators: bool,
    plain: bool,
    join_key: Path | None = None,
    back_to: int | None = None,
) -> int:
    """Check the config for this machine, print doubts about it, and run it; return the exit status."""
    checked = _checked(file, overrides, resumes=not fresh, generators=generators)
    from asyncrl.cli.foreground import run_here

    if back_to is not None:
        from asyncrl.run.directory import RunDirectory
        from asyncrl.run.saved import go_back

        go_back(RunDirectory(checked.run.directory), back_to)
    return run_here(checked, fresh=fresh, generators=generators, plain=plain, join_key=join_key)


def _checked(file: Path, overrides: list[str], *, resumes: bool, generators: bool) -> "Config":
    """Return the config of a learner after checking it for this machine; print doubts about it."""
    from asyncrl.preflight.fit import fitting

    checked, doubts = fitting(file, overrides, resumes=resumes, generators=generators)
    for doubt in doubts:
        typer.echo(f"! {doubt}", err=True)
    return checked


def run_up(
    file: Path,
    overrides: list[str],
    *,
    fresh: bool,
    plain: bool,
    dry_run: bool = False,
    back_to: int | None = None,
) -> int:
    """Run on this machine, or on the hosts of `cluster.kind`; return the exit status.

    For Kubernetes print manifests instead.
    """
    from asyncrl.config.load import read_draft
    from asyncrl.config.schema import Config

    # Its problems are reported with those that validation finds.
    draft = read_draft(Config, file, overrides).config
    if back_to is not None and (fresh or (draft is not None and draft.cluster.kind is not None)):
        raise ConfigError("found --from with --fresh or with a cluster.kind; leave one of them out")
    if draft is None or draft.cluster.kind is None:
        if dry_run:
            raise ConfigError(f"found --dry-run, but {file} sets no cluster.kind; set it, or leave it out")
        return _run(file, overrides, fresh=fresh, generators=True, plain=plain, back_to=back_to)
    from asyncrl.cli.foreground import print_manifests, run_on_hosts
    from asyncrl.commands.hosts import become_host, dry_lines
    from asyncrl.preflight.validate import validated_config

    is_here = draft.cluster.kind != "kubernetes"
    options = {"resumes": is_here and not fresh, "generators": False, "asks_hub": True, "on_hosts": True}
    checked = validated_config(file, overrides, **options)
    if not is_here:
        if not dry_run and sys.stdout.isatty():
            raise ConfigError(
                "the manifests hold the run's keys, and standard output is a terminal that would show them; "
                "add `| kubectl apply -f -`, or --dry-run, which leaves the keys out"
            )
        print_manifests(checked, fresh=fresh, with_keys=not dry_run)
        return 0
    command = module_argv("asyncrl.cli.main", "up", "--plain", "--config", str(file), *overrides)
    if dry_run:
        for line in dry_lines(checked, command):
            typer.echo(line)
        return 0
    become_host(checked, fresh=fresh)
    return run_on_hosts(checked, command, fresh=fresh, plain=plain)


def run_stage(file: Path, overrides: list[str], *, fresh: bool, plain: bool) -> int:
    """Check the config of a stage, and run it; return the exit status."""
    from asyncrl.stages.settings import validated_stage

    checked = validated_stage(file, overrides)
    from asyncrl.cli.foreground import stage_here

    return stage_here(checked, fresh=fresh, plain=plain)


@app.command()
def up(
    words: Words = None,
    config: ConfigOption = None,
    fresh: Fresh = False,
    plain: Plain = False,
    dry_run: DryRun = False,
    back_to: Annotated[
        int | None, typer.Option("--from", metavar="STEP", help="Go on from this kept checkpoint.")
    ] = None,
) -> None:
    """Train on this machine: store, learner, generators, dashboard. The same command resumes a run.

    With cluster.kind: on many hosts. For kubernetes, print what `kubectl apply -f -` takes.
    """
    file, overrides = required_config(words, config)
    raise typer.Exit(run_up(file, overrides, fresh=fresh, plain=plain, dry_run=dry_run, back_to=back_to))


@app.command()
def stage(
    words: Words = None, config: ConfigOption = None, fresh: Fresh = False, plain: Plain = False
) -> None:
    """Train on given data, by TRL: answers, preferences, a reward model. The same command resumes."""
    raise typer.Exit(run_stage(*required_config(words, config), fresh=fresh, plain=plain))


@app.command()
def quickstart(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="What to change in the config.", show_default=False),
    ] = None,
    fresh: Fresh = False,
    plain: Plain = False,
    dry_run: DryRun = False,
) -> None:
    """Train a tiny model that can hardly add, with the whole system, without GPU or download.

    Model and data go to build/quickstart, the run to runs/quickstart, both below the current directory.
    """
    from asyncrl.config.load import load_config
    from asyncrl.config.named_files import QUICKSTART
    from asyncrl.quickstart.first_task import place_model

    config = Path("configs/quickstart.yaml")
    load_config(config, words or ())  # reports mistakes in the overrides before anything is written
    place_model(Path(QUICKSTART), typer.echo)
    up(words, config, fresh=fresh, plain=plain, dry_run=dry_run)


@app.command()
def learner(
    words: Words = None,
    config: ConfigOption = None,
    fresh: Fresh = False,
    join_key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the generators' key there too, if they cannot read RUN."),
    ] = None,
) -> None:
    """Run the learner, and a store if none is configured; generators join by `asyncrl generator`."""
    file, overrides = required_config(words, config)
    raise typer.Exit(_run(file, overrides, fresh=fresh, generators=False, plain=True, join_key=join_key))


@app.command()
def rank(
    config: Annotated[Path, typer.Option("--config", "-c", metavar="FILE", help="That of the learner.")],
    host: Annotated[int, typer.Option(help="The number of this host: 1 to cluster.learner_hosts - 1.")],
    learner: Annotated[
        str, typer.Option(help="The address of host 0, of `asyncrl learner`.", metavar="ADDRESS")
    ],
) -> None:
    """Run the ranks of a further host of the learner; `asyncrl up` with cluster.learner_hosts calls it."""
    from asyncrl.cli.foreground import until_end
    from asyncrl.commands.rank_host import started_ranks

    checked = _checked(config, [], resumes=False, generators=False)
    raise typer.Exit(until_end(started_ranks(checked, config, host, learner=learner)))


@app.command()
def generator(
    count: Annotated[int, typer.Option(min=1, help="Generators to start on this host.")] = 1,
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", metavar="FILE", help="Default: the run's own config, from the store."),
    ] = None,
    store: StoreOption = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            help="Code or variable that the run's own config may use on this host: a reward's FILE.py or "
            "module, model:PATH for the code that comes with a model, command:LINE, vllm:NAME=VALUE, "
            "variable:NAME. May be repeated.",
            metavar="WHAT",
        ),
    ] = None,
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for a run that is not up yet.", metavar="SECONDS")
    ] = 0.0,
    name: Annotated[
        str | None, typer.Option(help="How their ids begin; default: host name and process id.")
    ] = None,
) -> None:
    """Run generators that join a run. With neither --config nor --store, the newest run on this host."""
    from asyncrl.cli.foreground import until_end
    from asyncrl.commands.join import joined

    found = joined(
        count,
        config,
        store_url=store,
        allowed=allow or [],
        wait_s=wait,
        report=typer.echo,
        check=partial(_check_host, count),
        name=name,
    )
    raise typer.Exit(until_end(found))


def _check_host(generators: int, config: "Config") -> None:
    """Check this machine for generators that join, print doubts about it. Raises ConfigError, DataError."""
    from asyncrl.preflight.fit import room_doubts

    for doubt in room_doubts(config, generators):
        typer.echo(f"! {doubt}", err=True)


@series.command()
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


@series.command()
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
