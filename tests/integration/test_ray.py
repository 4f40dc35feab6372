"""Whole runs on the nodes of Ray clusters: they lose nodes and the head, and leave nothing.

And clusters that take nobody.
"""

import json
import re
import signal
import sys
import threading
from contextlib import closing, contextmanager

import psutil
import pytest

from asyncrl.cluster import ray as ray_module
from asyncrl.cluster.driver import Hosts
from asyncrl.cluster.plans import HostPlan
from asyncrl.commands.down import processes_of
from asyncrl.errors import RunError
from asyncrl.run.keys import RunKeys
from tests.support.ports import free_ports
from tests.support.ray_nodes import ray_nodes
from tests.support.waiting import HANG, LONG_S, has_ended, wait_until
from tests.support.whole_run import call, start, steps, tiny_run, wait

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1500)]
OVERRIDES = ["cluster.kind=ray", "generator.count=1", "learner.steps=100000"]
WAIT_S = 600.0


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """One for each host of a run and one for each that the tests lose, besides that of the head."""
    with ray_nodes(tmp_path_factory.mktemp("ray"), gpus=[0] * 5) as found:
        yield found


@contextmanager
def begun(config, *overrides: str):
    """A run with ports of its own: another one on this machine may have the usual ones."""
    store, control = (f"tcp://auto:{port}" for port in free_ports(2))
    up = start(config, *OVERRIDES, f"store.bind={store}", f"control.bind={control}", *overrides)
    try:
        yield up
    finally:
        up.kill()
        up.wait(60)


def hosts_of(run) -> dict[str, dict]:
    return json.loads((run / "hosts.json").read_text())


def nothing_is_lost(run) -> None:
    """Each group is accounted for, and no step is left out: those after a checkpoint may be trained again."""
    audit, done = json.loads(call("audit", str(run))), sorted(set(steps(run)))
    assert audit["missing"] == 0
    assert audit["done"] + audit["taken"] >= 4 * len(done)
    assert done == [*range(1, len(done) + 1)]


def test_a_host_without_a_driver_is_killed_if_it_does_not_end(tmp_path, monkeypatch):
    program = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True)"
    monkeypatch.setattr(
        ray_module, "module_argv", lambda *words: [sys.executable, "-c", f"{program}; {HANG}"]
    )
    monkeypatch.setattr(ray_module.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(ray_module, "LEAVE_S", 0.1)
    monkeypatch.setenv(ray_module.AUTH_VARIABLE, "token")
    host, output, status = ray_module._Host(), tmp_path / "out", []
    runs = threading.Thread(target=lambda: status.append(host.run([], tmp_path, output, None)), daemon=True)
    runs.start()
    wait_until(lambda: output.exists() and "deaf" in output.read_text())
    host._asked_s -= ray_module.SILENT_S  # it has heard nothing for so long
    runs.join(LONG_S)
    assert status == [-signal.SIGKILL]


def test_a_learner_on_two_nodes_loses_one_and_goes_on(nodes, tmp_path):
    with tiny_run(tmp_path) as config:
        run = tmp_path / "runs" / "whole"
        with begun(config, "cluster.learner_hosts=2", "learner.ranks=2") as up:
            wait(lambda: len(steps(run)) >= 3, up, config, WAIT_S)
            pids = {name: host["pid"] for name, host in hosts_of(run).items()}
            assert pids.keys() == {"learner-0", "learner-1", "generators-0"}
            assert len({nodes.of(pid) for pid in pids.values()}) == 3
            before = len(steps(run))
            nodes.lose(pids["learner-1"])
            wait(lambda: hosts_of(run)["learner-1"]["pid"] not in (0, pids["learner-1"]), up, config, WAIT_S)
            wait(lambda: len(steps(run)) >= before + 2, up, config, WAIT_S)
            assert hosts_of(run)["learner-0"]["pid"] == pids["learner-0"]
            assert "is saved" in call("down", str(run))
        assert not processes_of(run) and not nodes.left()
        nothing_is_lost(run)


def test_a_run_on_ray_trains_loses_a_node_and_leaves_nothing(nodes, tmp_path):
    with tiny_run(tmp_path) as config:
        run = tmp_path / "runs" / "whole"
        status = lambda: json.loads(call("status", str(run), "--json"))  # noqa: E731
        hosts = lambda: status()["hosts"]  # noqa: E731

        def members() -> set[str]:
            return {member["generator_id"] for member in status()["members"] if member["silent_s"] < 5}

        with begun(config, "cluster.generator_hosts=2") as up:
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
        assert not [process for process in family if process.is_running()]
        assert not processes_of(run) and not nodes.left()
        nothing_is_lost(run)
        assert len(steps(run)) == len(set(steps(run))), "no step was trained twice"
        keys = [(run / name).read_text() for name in ("run.key", "join.key")]
        shown = [*run.glob("logs/*"), run / "hosts.json", config.parent / "up.out", *nodes.files()]
        for path in shown:
            assert not any(key in path.read_text(errors="replace") for key in keys), path


def test_a_run_ends_with_the_head_of_its_ray_and_resumes_on_another(tmp_path_factory, tmp_path):
    with tiny_run(tmp_path) as config:
        run, directory = tmp_path / "runs" / "whole", tmp_path_factory.mktemp
        with ray_nodes(directory("first"), gpus=[0, 0]) as nodes, begun(config) as up:
            wait(lambda: len(steps(run)) >= 3, up, config, WAIT_S)
            hosts = [psutil.Process(host["pid"]) for host in hosts_of(run).values()]
            family = [one for host in hosts for one in [host, *host.children(recursive=True)]]
            nodes.cluster.head_node.kill_gcs_server(check_alive=False)
            wait_until(lambda: up.poll() is not None, WAIT_S)
            wait_until(lambda: all(map(has_ended, family)) and not processes_of(run), WAIT_S)
        saved = max(int(path.name.rpartition("-")[2]) for path in (run / "checkpoints").glob("step-*"))
        # Steps may have been made after it, so that the number of the last one does not tell that the run goes on.
        made = len(steps(run))
        with ray_nodes(directory("second"), gpus=[0, 0]) as nodes:
            with begun(config) as up:
                wait(lambda: len(steps(run)) >= made + 2, up, config, WAIT_S)
                assert "is saved" in call("down", str(run))
            assert not processes_of(run) and not nodes.left()
        assert steps(run)[made] == saved + 1
        nothing_is_lost(run)


def test_a_host_is_not_pending_without_a_reason_although_resources_exist(tmp_path):
    from asyncrl.cluster.ray import RayCluster

    waits = ("generator", "--store", "redis://generator@127.0.0.1:9/0", "--wait", f"{2 * WAIT_S:g}")
    keys = RunKeys(bytes(32)).join
    with ray_nodes(tmp_path, gpus=[4, 4]), closing(RayCluster()) as cluster:

        def begin(name: str, gpus: int) -> None:
            # Without keys its command would end within seconds, and free what it has.
            plan = HostPlan(name=name, role="generators", argv=waits, gpus=gpus, keys=keys)
            cluster.start(plan, tmp_path / name)

        for name, gpus in (("generators-0", 4), ("generators-1", 2)):
            begin(name, gpus)
            wait_until(lambda name=name: cluster.states()[name].phase == "running", WAIT_S)
        begin("generators-3", 4)
        hosts, said = Hosts(cluster, 4.0, lambda states: None), []

        def is_told() -> list[str]:
            try:
                hosts.tend()
            except RunError as error:
                said.append(str(error))
            return said

        wait_until(is_told, WAIT_S)
    asked, _, free = said[0].partition("; free: ")
    assert asked == "generators-3 has no host after 4 s: it waits for 4 GPUs and 1 CPUs on one node"
    each = re.findall(r"\S+ (\d) GPUs and (\d) CPUs", free)
    assert sorted(each) == [("0", "0"), ("0", "0"), ("2", "0")], free


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
