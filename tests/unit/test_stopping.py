"""A stop: how long the learner gets to save, and what the user reads about it."""

import json
import os
import signal
import sys
from dataclasses import replace

import pytest

from asyncrl.cli.foreground import stop_on_signals
from asyncrl.commands import down
from asyncrl.commands.down import LEAST_S, announce, read_stop, what_is_saved
from asyncrl.commands.supervising import StartedRun
from asyncrl.errors import RunError
from asyncrl.hosting.children import ProcessSpec
from asyncrl.hosting.supervisor import USER_ERROR, Supervisor
from asyncrl.run.directory import RunDirectory
from asyncrl.telemetry.status import StatusSnapshot, write_status

SLOW_S = 1800.0
STATUS = StatusSnapshot(
    run="r", state="training", step=0, total_steps=9, version=0, started_at=0.0, updated_at=0.0, pid=1
)


def run_at(tmp_path, *, trained=None, saved=(), measured=()):
    directory = RunDirectory(tmp_path / "run")
    directory.create(fresh=False)
    if trained is not None:
        write_status(directory.status, replace(STATUS, step=trained))
    for step in saved:
        (directory.checkpoints / f"step-{step:06d}" / "hf").mkdir(parents=True)
    lines = (json.dumps({"step": 1, "time": 0.0, **row}) + "\n" for row in measured)
    (directory.metrics / "learner.jsonl").write_text("".join(lines))
    return directory


@pytest.mark.parametrize(
    ("measured", "within_s"),
    [
        ([], 4 * SLOW_S),
        ([{"time/step": 160.0}], 2 * (160.0 + SLOW_S)),
        ([{"time/step": 160.0}, {"time/checkpoint": 70.0}], 460.0),
        ([{"time/step": 1.0}, {"time/checkpoint": 0.1}], LEAST_S),
        ([{"time/step": 500.0}, {"time/step": 160.0}, {"time/checkpoint": 70.0}], 460.0),
    ],
)
def test_the_limit_is_twice_what_the_last_step_and_the_last_checkpoint_took(tmp_path, measured, within_s):
    rows = [{**row, "step": step} for step, row in enumerate(measured, 1)]
    directory = run_at(tmp_path, trained=7, measured=rows)
    assert announce(directory, "train", SLOW_S) == pytest.approx(within_s)
    stop = read_stop(directory)
    assert stop.within_s == pytest.approx(within_s), "`asyncrl down` waits as long"
    known = {name.removeprefix("time/") for row in measured for name in row}
    unknown = " and no ".join(one for one in ("step", "checkpoint") if one not in known)
    why = f", as no {unknown} was measured lately (" if unknown else f"{down.duration(within_s)} ("
    assert why in stop.text, "an hour needs a reason"


def test_a_stop_reads_only_the_end_of_the_metrics(tmp_path, monkeypatch):
    rows = [{"time/step": 160.0, "time/checkpoint": 70.0, "text": "x" * 100_000}] * 100
    directory = run_at(tmp_path, trained=7, measured=rows)
    read, loads = [], json.loads
    monkeypatch.setattr(json, "loads", lambda text: read.append(text) or loads(text))
    assert announce(directory, "train", SLOW_S) == 460.0
    assert 40 < len(read) < 50


@pytest.mark.parametrize(
    ("doing", "saved", "text"),
    [
        ("train", (), "finishing step 8, then saving, within 7m40s (Ctrl-C again: lose 7 steps)"),
        ("measure", (4, 6), "finishing step 8, then saving, within 7m40s (Ctrl-C again: lose 1 step)"),
        ("wait_groups", (5,), "saving step 7, within 7m40s (Ctrl-C again: lose 2 steps)"),
        ("train", (7,), "finishing step 8, then saving, within 7m40s (Ctrl-C again: end immediately)"),
        ("load the model", (7,), "ending the training, which has begun no step"),
        ("evaluate", (7,), "ending the evaluation, which changes nothing"),
        ("last evaluation", (7,), "leaving the last evaluation, which the same command makes later"),
        ("end", (7,), "ending the training, of which every step is saved"),
        ("export", (7,), "finishing the export of the model"),
        ("last push to the hub", (7,), "leaving the last push to the hub; the model is in its checkpoint"),
    ],
)
def test_the_text_says_what_is_done_and_what_a_second_ctrl_c_loses(tmp_path, doing, saved, text, caplog):
    rows = [{"time/step": 160.0, "time/checkpoint": 70.0}]
    directory = run_at(tmp_path, trained=7, saved=saved, measured=rows)
    announce(directory, doing, SLOW_S)
    assert read_stop(directory).text == text and text in caplog.text
    directory.forget_stop(by_slurm=False)
    assert read_stop(directory) is None


def test_without_a_learner_there_is_nothing_to_wait_for(tmp_path):
    assert announce(run_at(tmp_path, trained=7), None, SLOW_S) == 0.0


def test_files_that_cannot_be_read_leave_the_learner_its_time(tmp_path, monkeypatch):
    monkeypatch.setattr(down, "Tail", lambda *_, **__: 1 / 0)
    assert announce(run_at(tmp_path), "train", SLOW_S) == 4 * SLOW_S


@pytest.mark.parametrize(
    ("trained", "saved", "text"),
    [
        (None, (), ""),
        (0, (), ""),
        (7, (), "nothing is saved: 7 steps lost"),
        (7, (4, 7), "step 7 is saved in {}/step-000007"),
        (7, (4, 6), "step 6 is saved in {}/step-000006, 1 step after it lost"),
        (None, (4,), "step 4 is saved in {}/step-000004"),
    ],
)
def test_what_is_saved_is_said(tmp_path, trained, saved, text):
    directory = run_at(tmp_path, trained=trained, saved=saved)
    assert what_is_saved(directory) == text.format(directory.checkpoints)
    for step in saved:
        (directory.checkpoints / f"step-{step:06d}" / "hf").rmdir()
        assert "hf/ is missing until the run goes on" in what_is_saved(directory) or step != max(saved)


def test_a_checkpoint_of_a_stage_lacks_nothing(tmp_path):
    directory = run_at(tmp_path, trained=20)
    saved = directory.trl_checkpoints / "checkpoint-20"
    saved.mkdir(parents=True)
    (saved / "MANIFEST.json").write_text("{}")
    assert what_is_saved(directory) == f"step 20 is saved in {saved}"


SLOW_STEP = """
import signal, sys, threading
from pathlib import Path
from asyncrl.hosting.progress import attach, begin
asked = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: asked.set())
attach()
begin("train")
asked.wait()
threading.Event().wait(float(sys.argv[2]))
(Path(sys.argv[1]) / "step-000008" / "hf").mkdir(parents=True)
sys.exit(143)
"""


def stopped_run(directory, step_s, signals, *, fails=False, tend_store=lambda: None):
    """A run whose learner takes `step_s` to finish its step, which the default limit of 0.2 s does not allow."""
    argv = [sys.executable, "-c", SLOW_STEP, str(directory.checkpoints), str(step_s)]
    one = ProcessSpec(
        name="learner",
        argv=argv,
        env=dict(os.environ),
        log_path=directory.logs / "out",
        ends_run=True,
        grace_s=0.2,
    )
    two = replace(one, name="g0", argv=["sh", "-c", f"exit {USER_ERROR}"], ends_run=False)
    left = list(signals)

    def tick():
        if supervisor.doing == "train":
            if fails and "g0" not in supervisor.names:
                supervisor.add(two)
            if left:
                os.kill(os.getpid(), left.pop(0))

    with Supervisor([one], max_restarts=0) as supervisor, stop_on_signals(supervisor) as stopped:
        run = StartedRun(
            supervisor,
            (),
            lambda: None,
            lambda: announce(directory, supervisor.doing, SLOW_S),
            tend_store,
        )
        run.wait(tick)
    return stopped.status


def test_a_step_that_takes_longer_than_a_process_has_to_leave_is_saved(tmp_path):
    directory = run_at(tmp_path, trained=7)
    assert stopped_run(directory, 1.0, [signal.SIGTERM, signal.SIGHUP, signal.SIGTERM]) == 143
    write_status(directory.status, replace(STATUS, step=8))
    assert what_is_saved(directory) == f"step 8 is saved in {directory.checkpoints}/step-000008"


def test_the_store_is_kept_alive_until_the_learner_has_saved(tmp_path):
    directory, stops = run_at(tmp_path, trained=7), []
    stopped_run(directory, 1.0, [signal.SIGTERM], tend_store=lambda: stops.append(read_stop(directory)))
    assert stops[0] is None and stops[-1] is not None, "the learner needs it to save"


def test_a_run_that_fails_saves_too(tmp_path):
    directory = run_at(tmp_path, trained=7)
    with pytest.raises(RunError, match="g0"):
        stopped_run(directory, 1.0, [], fails=True)
    assert what_is_saved(directory) == f"step 8 is saved in {directory.checkpoints}/step-000008"


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_ends_the_run_immediately(tmp_path, first):
    directory = run_at(tmp_path, trained=7)
    assert stopped_run(directory, 600.0, [first, signal.SIGINT]) == 128 + first
    assert what_is_saved(directory) == "nothing is saved: 7 steps lost"
