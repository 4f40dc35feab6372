"""A whole run on the nodes of a Ray cluster: it loses one, and leaves nothing. And clusters that take nobody."""

import json

import psutil
import pytest

from asyncrl.commands.down import processes_of
from asyncrl.errors import RunError
from tests.support.ports import free_ports
from tests.support.ray_nodes import ray_nodes
from tests.support.whole_run import call, start, steps, tiny_run, wait

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1500)]
OVERRIDES = ["cluster.kind=ray", "cluster.generator_hosts=2", "generator.count=1", "learner.steps=100000"]
WAIT_S = 600.0


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """One for each host of the run, and one more, besides that of the head."""
    with ray_nodes(tmp_path_factory.mktemp("ray"), gpus=[0, 0, 0, 0]) as found:
        yield found


def test_a_run_on_ray_trains_loses_a_node_and_leaves_nothing(nodes, tmp_path):
    with tiny_run(tmp_path) as config:
        run = tmp_path / "runs" / "whole"
        status = lambda: json.loads(call("status", str(run), "--json"))  # noqa: E731
        hosts = lambda: status()["hosts"]  # noqa: E731

        def members() -> set[str]:
            return {member["generator_id"] for member in status()["members"] if member["silent_s"] < 5}

        # Another run on this machine may have the usual ports.
        store, control = (f"tcp://auto:{port}" for port in free_ports(2))
        up = start(config, *OVERRIDES, f"store.bind={store}", f"control.bind={control}")
        try:
            both = {"generators-0.g0", "generators-1.g0"}
            wait(lambda: len(steps(run)) >= 2 and members() == both, up, config, WAIT_S)
            assert {host["phase"] for host in hosts().values()} == {"running"}
            pids = [host["pid"] for host in hosts().values()]
            assert len({nodes.of(pid) for pid in pids}) == 3
            family = [one for pid in pids for one in psutil.Process(pid).children(recursive=True)]
            lost, before = hosts()["generators-0"]["pid"], len(steps(run))
            nodes.lose(lost)
            wait(lambda: len(steps(run)) >= before + 2, up, config, WAIT_S)
            wait(lambda: hosts()["generators-0"]["pid"] not in (0, lost), up, config, WAIT_S)
            wait(lambda: members() == both, up, config, WAIT_S)
            family += psutil.Process(hosts()["generators-0"]["pid"]).children(recursive=True)
            assert "2 -> 1" in call("scale", "generators=-1", str(run))
            wait(lambda: members() == {"generators-0.g0"}, up, config, WAIT_S)
            assert "is saved" in call("down", str(run))
        finally:
            up.kill()
            up.wait(60)
        assert not [process for process in family if process.is_running()]
        assert not processes_of(run) and not nodes.left()
        audit = json.loads(call("audit", str(run)))
        assert audit["missing"] == 0
        assert audit["done"] + audit["taken"] >= 4 * len(steps(run))
        assert steps(run) == [*range(1, len(steps(run)) + 1)]
        keys = [(run / name).read_text() for name in ("run.key", "join.key")]
        shown = [*run.glob("logs/*"), run / "hosts.json", config.parent / "up.out", *nodes.files()]
        for path in shown:
            assert not any(key in path.read_text(errors="replace") for key in keys), path


REFUSALS = {
    "no token is asked for": ({"RAY_AUTH_MODE": "disabled"}, "RAY_AUTH_MODE is not `token`.*get-auth-token"),
    "another token": (
        {"RAY_AUTH_TOKEN": "f" * 32},
        "no Ray cluster at RAY_ADDRESS.*token is missing or incorrect",
    ),
    "rubbish": (
        {"RAY_ADDRESS": "rubbish"},
        "no Ray cluster at RAY_ADDRESS=rubbish takes us.*Invalid address",
    ),
    "nobody is there": ({"RAY_ADDRESS": "nobody"}, "no Ray cluster at RAY_ADDRESS=.* takes us.*ray start"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_cluster_that_takes_nobody_is_named_with_the_way_out(nodes, monkeypatch, case):
    from asyncrl.cluster.ray import RayCluster

    variables, found = REFUSALS[case]
    for name, value in variables.items():
        monkeypatch.setenv(
            name, value.replace("nobody", f"{nodes.cluster.address.split(':')[0]}:{free_ports(1)[0]}")
        )
    with pytest.raises(RunError, match=f"cluster.kind is ray, but (?s:{found})"):
        RayCluster()
