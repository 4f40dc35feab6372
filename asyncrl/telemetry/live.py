"""Watching a run: a live dashboard on a terminal; elsewhere lines: each step, each warning, and what is being waited for."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.live import Live

from asyncrl.telemetry.advice import waiting_for
from asyncrl.telemetry.alarms import ringing
from asyncrl.telemetry.dashboard import render
from asyncrl.telemetry.notes import Note
from asyncrl.telemetry.state import DashboardState, StateReader
from asyncrl.telemetry.text import duration, number, share, visible

INTERVAL_S = 1.0
"""The learner says how it is once a second."""
QUIET_S, LONG_QUIET_S = 9.0, 60.0
"""Nobody who looks at lines should have to guess for longer; the same thing again is told less often once steps were made."""
REPEAT_S = 60.0


class View(Protocol):
    """Shows states one after the other."""

    def show(self, state: DashboardState) -> None: ...

    def close(self) -> None: ...


class Dashboard:
    """The whole terminal, redrawn with every state; the last picture stays when it is closed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, screen=True, auto_refresh=False)
        self._last: DashboardState | None = None
        self._live.start()

    def show(self, state: DashboardState) -> None:
        """Redraw."""
        self._last = state
        self._live.update(render(state, self._console.width, self._console.height), refresh=True)

    def close(self) -> None:
        """Give the terminal back."""
        self._live.stop()
        if self._last:
            self._console.print(render(self._last, self._console.width))


class PlainReporter:
    """Lines for logs and pipes: one for each step and each new warning, and while neither comes what is being waited for."""

    def __init__(self, write: Callable[[str], object] = print, *, since: float = 0.0) -> None:
        """Steps from before `since` (Unix seconds) are left out: a run that is resumed has told them."""
        self._write = write
        self._since = since
        self._step = -1
        self._told_at: dict[str, float] = {}
        """Warnings, without their numbers: which repeats within a minute is left out."""
        self._noted_at = 0.0
        self._said_at = 0.0
        self._waiting = ""

    def show(self, state: DashboardState) -> None:
        """Write what is new; after a learner went back, its steps are written again."""
        self._said_at = self._said_at or state.now
        steps = state.trained_steps
        self._step = min(self._step, steps[-1]) if steps else self._step
        for step in steps:
            if step > self._step:
                self._step = step
                if state.history.rows[step].get("time", self._since) >= self._since:
                    self._say(step_line(state, step), state.now)
        for note in state.notes:
            if note.at > self._noted_at:
                self._noted_at = note.at
                self._tell(note, state.now)
        quiet_s, waiting = state.now - self._said_at, waiting_for(state)
        if waiting and quiet_s >= (QUIET_S if waiting != self._waiting or not steps else LONG_QUIET_S):
            self._waiting = waiting
            self._say(f"{duration(state.elapsed_s)}  {waiting}" if state.elapsed_s is not None else waiting, state.now)

    def close(self) -> None:
        """Nothing to give back."""

    def _tell(self, note: Note, now: float) -> None:
        shape = re.sub(r"\d+", "#", str(note))
        if now - self._told_at.get(shape, 0.0) >= REPEAT_S:
            self._told_at[shape] = now
            self._say(f"! {visible(str(note))}", now)

    def _say(self, line: str, now: float) -> None:
        self._write(line)
        self._said_at = now


def step_line(state: DashboardState, step: int) -> str:
    """One step in one line."""
    row = state.history.rows[step]
    at = row.get
    total = f"/{state.status.total_steps}" if state.status else ""
    accuracy = next((value for known, value in reversed(state.series("eval/accuracy")) if known <= step), None)
    parts = [
        f"step {step}{total}",
        f"reward {number(at('reward/mean'))}",
        f"held-out {number(accuracy)}" if accuracy is not None else "",
        f"length {number(at('completions/length_mean'))}",
        f"entropy {number(at('policy/entropy'))}" if "policy/entropy" in row else "",
        f"lag {number(at('staleness/mean'))} max {number(at('staleness/max'))}",
        f"tok/s gen {state.generated_tokens_per_s:.0f} lrn {number(at('perf/learner_tokens_per_s'))}",
        f"idle lrn {share(at('idle/learner'))} gen {share(state.idle_generators)}",
        f"{number(at('time/step'))} s",
        f"{duration(state.eta_s)} left" if state.eta_s is not None else "",
        f"ALARM {' '.join(alarms)}" if (alarms := ringing(row)) else "",
    ]
    return "  ".join(part for part in parts if part)


def watch(directory: Path, *, over: Callable[[], bool], console: Console | None = None) -> DashboardState:
    """Show a run until `over()` or its status is final; returns the last state.

    On a terminal this is the dashboard, else one line per step. Ctrl-C leaves with KeyboardInterrupt, the terminal restored.
    """
    console = console or Console()
    view: View = (
        Dashboard(console)
        if console.is_terminal
        else PlainReporter(lambda line: console.print(line, soft_wrap=True, markup=False))
    )
    reader = StateReader(directory)
    try:
        while True:
            ends = over()  # before reading, so that the last state is complete
            state = reader.read()
            view.show(state)
            if ends or (state.status and state.status.is_final):
                return state
            time.sleep(INTERVAL_S)
    finally:
        view.close()
