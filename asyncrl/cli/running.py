"""Commands that start, watch and stop a run."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncrl.cli.arguments import ConfigOption, Json, RunArgument, StoreOption, Words, required_config
from asyncrl.hosting.processes import module_argv

if TYPE_CHECKING:
    from asyncrl.config.schema import Config

app = typer.Typer()
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
    from asyncrl.preflight.checks.gpu import gpu_doubts, require_usable_gpus
    from asyncrl.preflight.doubts import doubts, require_device
    from asyncrl.preflight.fit import HOST_SLOTS, require_fit, with_slots
    from asyncrl.preflight.validate import validated_config

    checked = validated_config(file, overrides, resumes=resumes, generators=generators, asks_hub=True)
    require_device(checked)
    require_usable_gpus(checked)
    placed = with_slots(checked, generators=generators)
    found = [*doubts(checked, file, overrides, generators=generators), *gpu_doubts(checked)]
    found += [HOST_SLOTS] * (placed != checked)
    found += require_fit(placed, generators=generators)
    for doubt in found:
        typer.echo(f"! {doubt}", err=True)
    return placed


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
    from asyncrl.errors import ConfigError

    # Its problems are reported with those that validation finds.
    draft = read_draft(Config, file, overrides).config
    if back_to is not None and (fresh or (draft is not None and draft.cluster.kind is not None)):
        raise ConfigError("found --from with --fresh or with a cluster.kind; leave one of them out")
    if draft is None or draft.cluster.kind is None:
        if dry_run:
            raise ConfigError(f"found --dry-run, but {file} sets no cluster.kind; set it, or leave it out")
        return _run(file, overrides, fresh=fresh, generators=True, plain=plain, back_to=back_to)
    from asyncrl.cli.foreground import run_on_hosts
    from asyncrl.cluster.driver import wants_gpus
    from asyncrl.cluster.plans import LEARNER, described
    from asyncrl.cluster.slurm import allocation, run_script
    from asyncrl.commands.hosts import become_host, manifests
    from asyncrl.hosting.route import in_clear, reaches
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
        typer.echo(f"! {in_clear(reaches(checked, LEARNER))}", err=True)
        typer.echo(manifests(checked, fresh=fresh, with_keys=not dry_run), nl=False)
        return 0
    submits = checked.cluster.kind == "slurm" and not allocation()
    command = module_argv("asyncrl.cli.main", "up", "--plain", "--config", str(file), *overrides)
    if dry_run:
        if submits:
            typer.echo(run_script(checked, command))
        for line in described(checked, on_gpus=wants_gpus(checked)):
            typer.echo(line)
        return 0
    become_host(checked, fresh=fresh)
    return run_on_hosts(checked, fresh=fresh, plain=plain, command=command if submits else None)


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
    from asyncrl.quickstart.shipped import place

    config = Path("configs/quickstart.yaml")
    load_config(config, words or ())  # reports mistakes in the overrides before anything is written
    place(Path(QUICKSTART), typer.echo)
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
    from asyncrl.cli.foreground import stop_on_signals
    from asyncrl.commands.rank_host import started_ranks

    checked = _checked(config, [], resumes=False, generators=False)
    found = started_ranks(checked, config, host, learner=learner)
    with found as run, stop_on_signals(run.supervisor) as stopped:
        run.wait(lambda: None)
    raise typer.Exit(0 if run.supervisor.is_over else stopped.status)


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
    from asyncrl.cli.foreground import stop_on_signals
    from asyncrl.commands.join import joined

    check = partial(_check_host, count)
    found = joined(
        count,
        config,
        store_url=store,
        allowed=allow or [],
        wait_s=wait,
        report=typer.echo,
        check=check,
        name=name,
    )
    with found as run, stop_on_signals(run.supervisor) as stopped:
        run.wait(lambda: None)
    raise typer.Exit(stopped.status)


def _check_host(generators: int, config: "Config") -> None:
    """Check this machine for generators that join, print doubts about it. Raises ConfigError, DataError."""
    from asyncrl.preflight.checks.gpu import gpu_doubts, require_usable_gpus
    from asyncrl.preflight.doubts import require_device
    from asyncrl.preflight.fit import require_room

    require_device(config)
    require_usable_gpus(config)
    require_room(config, generators)
    for doubt in gpu_doubts(config):
        typer.echo(f"! {doubt}", err=True)


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
    from asyncrl.commands.down import end_run
    from asyncrl.commands.stopping import what_is_saved
    from asyncrl.run.directory import find_run

    directory = find_run(run)
    killed = end_run(directory, report=lambda text: typer.echo(f"{directory.path}: {text}"))
    result = "was not up" if killed is None else "stopped"
    by_force = f" ({killed} had to be killed)" if killed else ""
    saved = f"; {found}" if killed is not None and (found := what_is_saved(directory)) else ""
    typer.echo(f"{directory.path}: {result}, no process is left{by_force}{saved}")
