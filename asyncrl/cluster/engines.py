"""Opens the engine that `cluster.kind` names."""

from collections.abc import Sequence

from asyncrl.cluster.base import Cluster
from asyncrl.config.schema import Config


def open_cluster(config: Config, gpus: Sequence[int]) -> Cluster:
    """Return the engine of a config, for a driver whose machine has `gpus`. Raises RunError."""
    match config.cluster.kind:
        case "local":
            from asyncrl.cluster.local import LocalCluster

            return LocalCluster(gpus)
        case "slurm":
            from asyncrl.cluster.slurm import SlurmCluster

            return SlurmCluster(config)
        case "kubernetes" | None:
            raise ValueError("a run without hosts that we start has no engine")
