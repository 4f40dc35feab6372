"""Opens the engine that `cluster.kind` names."""

from asyncrl.cluster.base import Cluster
from asyncrl.cluster.slurm_jobs import allocation
from asyncrl.config.schema import Config
from asyncrl.hosting.gpus import count_gpus


def wants_gpus(config: Config) -> bool:
    """Return whether hosts ask for GPUs. Those of other machines do so also if this one has none."""
    kind = config.cluster.kind
    is_elsewhere = kind == "ray" or (kind == "slurm" and not allocation())
    return config.learner.device != "cpu" and (is_elsewhere or count_gpus() > 0)


def open_cluster(config: Config) -> Cluster:
    """Return the engine of a config. Raises RunError."""
    match config.cluster.kind:
        case "local":
            from asyncrl.cluster.local import LocalCluster

            return LocalCluster(range(count_gpus()))
        case "ray":
            from asyncrl.cluster.ray import RayCluster

            return RayCluster()
        case "slurm":
            from asyncrl.cluster.slurm import SlurmCluster

            return SlurmCluster(config)
        case "kubernetes" | None:
            raise ValueError("a run without hosts that we start has no engine")
