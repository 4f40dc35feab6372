"""What `asyncrl init` writes is a run: of a tiny model, from the first command to the last step, in a sweep."""

import subprocess

import pytest

from asyncrl.commands.down import processes_of
from asyncrl.quickstart.first_task import Answers, write_task
from tests.support.command import ASYNCRL
from tests.support.models import tiny_qwen2
from tests.support.whole_run import steps

pytestmark = pytest.mark.integration

SMALL = "learner.steps=2 batch.groups=2 generator.engine=transformers generator.max_running=16 eval.every=2"


def test_a_sweep_goes_on_after_a_run_that_fails_and_skips_one_that_is_finished(tmp_path):
    model = tiny_qwen2(tmp_path / "model", max_position_embeddings=1024)
    config, *_ = write_task(tmp_path / "mine", Answers(model=str(model), longest=8))
    # With two tokens no prompt fits, which the run finds.
    command = [*ASYNCRL, "sweep", str(config), *SMALL.split(), "sampling.max_prompt_tokens=2,64"]
    names = [f"mine-sampling.max_prompt_tokens-{value}" for value in (2, 64)]
    fails, trains = (tmp_path / "runs" / name for name in names)

    def swept() -> "subprocess.CompletedProcess[str]":
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=400)

    try:
        first = swept()
        assert first.returncode == 1, first.stderr
        assert f"failed: runs/{fails.name}; the same command tries them again" in first.stderr
        assert steps(trains) == [1, 2] and steps(fails) == []
        page = tmp_path / "runs" / "mine-sampling.max_prompt_tokens-sweep.html"
        assert all(name in page.read_text() for name in names)
        assert first.stdout.endswith(f"runs/{page.name}\n") and "sampling.max_prompt_tokens" in first.stdout

        again = swept()
        assert again.returncode == 1 and "runs/" + trains.name + " has trained 2 steps" in again.stdout
        assert steps(trains) == [1, 2]
    finally:
        for process in [*processes_of(fails), *processes_of(trains)]:
            process.kill()
