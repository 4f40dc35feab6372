"""Where versions of the weights are published on this machine."""

from asyncrl.config.schema import Config
from asyncrl.hosting.gpus import count_gpus
from asyncrl.hosting.nvidia import peer_reads
from asyncrl.hosting.placement import place_slots, placement_of

HOST_SLOTS = (
    "versions are published in memory of the host (weights.slots: host), because a generator's GPU cannot "
    "read the learner's"
)


def with_slots(config: Config, *, generators: bool = True) -> Config:
    """Return the config with `weights.slots: host` if `auto` means that here, and `HOST_SLOTS` says why.

    Without `generators`, these are on other hosts.
    """
    gpus = count_gpus() if config.learner.device != "cpu" else 0
    placement = placement_of(config, gpus, generators=None if generators else 0)
    if config.weights.slots != "auto" or place_slots(config, placement, peer_reads) == "gpu":
        return config
    return config.model_copy(update={"weights": config.weights.model_copy(update={"slots": "host"})})
