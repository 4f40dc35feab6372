"""What every engine that places hosts does, whichever it is: `asyncrl.cluster.plans.Cluster`."""

import contextlib
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from asyncrl import __version__
from asyncrl.cluster.local import LocalCluster, obstacle
from asyncrl.cluster.plans import Cluster, HostPlan
from asyncrl.cluster.slurm import SlurmCluster
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.run.directory import RunDirectory
from asyncrl.run.keys import JoinKeys, RunKeys
from tests.support.ray_nodes import RayNodes, ray_nodes
from tests.support.slurm import NODES, Slurm, missing, on_node, three_nodes
from tests.support.waiting import wait_until
from tests.support.whole_run import tiny_run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
WAIT_S = 180.0
KEYS = RunKeys(bytes(range(32))).join
WAITS = ("generator", "--store", "redis://generator@127.0.0.1:9/0", "--wait", "600")


class Engine:
    """What the tests need to know of an engine, and a run does not."""

    no_gpu = "waits for 1 GPU.*free"  # what it says of a host that has none

    def fill(self, cluster: Cluster, directory: Path) -> None:
        """Take the places that hosts get whatever GPUs they need."""

    def pid(self, cluster: Cluster, name: str) -> int:
        """The process of a host's command."""
        return cluster.states()[name].pid


class Local(Engine):
    """Networks of this machine, which has one GPU."""

    def open(self) -> Cluster:
        return LocalCluster([0])

    def lose(self, cluster: Cluster, name: str) -> None:
        """A host goes without a word."""
        cluster.network.hosts[name].kill()

    def left(self, cluster: Cluster) -> list:
        """What the engine still has of hosts."""
        networks = (*cluster.network.hosts.values(), cluster.network.switch)
        return [one for one in networks if one.holder.poll() is None]


class Ray(Engine):
    """Nodes of a Ray cluster, of which one has a GPU and one is to spare."""

    def __init__(self, nodes: RayNodes) -> None:
        self.nodes = nodes

    def open(self) -> Cluster:
        from asyncrl.cluster.ray import RayCluster

        return RayCluster()

    def lose(self, cluster: Cluster, name: str) -> None:
        self.nodes.lose(cluster.states()[name].pid)

    def left(self, cluster: Cluster) -> list:
        return self.nodes.left()


class OnSlurm(Engine):
    """An allocation of two nodes, one to spare that has a GPU, and one with many that is not up.

    A host gets a node of the allocation, which was asked for with what every host needs, or is a job.
    """

    no_gpu = "job [0-9]+: Resources"

    def __init__(self, slurm: Slurm, config: Config, allocation: str) -> None:
        self.slurm, self.config, self.allocation = slurm, config, allocation

    def open(self) -> Cluster:
        return SlurmCluster(self.config)

    def fill(self, cluster: Cluster, directory: Path) -> None:
        for name in ("first", "second"):
            cluster.start(plan(name, *WAITS, keys=KEYS), directory / name)

    def pid(self, cluster: Cluster, name: str) -> int:
        waiting = [one for node in NODES for one in on_node(self.slurm, node, "--wait")]
        (found,) = [one.pid for one in waiting if one.environ()["SLURM_JOB_NAME"] == name]
        return found

    def lose(self, cluster: Cluster, name: str) -> None:
        addresses = {self.slurm.network.address(node): node for node in NODES}
        self.slurm.power_off(addresses[cluster.states()[name].address])

    def left(self, cluster: Cluster) -> list:
        jobs = self.slurm.run("squeue", "--noheader", "--format=%i").split()
        steps = self.slurm.run("squeue", "--steps", "--noheader", "--format=%i").split()
        return [one for one in (*jobs, *steps) if one != self.allocation]


@contextlib.contextmanager
def local(directory: Path) -> Iterator[Local]:
    if found := obstacle():
        pytest.skip(f"makes networks: {found}")
    yield Local()


@contextlib.contextmanager
def ray(directory: Path) -> Iterator[Ray]:
    with ray_nodes(directory, gpus=[1, 0, 0]) as nodes:
        yield Ray(nodes)


@contextlib.contextmanager
def slurm(directory: Path) -> Iterator[OnSlurm]:
    if found := missing():
        pytest.skip(found)
    with (
        tiny_run(directory) as path,
        three_nodes(directory, gpus=True) as nodes,
        nodes.inside("n2", "n3") as job,
    ):
        config = load_config(path, ["cluster.kind=slurm", "cluster.generator_hosts=1"])
        run = RunDirectory(config.run.directory)
        run.create(fresh=False)
        run.write_join_key(KEYS)
        run.hosts_config.touch()
        yield OnSlurm(nodes, config, job)


# One line for a further engine: what opens it, loses a host of it, and says what it has left.
ENGINES: dict[str, Callable] = {"local": local, "ray": ray, "slurm": slurm}


@pytest.fixture(scope="module", params=ENGINES)
def engine(request, tmp_path_factory):
    with ENGINES[request.param](tmp_path_factory.mktemp(request.param)) as found:
        yield found


@pytest.fixture
def cluster(engine):
    with contextlib.closing(engine.open()) as found:
        yield found


def plan(name: str, *argv: str, gpus: int = 0, keys: JoinKeys | None = None) -> HostPlan:
    return HostPlan(name=name, role="generators", argv=argv, gpus=gpus, keys=keys)


def begin(engine: Engine, cluster: Cluster, directory: Path, name: str, *, gpus: int = 0) -> int:
    """A host that waits for a run that there is not; its command's process."""
    output = directory / name
    before = output.stat().st_size if output.exists() else 0
    cluster.start(plan(name, *WAITS, keys=KEYS, gpus=gpus), output)

    def waits() -> bool:
        state = cluster.states()[name]
        assert state.phase in ("pending", "running"), state
        return state.phase == "running" and b"waiting for the run" in output.read_bytes()[before:]

    wait_until(waits, WAIT_S)
    return engine.pid(cluster, name)


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_host_runs_its_command_to_the_end_and_its_output_is_appended(cluster, tmp_path):
    output = tmp_path / "a"
    output.write_text("before\n")
    cluster.start(plan("a", "version"), output)
    wait_until(lambda: cluster.states()["a"].phase == "ended", WAIT_S)
    assert cluster.states()["a"].status == 0
    # srun may have something to say of a node.
    lines = [line for line in output.read_text().splitlines() if not line.startswith("srun: ")]
    assert lines == ["before", __version__]
    cluster.start(plan("a", "nonsense"), output)
    wait_until(lambda: cluster.states()["a"].phase == "ended", WAIT_S)
    assert cluster.states()["a"].status == 2 and "nonsense" in output.read_text()


def test_a_host_reads_its_key_and_shows_it_to_nobody(engine, cluster, tmp_path):
    pid = begin(engine, cluster, tmp_path, "a")
    process = psutil.Process(pid)
    shown = [
        *process.cmdline(),
        *process.environ().values(),
        (tmp_path / "a").read_text(),
        str(cluster.states()),
    ]
    assert not any(KEYS.text() in text for text in shown)
    assert cluster.states()["a"].address.count(".") == 3


def test_a_host_that_is_stopped_ends_and_comes_again_under_its_name(engine, cluster, tmp_path):
    first = begin(engine, cluster, tmp_path, "a")
    cluster.stop("a", kill=False)
    wait_until(lambda: cluster.states()["a"].phase == "ended", WAIT_S)
    assert cluster.states()["a"].status is not None and is_gone(first)
    assert begin(engine, cluster, tmp_path, "a") != first


def test_a_host_that_is_killed_leaves_nothing_and_others_go_on(engine, cluster, tmp_path):
    killed, other = begin(engine, cluster, tmp_path, "a"), begin(engine, cluster, tmp_path, "b")
    cluster.stop("a", kill=True)
    wait_until(lambda: cluster.states()["a"].phase in ("ended", "lost"), WAIT_S)
    assert cluster.states()["a"].status in (None, -signal.SIGKILL)
    wait_until(lambda: is_gone(killed), WAIT_S)
    assert cluster.states()["b"].phase == "running" and not is_gone(other)


def test_a_command_that_dies_by_a_signal_says_which(engine, cluster, tmp_path):
    os.kill(begin(engine, cluster, tmp_path, "a"), signal.SIGKILL)
    wait_until(lambda: cluster.states()["a"].phase == "ended", WAIT_S)
    assert cluster.states()["a"].status == -signal.SIGKILL


def test_a_host_without_a_gpu_to_run_on_waits_and_says_for_what(engine, cluster, tmp_path):
    engine.fill(cluster, tmp_path)
    begin(engine, cluster, tmp_path, "a", gpus=1)
    cluster.start(plan("b", "version", gpus=1), tmp_path / "b")
    wait_until(lambda: re.search(engine.no_gpu, cluster.states()["b"].why), WAIT_S)
    assert cluster.states()["b"].phase == "pending"
    cluster.stop("a", kill=True)
    wait_until(lambda: cluster.states()["b"].status == 0, WAIT_S)


def test_a_host_that_waits_can_be_stopped(engine, cluster, tmp_path):
    engine.fill(cluster, tmp_path)
    cluster.start(plan("a", "version", gpus=64), tmp_path / "a")
    assert cluster.states()["a"].phase == "pending"
    cluster.stop("a", kill=False)
    wait_until(lambda: cluster.states()["a"].phase in ("ended", "lost"), WAIT_S)
    cluster.stop("a", kill=True)
    assert cluster.states()["a"].phase in ("ended", "lost")
    begin(engine, cluster, tmp_path, "b", gpus=1)


def test_close_leaves_nothing(engine, tmp_path):
    cluster = engine.open()
    with contextlib.closing(cluster):
        pids = [begin(engine, cluster, tmp_path, name) for name in ("a", "b")]
        cluster.start(plan("waiting", "version", gpus=64), tmp_path / "waiting")
    assert all(map(is_gone, pids))
    wait_until(lambda: not engine.left(cluster), WAIT_S)


# The last one: an engine may have fewer hosts from now on.
def test_a_host_that_is_lost_is_told_and_comes_again_under_its_name(engine, cluster, tmp_path):
    lost, other = begin(engine, cluster, tmp_path, "a"), begin(engine, cluster, tmp_path, "b")
    engine.lose(cluster, "a")

    def is_told() -> bool:
        state = cluster.states()["a"]
        return state.phase == "lost" or (state.phase, state.status) == ("ended", -signal.SIGKILL)

    wait_until(is_told, WAIT_S)
    wait_until(lambda: is_gone(lost), WAIT_S)
    assert cluster.states()["b"].phase == "running" and not is_gone(other)
    assert begin(engine, cluster, tmp_path, "a") != lost
