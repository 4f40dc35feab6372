"""What a run asks of an engine that places hosts: one command per host, as functions of its config.

An engine owns no data, no weights and no restarts of processes: within a host that is the business of the
command's supervisor. It is never asked for anything in a step.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol, Self

from asyncrl.buffer.users import GENERATOR, with_user
from asyncrl.config.addresses import AUTO, STORE_PORT, filled_in
from asyncrl.config.schema import Config
from asyncrl.errors import RunError
from asyncrl.hosting.route import reaches
from asyncrl.run.keys import SECRET_VARIABLE, JoinKeys, is_given

RANKS, GENERATORS = "learner-", "generators-"
LEARNER = f"{RANKS}0"
# By which SkyPilot, which gives all nodes the same command, tells them apart.
NODES, NODE = "SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK"
# In the command of a host: the address of the learner's host, known when that has started.
LEARNER_ADDRESS = "{learner}"
SIGNALS = 128  # shells add it to the number of the signal that ended a command


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan:
    """The command of one host."""

    name: str  # learner-0, learner-1, generators-3: the same after a restart, and the prefix of generator ids
    role: Literal["learner", "ranks", "generators"]
    argv: Sequence[str]  # words behind `asyncrl`; nothing secret
    gpus: int
    keys: JoinKeys | None = field(default=None, repr=False)  # handed over on standard input or by a file

    def with_learner(self, learner: str) -> Self:
        """Return the plan with the address of the learner's host in its command, also within a URL."""
        within = f"[{learner}]" if ":" in learner else learner
        argv = [word.replace(LEARNER_ADDRESS, within if "://" in word else learner) for word in self.argv]
        return replace(self, argv=argv)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostState:
    """What an engine knows of a host."""

    phase: Literal["pending", "running", "lost", "ended"]
    address: str = ""  # at which the other hosts reach it
    why: str = ""  # what is missing, or how it was lost
    status: int | None = None  # the exit status of its command
    pid: int = 0  # of the command, where the engine knows it


class Cluster(Protocol):
    """An engine that places hosts."""

    def start(self, plan: HostPlan, output: Path) -> None:
        """Place a host and run its command, whose output is appended to a file. Returns immediately.

        The name may be that of a host that has ended or was lost. Raises OSError.
        """

    def states(self) -> Mapping[str, HostState]:
        """Return the state of every host that was started, by name."""

    def stop(self, name: str, *, kill: bool) -> None:
        """Ask the command of a host to end, without waiting; with `kill`, end all processes of the host."""

    def close(self) -> None:
        """End everything, and return when nothing is left."""


def reachable(config: Config) -> Config:
    """Return the config with `auto` where neither control plane nor store has an address for other hosts."""
    control = config.control.model_copy(update={"bind": config.control.bind or AUTO})
    bind = config.store.bind if config.store.url else config.store.bind or AUTO
    store = config.store.model_copy(update={"bind": bind})
    return config.model_copy(update={"control": control, "store": store})


def store_url(config: Config, learner: str, user: str = GENERATOR) -> str:
    """Return the store's URL for a user of it, if the learner's host has the address `learner`."""
    if config.store.url is not None:
        return config.store.url
    bind = filled_in(config.store.bind or AUTO, learner, STORE_PORT)
    assert bind is not None
    return with_user(f"{bind.replace('tcp://', 'redis://')}/0", user)


def learner_plans(config: Config, file: Path, *, on_gpus: bool) -> list[HostPlan]:
    """Return the hosts of the learner. The config is that of `file`, which all hosts see.

    The first has the store, too; the others read the run's key in its directory.
    """
    gpus, argv = config.ranks_per_host * on_gpus, ("learner", "--config", str(file))
    plans = [HostPlan(name=LEARNER, role="learner", argv=argv, gpus=gpus)]
    for host in range(1, config.cluster.learner_hosts):
        words = ("rank", "--config", str(file), "--host", str(host), "--learner", LEARNER_ADDRESS)
        plans.append(HostPlan(name=f"{RANKS}{host}", role="ranks", argv=words, gpus=gpus))
    return plans


def generators_plan(
    config: Config, file: Path, index: int, keys: JoinKeys | None, *, on_gpus: bool
) -> HostPlan:
    """Return one of the hosts of generators. Their own copy of the config needs no `--allow`."""
    count, name = config.generator.count or 1, f"{GENERATORS}{index}"
    argv = ["generator", "--config", str(file), "--count", str(count), "--name", name]
    argv += ["--store", store_url(config, LEARNER_ADDRESS), "--wait", f"{config.cluster.pending_s:g}"]
    used, taken = count * config.generator.tensor_parallel, config.taken_gpus
    gpus = max(used + len(taken), max(taken, default=0) + 1) * on_gpus
    return HostPlan(name=name, role="generators", argv=argv, gpus=gpus, keys=keys)


def described(config: Config, *, on_gpus: bool) -> Iterator[str]:
    """Yield the hosts of a run, their commands, and the ports that hosts must reach, by line."""
    file = config.run.directory / "hosts.yaml"
    yield f"cluster.kind={config.cluster.kind}: one command per host; {file} is the config"
    hosts = range(config.cluster.generator_hosts)
    plans = [generators_plan(config, file, index, None, on_gpus=on_gpus) for index in hosts]
    for plan in [*learner_plans(config, file, on_gpus=on_gpus), *plans]:
        gpus = f" ({plan.gpus} GPUs)" if plan.gpus else ""
        key = ", with join.key" if plan.role == "generators" else ""
        words = " ".join(word if LEARNER_ADDRESS in word else shlex.quote(word) for word in plan.argv)
        yield f"{plan.name}{gpus}: asyncrl {words}{key}"
    yield from map(str, reaches(config, LEARNER_ADDRESS))


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
        return learner_plans(config, file, on_gpus=False)[0]
    return generators_plan(config, file, number - 1, None, on_gpus=False).with_learner(nodes[0])
