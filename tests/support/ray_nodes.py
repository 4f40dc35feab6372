"""A Ray cluster of several nodes on this machine, which asks for a token."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

TOKEN = "0123456789abcdef" * 2


@dataclass
class RayNodes:
    cluster: Any

    def of(self, pid: int) -> psutil.Process:
        """The raylet, the first process of a node, below which a process runs."""
        (found,) = [process for process in psutil.Process(pid).parents() if process.name() == "raylet"]
        return found

    def lose(self, pid: int) -> None:
        """The node of a process is gone for good."""
        raylet = self.of(pid)
        raylet.kill()
        # Workers look whether it exists, and as a zombie it does.
        raylet.wait(60)

    def files(self) -> list[Path]:
        """What Ray has written of its nodes and actors."""
        logs = Path(self.cluster.head_node.get_session_dir_path(), "logs")
        return [path for path in logs.rglob("*") if path.is_file()]

    def left(self) -> list[str]:
        """The actors that live, and the placement groups that are not removed."""
        state = self.cluster.global_state
        actors = [one["ActorID"] for one in state.actor_table(None).values() if one["State"] != "DEAD"]
        groups = [one["name"] for one in state.placement_group_table().values() if one["state"] != "REMOVED"]
        return actors + groups


def add_node(cluster: Any, gpus: int) -> None:
    """Ray gives a node 30 s to start, which is not enough where others keep the machine busy."""
    for tries_left in (3, 2, 1, 0):
        try:
            cluster.add_node(num_cpus=1, num_gpus=gpus)
            return
        except Exception as error:
            if "timed out during startup" not in str(error) or not tries_left:
                raise


@contextlib.contextmanager
def ray_nodes(directory: Path, gpus: Sequence[int]) -> Iterator[RayNodes]:
    """A node with the head and without a CPU, where drivers are, and nodes with one CPU and so many GPUs."""
    token = directory / "token"
    token.write_text(TOKEN)
    with pytest.MonkeyPatch.context() as patch:
        # Ray reads it once, when it first needs it; tests/conftest.py says that it needs one.
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        pytest.importorskip("ray", reason="needs asyncrl[ray]")
        from ray.cluster_utils import Cluster

        first = {"num_cpus": 0, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=first)
        try:
            patch.setenv("RAY_ADDRESS", cluster.address)
            for count in gpus:
                add_node(cluster, count)
            yield RayNodes(cluster)
        finally:
            cluster.shutdown()
