"""`weights.slots: auto` is settled before a run is checked for room, because it decides what rank 0 holds."""

import pytest
import torch

from asyncrl.config.load import load_config
from asyncrl.preflight.fit import HOST_SLOTS, plan_of, require_fit, with_slots
from tests.support.gpu_tools import MATRIX, ROWS, tool, without_tools
from tests.support.task_config import config_of
from tests.support.whole_run import tiny_run


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Call it with the GPUs that are visible: 0 and 1 read each other, and 2 reads none."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    (tmp_path / "rows").write_text(ROWS.replace("Enabled", "Disabled"))
    (tmp_path / "matrix").write_text(MATRIX)
    matrix = f"[ $1 = topo ] && exec /bin/cat {tmp_path}/matrix"
    tool(tmp_path, "nvidia-smi", f"{matrix}; exec /bin/cat {tmp_path}/rows")
    return lambda visible: without_tools(monkeypatch, tmp_path, visible)


@pytest.mark.parametrize(
    ("visible", "changes", "expected"),
    [
        ("0,1", {}, "auto"),
        ("0,2", {}, "host"),
        ("0", {}, "auto"),
        ("0,2", {"weights": {"slots": "gpu"}}, "gpu"),
        ("0,2", {"learner": {"device": "cpu"}}, "auto"),
    ],
)
def test_versions_stay_off_a_gpu_that_a_generator_cannot_read(machine, visible, changes, expected):
    machine(visible)
    config = config_of(**changes)
    placed = with_slots(config)
    assert placed.weights.slots == expected and (placed == config) == (expected != "host")
    assert with_slots(config, generators=False) == config


def test_what_is_published_on_the_host_is_counted_there(machine, tmp_path, monkeypatch):
    """`plan` and `up` count no versions on rank 0's GPU, and `plan` says why."""
    machine("0,2")
    with tiny_run(tmp_path) as path:
        plan = plan_of(path, ["learner.device=auto"])
        assert plan["published versions"] == 0 and HOST_SLOTS in plan.warnings
        plan = plan_of(path, ["learner.device=auto", "weights.slots=gpu"])
        assert plan["published versions"] > 0 and HOST_SLOTS not in plan.warnings
        hosts = ["cluster={kind: local, generator_hosts: 2}", "generator={count: 3, max_running: 8}"]
        plan = plan_of(path, ["learner.device=auto", "batch.group_size=4", *hosts])
        assert not [line for line in plan.lines if "for a generator" in line.formed], "they are elsewhere"
        assert HOST_SLOTS not in plan.warnings and plan["groups being sampled"] == 2 * 3 * 8 // 4
        require_fit(with_slots(load_config(path, ["learner.device=auto"])))
