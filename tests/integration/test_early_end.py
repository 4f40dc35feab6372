"""A real run that ends early by a metric: which checkpoints are left, and what the next `up` and `export` say."""

import json
from pathlib import Path

import pytest

from tests.support.whole_run import call, start, steps, tiny_run

pytestmark = pytest.mark.integration


def test_a_run_ends_when_its_evaluation_says_so_and_keeps_the_best_checkpoint(tmp_path: Path) -> None:
    with tiny_run(tmp_path) as config:
        run = tmp_path / "runs" / "whole"
        kept = [
            "checkpoint.best=eval/length_mean",
            "checkpoint.every=1",
            "checkpoint.keep_every=2",
            "eval.every=1",
        ]
        ends = "learner.stop_when={metric: eval/dead_groups, patience: 3}"
        up = start(config, "generator.count=1", "learner.steps=30", *kept, ends)
        assert up.wait(timeout=400) == 0, (tmp_path / "up.out").read_text()[-3000:]
        said = (tmp_path / "up.out").read_text()
        assert "none of 3 later values was better (learner.stop_when.patience)" in said
        ended, saved = steps(run)[-1], {int(path.name[5:]) for path in run.glob("checkpoints/step-*")}
        best = json.loads((run / "checkpoints" / "BEST").read_text())["step"]
        assert 3 <= ended < 30 and saved >= {*range(2, ended + 1, 2), ended - 1, ended, best}
        status = json.loads((run / "status.json").read_text())
        assert status["state"] == "finished" and "eval/dead_groups was 0 at step 0" in status["message"]
        assert f"has ended after step {ended}: eval/dead_groups" in call("up", str(run / "config.yaml"))
        copied = call("export", str(run), "--to", str(tmp_path / "copy"), "--best")
        assert f"step-{best:06d}/hf copied to" in copied
        again = start(config, "generator.count=1", "learner.steps=4", *kept, "--from", "2")
        assert again.wait(timeout=400) == 0, (tmp_path / "up.out").read_text()[-3000:]
        assert steps(run) == [*range(1, ended + 1), 3, 4]
        aside = {path.name for path in run.glob("checkpoints/rejected-*")}
        assert aside == {f"rejected-step-{step:06d}" for step in saved if step > 2}
