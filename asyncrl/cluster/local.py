"""Hosts on this machine, each with a network of its own: a rehearsal of a run on many hosts."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.cluster.base import HostPlan, HostState
from asyncrl.cluster.network import Network, obstacle
from asyncrl.errors import RunError
from asyncrl.hosting.gpus import visible_devices
from asyncrl.hosting.processes import bound_to_us, module_argv
from asyncrl.hosting.route import PEERS_VARIABLE
from asyncrl.run.keys import SECRET_FILE_VARIABLE, SECRET_VARIABLE


@dataclass(slots=True)
class _Placed:
    plan: HostPlan
    output: Path
    gpus: Sequence[int] = ()
    process: "subprocess.Popen[bytes] | None" = None
    is_over: bool = False  # it was to end, perhaps before it had its GPUs


@dataclass(slots=True)
class LocalCluster:
    """Implements `cluster.base.Cluster`. Hosts end with the thread that started them."""

    gpus: Sequence[int]  # those of this machine, which hosts divide
    network: Network = field(init=False)
    _placed: dict[str, _Placed] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if found := obstacle():
            raise RunError(
                f"cluster.kind is local, whose hosts are networks of this machine, but {found}; leave out "
                "cluster.kind to train without them"
            )
        self.network = Network()

    def start(self, plan: HostPlan, output: Path) -> None:
        self.network.host(plan.name)
        self._placed[plan.name] = _Placed(plan, output)
        self._begin(self._placed[plan.name])

    def states(self) -> Mapping[str, HostState]:
        return {name: self._state(placed) for name, placed in self._placed.items()}

    def stop(self, name: str, *, kill: bool) -> None:
        self._placed[name].is_over = True
        if kill:
            self.network.hosts[name].kill()
        elif (process := self._placed[name].process) is not None:
            process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        self.network.close()
        for placed in self._placed.values():
            if placed.process is not None:
                placed.process.wait()

    def _state(self, placed: _Placed) -> HostState:
        self._begin(placed)
        if placed.process is None:
            if placed.is_over:
                return HostState(phase="ended", status=-signal.SIGTERM)
            found = f"it waits for {placed.plan.gpus} GPUs; free: {len(self._free())}"
            return HostState(phase="pending", why=found)
        status = placed.process.poll()
        return HostState(
            phase="running" if status is None else "ended",
            address=self.network.address(placed.plan.name),
            status=status,
            pid=placed.process.pid,
        )

    def _free(self) -> list[int]:
        live = [one for one in self._placed.values() if one.process and one.process.poll() is None]
        taken = {gpu for one in live for gpu in one.gpus}
        return [gpu for gpu in self.gpus if gpu not in taken]

    def _begin(self, placed: _Placed) -> None:
        """Run the command, if that has not happened and its GPUs are free."""
        plan, free = placed.plan, self._free()
        if placed.process is not None or placed.is_over or len(free) < plan.gpus:
            return
        placed.gpus = free[: plan.gpus]
        env = {name: value for name, value in os.environ.items() if name != SECRET_VARIABLE}
        env |= {PEERS_VARIABLE: self.network.gateway}
        if placed.gpus:
            env["CUDA_VISIBLE_DEVICES"] = visible_devices(placed.gpus)
        if plan.keys is not None:
            env[SECRET_FILE_VARIABLE] = "/dev/stdin"
        command = self.network.host(plan.name).command(*module_argv("asyncrl.cli.main", *plan.argv))
        with placed.output.open("ab") as output:
            placed.process = subprocess.Popen(
                bound_to_us(command),
                env=env,
                stdin=subprocess.DEVNULL if plan.keys is None else subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        if plan.keys is not None and placed.process.stdin is not None:
            with placed.process.stdin as pipe:
                pipe.write(plan.keys.text().encode())
