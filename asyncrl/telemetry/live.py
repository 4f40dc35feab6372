"""Shows a running run: a dashboard on a terminal, otherwise one line per step, warning and long wait."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.live import Live

from asyncrl.best_effort import BestEffort
from asyncrl.telemetry.advice import waiting_for
from asyncrl.telemetry.alarms import ringing
from asyncrl.telemetry.dashboard import render
from asyncrl.telemetry.history import Row, of_sets, score, set_of
from asyncrl.telemetry.state import RECENT_STEPS, Note, RunReader, RunView
from asyncrl.telemetry.text import duration, number, share, visible

INTERVAL_S = 1.0  # the learner writes its status once a second
# Seconds without a line before one says what the run waits for, and before it repeats that between steps.
QUIET_S, LONG_QUIET_S = 9.0, 60.0
REPEAT_S = 60.0  # a warning that differs only in its numbers is repeated after this long


class Dashboard:
    """Fills the terminal and redraws it with every state; the last picture remains after `close`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, screen=True, auto_refresh=False)
        self._last: RunView | None = None
        self._live.start()

    @staticmethod
    def fits(console: Console) -> bool:
        """Whether a console is a terminal that can be redrawn; with FORCE_COLOR rich says so of a file."""
        return console.is_terminal and not console.is_dumb_terminal and console.file.isatty()

    def show(self, state: RunView) -> None:
        self._last = state
        self._live.update(render(state, self._console.width, self._console.height), refresh=True)

    def close(self) -> None:
        self._live.stop()
        if self._last:
            self._console.print(render(self._last, self._console.width))


class PlainReporter:
    """Lines for logs and pipes: one per step and new warning; during silence, what the run waits for."""

    def __init__(self, write: Callable[[str], object], *, past: int | None = RECENT_STEPS) -> None:
        """Leave out the steps that are there at the first `show`, but for the newest `past` ones."""
        self._write, self._most = write, past
        self._shown: dict[int, Row] = {}  # by step: a step that is trained again has another row
        self._shown_at: dict[str, float] = {}  # time of the last line of each warning, without its numbers
        self._notes: tuple[Note, ...] = ()  # of the last `show`
        self._said_at = 0.0
        self._waiting = ""

    def show(self, state: RunView) -> None:
        """Write what is new. Steps that a restarted learner makes again are written again."""
        self._said_at = self._said_at or state.now
        rows, new = state.history.rows, list[int]()
        for step in reversed(state.history.steps):
            if rows[step] is self._shown.get(step):
                break
            new += [step] if "time/step" in rows[step] else []
        for step in reversed(new[: self._most]):
            self._say(step_line(state, step), state.now)
        self._shown |= {step: rows[step] for step in new}
        self._most = None
        for note in state.notes:
            shape = re.sub(r"\d+", "#", str(note))
            if note not in self._notes and state.now - self._shown_at.get(shape, 0.0) >= REPEAT_S:
                self._shown_at[shape] = state.now
                self._say(f"! {visible(str(note))}", state.now)
        self._notes = state.notes
        quiet_s, waiting = state.now - self._said_at, waiting_for(state) or ""
        shape = re.sub(r"\d+", "#", waiting)
        if waiting and quiet_s >= (QUIET_S if shape != self._waiting or not self._shown else LONG_QUIET_S):
            self._waiting = shape
            elapsed = f"{duration(state.elapsed_s)}  " if state.elapsed_s is not None else ""
            self._say(elapsed + waiting, state.now)

    def close(self) -> None:
        """Do nothing: lines need no cleanup."""

    def _say(self, line: str, now: float) -> None:
        self._write(line)
        self._said_at = now


def step_line(state: RunView, step: int) -> str:
    """Return a step as one line."""
    row = state.history.rows[step]
    at, is_of_stage = row.get, "train/loss" in row
    held_out: list[str] = []
    for name in of_sets("eval/loss" if is_of_stage else "eval/reward_mean", state.history.names):
        if evaluated := [known for known, _ in state.history.series(name) if known <= step]:
            label = f"held-out {visible(set_of(name))}".rstrip()
            held_out.append(f"{label} {score(state.history.rows[evaluated[-1]], name)}")
    parts = [f"step {step}" + (f"/{state.status.total_steps}" if state.status else "")]
    if is_of_stage:
        parts += [f"loss {number(at('train/loss'))}", *held_out]
    else:
        parts += [
            f"reward {number(at('reward/mean'))}",
            *held_out,
            f"length {number(at('completions/length_mean'))}",
            f"entropy {number(at('policy/entropy'))}" if "policy/entropy" in row else "",
            f"lag {number(at('staleness/mean'))} max {number(at('staleness/max'))}",
            f"tok/s gen {state.generated_tokens_per_s:.0f} lrn {number(at('perf/learner_tokens_per_s'))}",
            f"idle lrn {share(at('idle/learner'))} gen {share(state.idle_generators)}",
        ]
    parts += [
        f"{number(at('time/step'))} s",
        f"{duration(state.eta_s)} left" if state.eta_s is not None else "",
        f"ALARM {' '.join(alarms)}" if (alarms := ringing(row)) else "",
    ]
    return "  ".join(filter(None, parts))


@contextmanager
def viewer(
    directory: Path, console: Console, *, lines: bool, since: float | None = None, own: str = "supervisor"
) -> Iterator[Callable[[], None]]:
    """Yield a function that shows news as lines or as the dashboard.

    It may be called at any rate. `since` is the start of a run that this process, logging as `own`, started.
    """
    write = partial(console.out, highlight=False)
    view = PlainReporter(write, past=0 if since else RECENT_STEPS) if lines else Dashboard(console)
    # With lines, a process that starts a run logs to the console itself.
    reader = RunReader(directory, since=since, without=own if lines and since else "")
    shown_at_s = -INTERVAL_S

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


def watch(directory: Path, *, over: Callable[[], bool], console: Console | None = None) -> None:
    """Show a run until `over()` is true: on a terminal the dashboard, else lines.

    Ctrl-C raises KeyboardInterrupt after restoring the terminal.
    """
    console = console or Console()
    with viewer(directory, console, lines=not Dashboard.fits(console)) as show:
        while not over():
            show()
            time.sleep(INTERVAL_S)
