"""A whole run in bfloat16, the default of the schema, of two ranks that divide each sequence: it learns, every
update is accepted, and the run resumes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.whole_run import rows, start, steps, tiny_run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Path]:
    with tiny_run(tmp_path, "vllm") as path:
        yield path


def test_a_bfloat16_run_updates_again_and_again_and_resumes_with_its_floor(config: Path) -> None:
    run, floors = config.parent / "runs" / "whole", []
    # Beside rounding nothing is allowed, so that the floor decides, also of so small a model.
    keys = ("model.dtype=bfloat16", "weights.probe_limit=1e-6", "generator.count=1")
    keys += ("learner.ranks=2", "learner.sequence_parallel=2")
    for last in (20, 24):
        up = start(config, f"learner.steps={last}", *keys)
        try:
            assert up.wait(timeout=500) == 0, (config.parent / "up.out").read_text()[-3000:]
        finally:
            up.kill()
        assert steps(run) == list(range(1, last + 1))
        updates = [row for row in rows(run) if "weights/probe_limit" in row]
        assert updates[-1]["weights/updates_failed"] == 0
        # Both programs start with model.path, also when the learner continues from a checkpoint.
        floors.append((updates[-1]["weights/floor_mean"], updates[-1]["weights/floor_max"]))
        for row in updates:
            assert 1e-6 < row["weights/probe_max"] < row["weights/probe_limit"]
            assert row["weights/probe_limit"] == pytest.approx(4 * row["weights/floor_max"])
    assert floors[0] == pytest.approx(floors[1]) and floors[0][0] > 1e-6
    assert max(row["weights/updates"] for row in rows(run) if "weights/updates" in row) >= 10
    learned = [row for row in rows(run) if row.get("group/reward_std", 0.0) > 0]
    assert len(learned) >= 20 and all(row["policy/grad_norm"] > 0 for row in learned)
    log = (run / "logs" / "g0.out").read_text()
    assert log.count("engine and learner score the probe with the same weights and differ by") == 2
