"""What a person sees of a run: the dashboard while it runs, the result when it is over."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from asyncrl.best_effort import BestEffort
from asyncrl.run.directory import RunDirectory
from asyncrl.telemetry.dashboard import sample_lines
from asyncrl.telemetry.live import INTERVAL_S, Dashboard, PlainReporter, View
from asyncrl.telemetry.state import DashboardState, StateReader, read_state


def wants_lines(*, plain: bool) -> bool:
    """Whether a run is shown in lines: somebody said so, or there is no terminal for the dashboard."""
    return plain or not Console().is_terminal


@contextmanager
def viewer(directory: RunDirectory, *, lines: bool) -> Iterator[Callable[[], None]]:
    """A function that shows what is new from now on, to be called often: in lines, or as the dashboard."""
    now = time.time()
    view: View = PlainReporter(lambda line: print(line, flush=True), since=now) if lines else Dashboard(Console())  # noqa: T201
    # Beside lines the supervisor, which is this process, logs to the console itself.
    reader = StateReader(directory.path, since=now, without="supervisor" if lines else "")
    shown_at_s = 0.0

    def show() -> None:
        nonlocal shown_at_s
        if time.monotonic() - shown_at_s >= INTERVAL_S:
            shown_at_s = time.monotonic()
            view.show(reader.read())

    try:
        yield show
        with BestEffort()("the last view"):
            view.show(reader.read())
    finally:
        view.close()


def show_result(directory: RunDirectory, *, finished: bool) -> None:
    """Before and after, a few samples, where everything is, what to do next."""
    state = read_state(directory.path)
    console = Console(highlight=False)
    console.print()
    for name in ("eval/accuracy", "eval/reward_mean", "reward/mean"):
        if line := _before_and_after(state, name):
            console.print(line)
    for sample in [sample for sample in state.samples if sample.kind == "eval"][-3:]:
        for text in sample_lines(sample, console.width, 3):
            console.print(text)
    console.print(Text(f"run directory: {directory.path}"), soft_wrap=True)
    console.print(Text(_next_steps(directory, finished=finished)), soft_wrap=True)


def _before_and_after(state: DashboardState, name: str) -> str:
    series = state.series(name)
    if len(series) < 2:
        return ""
    (first_step, first), (last_step, last) = series[0], series[-1]
    return f"{name}: {first:.3f} (step {first_step}) -> {last:.3f} (step {last_step})"


def _next_steps(directory: RunDirectory, *, finished: bool) -> str:
    path = directory.path
    if not finished:
        again = (
            "resumes from its last checkpoint" if any(directory.checkpoints.glob("step-*")) else "begins anew: nothing was saved"
        )
        return f"stopped before the end; `asyncrl up {directory.config}` {again}"
    return (
        f"next: `asyncrl report {path}`, `asyncrl samples {path}`, `asyncrl export {path} --to model`, `asyncrl audit {path}`; "
        f"a longer run: `asyncrl up {directory.config} learner.steps=...`"
    )
