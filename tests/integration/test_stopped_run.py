"""Real runs that are stopped in a step that is long, and with their store: what is saved, and said."""

import json
import signal
from pathlib import Path

import pytest

from asyncrl.commands.down import processes_of
from tests.support.waiting import let_pass, wait_until
from tests.support.whole_run import call, start, steps, tiny_run, wait

pytestmark = pytest.mark.integration

SLOW = """
import threading

class Slow:
    steps = 0

    def before_step(self, plan):
        self.steps += 1
        threading.Event().wait(20.0 if self.steps == 2 else 0.0)
"""


def test_a_step_longer_than_a_process_has_to_leave_is_finished_and_saved(tmp_path: Path) -> None:
    with tiny_run(tmp_path) as config:
        run = tmp_path / "runs" / "whole"
        (tmp_path / "slow.py").write_text(SLOW)
        hook = f"learner.hooks=[{tmp_path}/slow.py:Slow]"
        up = start(config, hook, "generator.count=1", "learner.steps=3", "checkpoint.every=100")

        def is_in_step_2() -> bool:
            status = run / "status.json"
            assert up.poll() is None, (tmp_path / "up.out").read_text()[-3000:]
            found = json.loads(status.read_text()) if status.exists() else {}
            return found.get("step") == 1 and found.get("doing") == "hooks"

        wait_until(is_in_step_2, 400.0)
        first, last = call("down", str(run)).splitlines()
        assert up.wait(timeout=60) == 143
        assert "finishing step 2, then saving, within " in first and "lose 1 step)" in first
        assert last.endswith(f"no process is left; step 2 is saved in {run}/checkpoints/step-000002")
        assert start(config, "generator.count=1", "learner.steps=3").wait(timeout=400) == 0
    assert steps(run) == [1, 2, 3], "no step was trained twice"


def test_a_store_that_a_stop_reaches_too_comes_back_for_the_learner_to_save(tmp_path: Path) -> None:
    with tiny_run(tmp_path) as config:
        run = tmp_path / "runs" / "whole"
        up = start(config, "generator.count=1", "learner.steps=10000", "checkpoint.every=10000")
        wait(lambda: bool(steps(run)), up, config)
        (store,) = (one for one in processes_of(run) if one.name().endswith("-server"))
        up.send_signal(signal.SIGSTOP)  # it sees the end of the store only after its own signal
        store.terminate()
        let_pass(3.0)  # the learner calls the store, and waits for it
        up.send_signal(signal.SIGTERM)
        up.send_signal(signal.SIGCONT)
        assert up.wait(timeout=120) == 143
        said = (tmp_path / "up.out").read_text()
        assert f"step {steps(run)[-1]} is saved in {run}/checkpoints/step-" in said
