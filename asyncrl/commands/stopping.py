"""What a stop of a run saves, how long that may take, and what the user reads about it."""

import json
import logging
from typing import NamedTuple

from asyncrl.best_effort import BestEffort
from asyncrl.config.named_files import EXPORT
from asyncrl.files import read_record, replace_text
from asyncrl.run.directory import RunDirectory
from asyncrl.telemetry.jsonl import Tail
from asyncrl.telemetry.status import read_status
from asyncrl.telemetry.text import duration

log = logging.getLogger(__name__)

# Shortest limit in seconds: on a full disk the learner tries for a minute to save.
LEAST_S = 90.0
# A step or a checkpoint may take this many times as long as the last one.
MARGIN = 2.0
# What a learner or stage reports while nothing is trained that is not saved, and between steps.
BEFORE, BETWEEN = ("start", "load the model"), ("wait_groups", "report", "checkpoint", "last checkpoint")
# What a stage reports before its first step, and a stage or learner behind its last one.
AROUND = {
    "evaluate": "ending the evaluation, which changes nothing",
    "last evaluation": "leaving the last evaluation, which the same command makes later",
    "export": "finishing the export of the model",
    "last push to the hub": "leaving the last push to the hub; the model is in its checkpoint",
    "end": "ending the training, of which every step is saved",
}


class Stop(NamedTuple):
    """A stop that has begun."""

    within_s: float  # the learner is killed after this time
    text: str


def announce(directory: RunDirectory, doing: str | None, slow_s: float) -> float:
    """Say what the learner, which was doing `doing`, still does. Return the seconds that it may take.

    The text goes to the log, and for `asyncrl down` into a file. Without a learner (None) nothing is said. A
    step or checkpoint that was not measured lately counts as `slow_s` long.
    """
    if doing is None:
        return 0.0
    may_fail, stop = BestEffort(), Stop(2 * MARGIN * slow_s, "finishing a step, then saving")
    with may_fail("the plan of the stop"):
        stop = _plan(directory, doing, slow_s)
    # A warning, because only warnings show on the dashboard.
    log.warning("%s", stop.text)
    with may_fail("the record of the stop"):
        replace_text(directory.stopping, json.dumps(stop._asdict()))
    return stop.within_s


def _plan(directory: RunDirectory, doing: str, slow_s: float) -> Stop:
    if doing in BEFORE:
        return Stop(0.0, "ending the training, which has begun no step")
    if doing in AROUND:
        return Stop(MARGIN * slow_s, AROUND[doing])
    # Of about 2,000 steps: the learner trains on while this is read.
    end = Tail(directory.metrics / "learner.jsonl", last_bytes=1 << 22)
    last = {name: value for record in end for name, value in record.items()}
    measured = {one: last.get(f"time/{one}") for one in ("step", "checkpoint")}
    within_s = max(LEAST_S, MARGIN * sum(slow_s if one_s is None else one_s for one_s in measured.values()))
    unknown = [one for one, one_s in measured.items() if one_s is None]
    why = f", as no {' and no '.join(unknown)} was measured lately" if unknown else ""
    saved, trained = _saved_and_trained(directory)
    lost = trained - (saved or 0)
    what = f"saving step {trained}" if doing in BETWEEN else f"finishing step {trained + 1}, then saving"
    force = f"lose {steps(lost)}" if lost > 0 else "end immediately"
    return Stop(within_s, f"{what}, within {duration(within_s)}{why} (Ctrl-C again: {force})")


def read_stop(directory: RunDirectory) -> Stop | None:
    """Return the stop that the supervisor has announced; None before it."""
    record = read_record(directory.stopping) or {}
    try:
        return Stop(float(record["within_s"]), str(record["text"]))
    except (KeyError, TypeError, ValueError):
        return None


def what_is_saved(directory: RunDirectory) -> str:
    """Say which steps of a run that has ended are saved and which are lost; empty before the first step."""
    saved, trained = _saved_and_trained(directory)
    lost = trained - (saved or 0)
    if saved is None:
        return f"nothing is saved: {steps(lost)} lost" if lost else ""
    where = directory.saved_steps()[saved]
    text = f"step {saved} is saved in {where}" + (f", {steps(lost)} after it lost" if lost > 0 else "")
    is_whole = (where / EXPORT).is_dir() or where.parent == directory.trl_checkpoints  # TRL's is a model
    return text + ("" if is_whole else f"; its {EXPORT}/ is missing until the run goes on")


def steps(count: int) -> str:
    """Return the number with its noun."""
    return f"{count} step" if count == 1 else f"{count} steps"


def _saved_and_trained(directory: RunDirectory) -> tuple[int | None, int]:
    status = read_status(directory.status)
    return max(directory.saved_steps(), default=None), status.step if status else 0
