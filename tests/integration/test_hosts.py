"""A whole run on three hosts, which are networks of this machine: it loses one, and leaves nothing."""

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from asyncrl.cluster.local import obstacle
from asyncrl.commands.down import processes_of
from tests.support.whole_run import call, start, steps, tiny_run, wait

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(obstacle()), reason=f"makes networks: {obstacle()}"),
]
OVERRIDES = ["cluster.kind=local", "cluster.generator_hosts=2", "generator.count=1", "learner.steps=100000"]
WAIT_S = 600.0


def status(run: Path) -> dict:
    return json.loads(call("status", str(run), "--json"))


def test_a_run_on_three_hosts_trains_loses_a_host_and_leaves_nothing(tmp_path):
    with tiny_run(tmp_path) as config:
        run = tmp_path / "runs" / "whole"
        up = start(config, *OVERRIDES)
        try:
            wait(lambda: len(steps(run)) >= 2, up, config, WAIT_S)
            hosts = status(run)["hosts"]
            assert {name: host["phase"] for name, host in hosts.items()} == dict.fromkeys(
                ("learner-0", "generators-0", "generators-1"), "running"
            )
            assert len({host["address"] for host in hosts.values()}) == 3

            def members() -> set[str]:
                return {member["generator_id"] for member in status(run)["members"] if member["silent_s"] < 5}

            wait(lambda: members() == {"generators-0.g0", "generators-1.g0"}, up, config, WAIT_S)
            family = psutil.Process(up.pid).children(recursive=True)
            os.kill(hosts["generators-0"]["pid"], signal.SIGKILL)
            before = len(steps(run))
            wait(lambda: len(steps(run)) >= before + 2, up, config, WAIT_S)
            again = lambda: status(run)["hosts"]["generators-0"]  # noqa: E731
            wait(
                lambda: again()["phase"] == "running" and again()["pid"] != hosts["generators-0"]["pid"],
                up,
                config,
            )
            wait(lambda: members() == {"generators-0.g0", "generators-1.g0"}, up, config, WAIT_S)
            family += psutil.Process(up.pid).children(recursive=True)
            assert "2 -> 1" in call("scale", "generators=-1", str(run))
            wait(lambda: members() == {"generators-0.g0"}, up, config, WAIT_S)
            said = call("down", str(run))
            assert "no process is left" in said and "is saved" in said
        finally:
            up.kill()
            up.wait(60)
        assert not [process for process in family if process.is_running()]
        assert not processes_of(run)
        audit = json.loads(call("audit", str(run)))
        assert audit["missing"] == 0
        # What the last step took is booked with the next.
        assert audit["done"] + audit["taken"] >= 4 * len(steps(run))
        assert steps(run) == [*range(1, len(steps(run)) + 1)]
        keys = [(run / name).read_text() for name in ("run.key", "join.key")]
        for path in [*run.glob("logs/*"), run / "hosts.yaml", run / "hosts.json", config.parent / "up.out"]:
            assert not any(key in path.read_text() for key in keys), path
