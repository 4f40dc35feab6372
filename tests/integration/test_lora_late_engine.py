"""Whole runs of an adapter: learner and engines agree at every update, also after deaths and resumes."""

from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

import pytest

from tests.support.whole_run import kill, rows, start, steps, tiny_run, wait

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


def train(config: Path, last: int, meanwhile: Callable[["Popen[bytes]"], object]) -> None:
    up = start(config, "model.lora.rank=8", "learner.optimizer.lr=0.05", f"learner.steps={last}")
    try:
        meanwhile(up)
        assert up.wait(timeout=400) == 0, (config.parent / "up.out").read_text()[-3000:]
    finally:
        up.kill()


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_an_adapter_reaches_an_engine_that_comes_late_and_those_of_a_resumed_run(
    engine: str, tmp_path: Path
) -> None:
    with tiny_run(tmp_path, engine) as config:
        run = config.parent / "runs" / "whole"

        def kill_a_generator(up: "Popen[bytes]") -> None:
            wait(lambda: 1 in steps(run), up, config)
            kill(run, "g1")

        train(config, 6, kill_a_generator)
        train(config, 9, lambda up: None)
        assert steps(run) == list(range(1, 10))
        updated = [row for row in rows(run) if row.get("weights/updates", 0) > 0]
        assert len(updated) >= 4
        assert max(row["weights/probe_max"] for row in updated) < 1e-4
        assert max(row.get("weights/moved", 0) for row in rows(run)) > 1e-3
