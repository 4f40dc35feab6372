"""Opens the engine that `cluster.kind` names."""

from asyncrl.cluster.base import Cluster
from asyncrl.config.schema import Config
from asyncrl.hosting.gpus import count_gpus


def wants_gpus(config: Config) -> bool:
    """Return whether hosts ask for GPUs. Those of Ray do so wherever this machine has none."""
    return config.learner.device != "cpu" and (config.cluster.kind == "ray" or count_gpus() > 0)


def open_cluster(config: Config) -> Cluster:
    """Return the engine of a config. Raises RunError."""
    match config.cluster.kind:
        case "local":
            from asyncrl.cluster.local import LocalCluster

            return LocalCluster(range(count_gpus()))
        case "ray":
            from asyncrl.cluster.ray import RayCluster

            return RayCluster()
        case "kubernetes" | None:
            raise ValueError("a run without hosts that we start has no engine")
