"""Runs in the foreground of a command: their screen, the signals that stop them, the result at the end."""

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import FrameType, SimpleNamespace

import typer
from rich.console import Console
from rich.text import Text

from asyncrl.best_effort import BestEffort
from asyncrl.cluster.plans import LEARNER
from asyncrl.commands.down import what_is_saved
from asyncrl.commands.hosts import manifests, started_on_hosts, submits, submitted
from asyncrl.commands.stage import started_stage
from asyncrl.commands.supervising import StartedRun
from asyncrl.commands.up import started
from asyncrl.config.schema import Config
from asyncrl.hosting.route import in_clear, reaches
from asyncrl.hosting.supervisor import Supervisor
from asyncrl.lora import SETTINGS
from asyncrl.run.directory import RunDirectory
from asyncrl.run.saved import nothing_left, read_saved
from asyncrl.stages.record import is_finished, read_stage, refuse_changed_stage
from asyncrl.stages.rows import fixed_values
from asyncrl.stages.settings import StageConfig
from asyncrl.telemetry.dashboard import sample_lines
from asyncrl.telemetry.history import of_sets, set_of
from asyncrl.telemetry.live import Dashboard, viewer
from asyncrl.telemetry.state import read_state

# Metrics whose first and last value are shown at the end, of runs and of stages.
RESULTS = ("eval/accuracy", "eval/reward_mean", "reward/mean", "eval/loss", "eval/rewards/accuracies")


def run_here(
    config: Config, *, fresh: bool, generators: bool, plain: bool, join_key: Path | None = None
) -> int:
    """Run as `commands.up` does until the end or a stop, and return the exit status. Raises RunError."""
    directory, lines = RunDirectory(config.run.directory), _as_lines(plain)
    saved = None if fresh else read_saved(directory)
    if not fresh and (reason := nothing_left(config, directory, saved)):
        typer.echo(reason)
        return 0
    with started(config, saved, fresh=fresh, generators=generators, console=lines, join_key=join_key) as run:
        return _watched(run, directory, lines=lines)


def run_on_hosts(config: Config, command: Sequence[str], *, fresh: bool, plain: bool) -> int:
    """Run as `commands.hosts` does until the end or a stop, and return the exit status. Raises RunError.

    Outside a job of Slurm only submit one, in which `command` does so.
    """
    directory, lines = RunDirectory(config.run.directory), _as_lines(plain)
    if not fresh and (reason := nothing_left(config, directory, read_saved(directory))):
        typer.echo(reason)
        return 0
    typer.echo(f"! {in_clear(reaches(config, LEARNER))}", err=True)
    if submits(config):
        for line in submitted(config, command, fresh=fresh):
            typer.echo(line)
        return 0
    with started_on_hosts(config, fresh=fresh, console=lines) as run:
        return _watched(run, directory, lines=lines, own="driver")


def print_manifests(config: Config, *, fresh: bool, with_keys: bool) -> None:
    """Print what `kubectl apply -f -` takes. Raises RunError."""
    typer.echo(f"! {in_clear(reaches(config, LEARNER))}", err=True)
    typer.echo(manifests(config, fresh=fresh, with_keys=with_keys), nl=False)


def stage_here(config: StageConfig, *, fresh: bool, plain: bool) -> int:
    """Run a stage as `commands.stage` does until the end or a stop, and return the exit status."""
    directory, lines = RunDirectory(config.run.directory), _as_lines(plain)
    fixed = fixed_values(config)
    if not fresh and is_finished(directory):
        refuse_changed_stage(config, directory, fixed)
        typer.echo(f"{directory.path} is finished: its model is {directory.model}; --fresh begins again")
        return 0
    with started_stage(config, fixed, fresh=fresh, console=lines) as run:
        return _watched(run, directory, lines=lines)


def _as_lines(plain: bool) -> bool:
    return plain or not Dashboard.fits(Console())


class _Screen(Console):
    """A console of a run, which goes on if the reader of its output leaves, as in `asyncrl up | head`."""

    def on_broken_pipe(self) -> None:
        with suppress(SystemExit):
            super().on_broken_pipe()


def _watched(run: StartedRun, directory: RunDirectory, *, lines: bool, own: str = "supervisor") -> int:
    """Show a run until its end or a stop, then its result, and return the exit status."""
    may_fail, screen = BestEffort(), _Screen()
    for line in run.how_to_join:
        screen.out(line, highlight=False)
    view = viewer(directory.path, screen, lines=lines, since=time.time(), own=own)
    with view as show, stop_on_signals(run.supervisor) as stopped:

        def on_tick() -> None:
            with may_fail("the view"):
                show()

        run.wait(on_tick)
    with may_fail("the result"):
        show_result(directory, finished=run.supervisor.is_over)
    return 0 if run.supervisor.is_over else stopped.status


def until_end(started: AbstractContextManager[StartedRun]) -> int:
    """Supervise processes of a run whose learner is elsewhere; return the exit status."""
    with started as run, stop_on_signals(run.supervisor) as stopped:
        run.wait(lambda: None)
    return 0 if run.supervisor.is_over else stopped.status


@contextmanager
def stop_on_signals(supervisor: Supervisor) -> Iterator[SimpleNamespace]:
    """Stop the run in order on Ctrl-C, SIGTERM and, except under `nohup`, a closed terminal; once.

    A later Ctrl-C ends the run unsaved. Other signals do not: shells and batch systems send some twice. The
    `status` of what is yielded is the exit status, as in shells: 128 plus the signal's number, 0 without one.
    """
    stopped = SimpleNamespace(status=0)

    def stop(signum: int, frame: FrameType | None) -> None:
        if stopped.status and signum == signal.SIGINT:
            supervisor.end_now()
        stopped.status = stopped.status or 128 + signum
        supervisor.request_stop(signal.Signals(signum).name)

    heeded = [signal.SIGINT, signal.SIGTERM]
    heeded += [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else []
    previous = {number: signal.signal(number, stop) for number in heeded}
    try:
        yield stopped
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def show_result(directory: RunDirectory, *, finished: bool) -> None:
    """Print results before and after training, a few samples, the run directory, and the next commands."""
    state, path = read_state(directory.path), directory.path
    console = _Screen(highlight=False)
    console.print()
    shown = set()  # a reward of 0 or 1 is, on average, the accuracy
    for name in [name for wanted in RESULTS for name in of_sets(wanted, state.history.names)]:
        values = set_of(name), state.history.series(name)
        if len(values[1]) >= 2 and values not in shown:
            shown.add(values)
            first, last = state.history.shown(name, "first"), state.history.shown(name, "last")
            console.print(f"{name}: {first} -> {last}")
    for sample in [sample for sample in state.samples if sample.kind == "eval"][-3:]:
        for text in sample_lines(sample, console.width, 3):
            console.print(text)
    console.print(Text(f"run directory: {path}"), soft_wrap=True)
    is_stage = directory.stage.exists()
    command = "stage" if is_stage else "up"
    if finished and is_stage:
        is_adapter, scores = (directory.model / SETTINGS).exists(), read_stage(directory).get("stage") == "rm"
        key = "scorers.NAME.model" if scores else "model.lora.start" if is_adapter else "model.path"
        merge, made = ("--merge ", "model") if scores and is_adapter else ("", directory.model)
        export = f"`asyncrl report {path}`, `asyncrl export {path} {merge}--to model`"
        next_steps = f"next: {export}; what follows begins with {key}: {made}"
    elif finished:
        next_steps = (
            f"next: `asyncrl report {path}`, `asyncrl samples {path}`, `asyncrl export {path} --to model`, "
            f"`asyncrl audit {path}`; a longer run: `asyncrl up {directory.config} learner.steps=...`"
        )
    else:
        found = what_is_saved(directory)
        is_saved = directory.saved_mark.exists() or directory.saved_steps()
        again = "goes on from there" if is_saved else "begins again"
        next_steps = (
            f"stopped before the end{found and f', {found}'}; `asyncrl {command} {directory.config}` {again}"
        )
    console.print(Text(next_steps), soft_wrap=True)
