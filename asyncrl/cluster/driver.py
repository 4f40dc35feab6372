"""Lets a supervisor keep hosts as it keeps processes: it starts, restarts and ends them through an engine.

A command that ends with 0 has done its work, but generators start again if the run is not over. After 1 to
128 the host is not restarted: its own supervisor has given up, or the user must act. After a signal, or if
the host was lost, it is restarted, at most `control.max_restarts` times in ten minutes. So is one that was
given the address of the learner, when that has moved. A run goes on without a host of generators that is not
started again, while it has another one; for a host of the learner it waits `cluster.pending_s`, then it ends.
"""

import logging
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.cluster.plans import GENERATORS, LEARNER, LEARNER_ADDRESS, SIGNALS, Cluster, HostPlan, HostState
from asyncrl.config.schema import Config
from asyncrl.errors import RunError
from asyncrl.hosting.children import Process, ProcessSpec, ThisHost
from asyncrl.hosting.gpus import count_gpus, is_elsewhere
from asyncrl.hosting.progress import Pace, Sign
from asyncrl.hosting.supervisor import USER_ERROR

log = logging.getLogger(__name__)

GRACE_S = 30.0  # seconds in which generators give their tickets back
AGAIN_S = 15.0  # seconds after which a host is placed that could not be
NOT_STARTED = HostState(phase="pending", why="it waits for the address of the learner's host")


def wants_gpus(config: Config) -> bool:
    """Return whether hosts ask for GPUs. Those of other machines do so also if this one has none."""
    return config.learner.device != "cpu" and (is_elsewhere(config.cluster.kind) or count_gpus() > 0)


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


def host_spec(plan: HostPlan, logs: Path, *, is_extra: bool = False, grace_s: float = GRACE_S) -> ProcessSpec:
    """Return a host as what a supervisor keeps."""
    return ProcessSpec(
        name=plan.name,
        argv=plan.argv,
        env={},
        log_path=logs / f"{plan.name}.out",
        ends_run=plan.role == "learner",
        is_extra=is_extra,
        kind=GENERATORS if plan.role == "generators" else "",
        grace_s=grace_s,
    )


@dataclass(slots=True)
class Hosts(ThisHost):
    """The hosts of an engine, which start and end as the processes of `ThisHost` do."""

    cluster: Cluster
    pending_s: float
    on_change: Callable[[Mapping[str, HostState]], None]
    plans: dict[str, HostPlan] = field(default_factory=dict)
    _told: Mapping[str, HostState] = field(default_factory=dict)
    _seen: dict[str, HostState] | None = None  # in this tick; None before the engine was asked
    _may_wait: set[str] = field(default_factory=set)
    _pending_since_s: dict[str, float] = field(default_factory=dict)

    @property
    def states(self) -> dict[str, HostState]:
        """What the engine knows. It is asked once a tick, because it may be a program or a service."""
        if self._seen is None:
            self._seen = dict(self.cluster.states())
        return self._seen

    def sleep(self, wait_s: float) -> None:
        """Wait. That ends a tick."""
        self._seen = None
        ThisHost.sleep(self, wait_s)

    def start(self, spec: ProcessSpec, *, stands_by: bool = False) -> Process:
        """Place the host of that name, now or as soon as the engine can."""
        if spec.is_extra:
            self._may_wait.add(spec.name)
        started = _Command(self, self.plans[spec.name], spec.log_path)
        started.poll()
        return started

    def tend(self) -> None:
        """Tell changes to `on_change`. Raises RunError for a host that is not there within `pending_s`."""
        now_s, states, self._seen = self.now_s(), self.states, None
        if states != self._told:
            for name, state in states.items():
                if state.why and state != self._told.get(name):
                    log.warning("%s is %s: %s", name, state.phase, state.why)
            self._told = states
            self.on_change(states)
        # A run goes on without a host of generators that was lost, or that was added.
        learners = {name for name, plan in self.plans.items() if plan.role != "generators"}
        self._may_wait |= {name for name, state in states.items() if state.phase == "running"} - learners
        # A host of the learner stays lost where there is no other place for it.
        lost = {name for name, state in states.items() if state.phase == "lost"} & learners
        waiting = {name: state for name, state in states.items() if state.phase == "pending" or name in lost}
        waiting = {name: state for name, state in waiting.items() if name not in self._may_wait}
        self._pending_since_s = {name: self._pending_since_s.get(name, now_s) for name in waiting}
        for name, since_s in self._pending_since_s.items():
            if now_s - since_s > self.pending_s:
                raise RunError(
                    f"{name} has no host after {self.pending_s:g} s: {waiting[name].why}; free that, ask for "
                    "less, or raise cluster.pending_s"
                )


@dataclass(slots=True)
class _Command:
    """The command of one host, as a supervisor sees a process."""

    hosts: Hosts
    plan: HostPlan
    output: Path
    _is_begun: bool = False
    _is_over: bool = False  # it was to end before it had begun
    _begin_at_s: float = 0.0
    _learner: str = ""  # the address that it was started with
    _is_released: bool = False

    @property
    def pid(self) -> int:
        return self._state.pid

    def signs(self) -> Mapping[str, Sign]:
        return {self.plan.name: Sign(0, Pace.SLOW, self._state.phase)}

    def poll(self) -> int | None:
        learner = self.hosts.states.get(LEARNER, NOT_STARTED).address
        if not self._is_begun:
            if self._is_over:
                return -signal.SIGTERM
            now_s, waits = self.hosts.now_s(), self.plan.role != "learner" and not learner
            if waits or now_s < self._begin_at_s:
                return None
            try:
                self.hosts.cluster.start(self.plan.with_learner(learner), self.output)
            except OSError as error:  # this is temporary, and does not count as a death
                self._begin_at_s, name = now_s + AGAIN_S, self.plan.name
                log.error("%s cannot be started and is tried again in %.0f s: %s", name, AGAIN_S, error)
                return None
            self.hosts.states[self.plan.name] = HostState(phase="pending")  # until the engine is asked
            self._is_begun, self._learner = True, learner
        state, names_it = self._state, any(LEARNER_ADDRESS in word for word in self.plan.argv)
        if state.phase == "lost" or (names_it and learner not in ("", self._learner)):
            return -signal.SIGKILL
        if state.phase != "ended" or state.status is None:
            return None
        return USER_ERROR if 0 < state.status <= SIGNALS else state.status

    def terminate(self) -> None:
        self._is_over = True
        if self._is_begun:
            self.hosts.cluster.stop(self.plan.name, kill=False)

    def kill(self) -> None:
        self._is_over = True
        if self._is_begun and not self._is_released:
            self.hosts.cluster.stop(self.plan.name, kill=True)

    def take_over(self) -> None:
        raise BrokenPipeError("hosts have no standby")

    def close(self) -> None:
        self._is_released = True  # the name may be that of its successor

    @property
    def _state(self) -> HostState:
        return self.hosts.states[self.plan.name] if self._is_begun else NOT_STARTED
