"""What a node runs under SkyPilot, which gives all nodes the same command and the addresses of all."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from asyncrl.cluster.base import LEARNER_ADDRESS, HostPlan
from asyncrl.cluster.plans import generators_plan, learner_plan
from asyncrl.config.schema import Config
from asyncrl.errors import RunError
from asyncrl.run.keys import SECRET_VARIABLE, is_given

NODES, NODE = "SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK"


def nodes_in(environment: Mapping[str, str]) -> list[str]:
    """Return the addresses of SkyPilot's nodes; empty without SkyPilot, or with one node."""
    nodes = environment.get(NODES, "").split()
    return nodes if len(nodes) > 1 else []


def node_plan(config: Config, file: Path, environment: Mapping[str, str]) -> HostPlan:
    """Return the command of this node: the first has the learner, the others generators. Raises RunError."""
    nodes, number = nodes_in(environment), int(environment[NODE])
    if config.cluster.learner_hosts > 1:
        raise RunError(
            f"cluster.learner_hosts is {config.cluster.learner_hosts}, but under SkyPilot the learner has "
            "one node; leave it out, with the GPUs of one node"
        )
    if not is_given(environment):
        raise RunError(
            f"{SECRET_VARIABLE} is not set, by which the nodes of a run know each other; give it to all: "
            f"sky launch --secret {SECRET_VARIABLE}=$(openssl rand -hex 32)"
        )
    if number == 0:
        return learner_plan(config, file, on_gpus=False)
    plan = generators_plan(config, file, number - 1, None, on_gpus=False)
    return replace(plan, argv=[word.replace(LEARNER_ADDRESS, nodes[0]) for word in plan.argv])
