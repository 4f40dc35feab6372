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

    def of(self, pid: int) -> Any:
        """The node below whose raylet a process runs."""
        above = {process.pid for process in psutil.Process(pid).parents()}
        (found,) = [node for node in self.cluster.list_all_nodes() if raylet(node) in above]
        return found

    def lose(self, pid: int) -> None:
        """The node of a process is gone for good."""
        self.cluster.remove_node(self.of(pid), allow_graceful=False)

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


def raylet(node: Any) -> int:
    return node.all_processes["raylet"][0].process.pid


@contextlib.contextmanager
def ray_nodes(directory: Path, gpus: Sequence[int]) -> Iterator[RayNodes]:
    """A node with the head and without a CPU, where drivers are, and nodes with one CPU and so many GPUs."""
    token = directory / "token"
    token.write_text(TOKEN)
    with pytest.MonkeyPatch.context() as patch:
        # Ray reads these once, when it is imported.
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        pytest.importorskip("ray", reason="needs asyncrl[ray]")
        from ray.cluster_utils import Cluster

        first = {"num_cpus": 0, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=first)
        try:
            patch.setenv("RAY_ADDRESS", cluster.address)
            for count in gpus:
                cluster.add_node(num_cpus=1, num_gpus=count)
            yield RayNodes(cluster)
        finally:
            cluster.shutdown()
