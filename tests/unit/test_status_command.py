"""What `asyncrl status --json` tells scripts, before, during and after a run."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.cli.watching import status
from asyncrl.commands.inspect import status_values
from asyncrl.run.directory import RunDirectory
from asyncrl.run.lock import RunLock
from asyncrl.telemetry import live
from asyncrl.telemetry.status import write_status
from tests.support.synthetic_run import SyntheticRun


def directory_of(path: Path) -> RunDirectory:
    directory = RunDirectory(path)
    directory.create(fresh=False)
    directory.config.write_text("run: {name: a}")
    return directory


def test_before_the_first_status(tmp_path: Path) -> None:
    values = status_values(directory_of(tmp_path / "new"))
    assert (
        values["state"] is None
        and values["up"] is False
        and values["members"] == []
        and values["metrics"] == {}
    )
    assert values["advice"] == "no step yet: waiting for the learner"


def test_a_run_that_is_up_has_its_processes_rates_and_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = directory_of(tmp_path)
    run = SyntheticRun(tmp_path, generators=2)
    for _ in range(3):
        run.advance()
    directory.write_processes({"learner": 11, "g0": 12})
    with RunLock(directory.supervisor_lock):
        status(tmp_path, as_json=True)
    values = json.loads(capsys.readouterr().out)
    assert values["up"] and values["processes"] == {"learner": 11, "g0": 12} and values["step"] == 3
    assert values["idle"] == {
        "learner": pytest.approx(0.12),
        "generators": pytest.approx(0.4),
        "update": pytest.approx(0.02),
        "stall": pytest.approx(0.03),
    }
    assert (
        values["advice"].startswith("generators wait 40%")
        and values["audit"]["missing"] == 0
        and values["alarms"] == []
    )
    assert values["metrics"]["reward/std"] == 0.31 and "policy/loss" not in values["metrics"], (
        "what is not finite is left out"
    )
    assert values["generated_tokens_per_s"] == 604 and values["dropped"]["zero_variance"] == 9
    assert len(values["members"]) == 2


def test_a_run_whose_supervisor_was_killed_is_not_up(tmp_path: Path) -> None:
    directory = directory_of(tmp_path)
    SyntheticRun(tmp_path).advance()
    # By this process, which is alive: its id may have been used again.
    directory.write_processes({"learner": 7})
    RunLock(directory.supervisor_lock).release()
    values = status_values(directory)
    assert values["state"] == "training" and values["up"] is False and values["processes"] == {}


def test_a_run_that_is_looked_after_elsewhere_is_up_while_its_learner_speaks(tmp_path: Path) -> None:
    directory = directory_of(tmp_path)
    run = SyntheticRun(tmp_path)
    run.advance()
    assert directory.is_up
    write_status(directory.status, replace(run.status(), updated_at=time.time() - 60))
    assert not directory.is_up
    run.finish()
    assert not directory.is_up


def test_watching_ends_with_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = directory_of(tmp_path)
    run = SyntheticRun(tmp_path)
    run.advance()
    RunLock(directory.supervisor_lock).release()
    status(tmp_path, watch=True)
    assert "step 1/400" in capsys.readouterr().out


def test_watching_goes_on_while_a_run_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = directory_of(tmp_path)
    run = SyntheticRun(tmp_path)
    run.advance()
    run.finish("stopped")
    lock = RunLock(directory.supervisor_lock)
    waits = iter([run.advance, lock.release])
    monkeypatch.setattr(live.time, "sleep", lambda seconds: next(waits)())
    status(tmp_path, watch=True)
    assert next(waits, None) is None and "step 2/400" in capsys.readouterr().out


def test_a_start_forgets_the_status_of_the_one_before(tmp_path: Path) -> None:
    directory = directory_of(tmp_path)
    SyntheticRun(tmp_path).finish("stopped")
    directory.forget_earlier()
    assert status_values(directory)["state"] is None
