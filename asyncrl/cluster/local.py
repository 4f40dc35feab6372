"""Hosts on this machine, each with a network of its own: a rehearsal of a run on many hosts."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.cluster.plans import HostPlan, HostState
from asyncrl.errors import RunError
from asyncrl.hosting.gpus import visible_devices
from asyncrl.hosting.processes import bound_to_us, module_argv
from asyncrl.hosting.route import PEERS_VARIABLE
from asyncrl.run.keys import SECRET_FILE_VARIABLE, SECRET_VARIABLE

END_S = 10.0
_HELD = ("unshare", "--net", "sh", "-c", "echo; exec sleep infinity")


@dataclass(frozen=True, slots=True)
class Namespace:
    """A network of its own, as long as the process lives that holds it."""

    holder: "subprocess.Popen[bytes]"

    @classmethod
    def begin(cls) -> "Namespace":
        """Make a network. It ends with the thread that called this."""
        shell = shutil.which(_HELD[0]) or _HELD[0]
        holder = subprocess.Popen(bound_to_us([shell, *_HELD[1:]]), stdout=subprocess.PIPE)
        assert holder.stdout is not None
        holder.stdout.readline()
        made = cls(holder)
        made.ip("link", "set", "lo", "up")  # as on every host: a store of torch connects to itself
        return made

    @property
    def file(self) -> Path:
        """A file that stands for the network."""
        return Path(f"/proc/{self.holder.pid}/ns/net")

    def command(self, *words: str) -> list[str]:
        """Return the command that runs another one in the network."""
        return [shutil.which("nsenter") or "nsenter", f"--net={self.file}", *words]

    def ip(self, *words: str) -> None:
        """Run the command of that name in the network. Raises CalledProcessError."""
        subprocess.run(self.command("ip", *words), check=True, capture_output=True, timeout=30)

    def processes(self) -> list[int]:
        """Return the ids of the processes in the network, without the one that holds it."""
        found, mine = list[int](), ""
        with contextlib.suppress(OSError):  # its holder was killed
            mine = os.readlink(self.file)
        for place in Path("/proc").glob("[0-9]*/ns/net"):
            with contextlib.suppress(OSError):
                if os.readlink(place) == mine and int(place.parts[2]) != self.holder.pid:
                    found.append(int(place.parts[2]))
        return found

    def kill(self) -> None:
        """End the processes in the network, as a host that loses its power does."""
        until_s = time.monotonic() + END_S
        while (left := sorted(self.processes())) and time.monotonic() < until_s:
            # Stopped first, or one may still act on the death of another. The youngest is killed first: the
            # kernel wakes stopped children of a process that ends, with a signal on which they would act.
            for number, pids in ((signal.SIGSTOP, left), (signal.SIGKILL, reversed(left))):
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
            time.sleep(0.02)

    def close(self) -> None:
        self.holder.kill()
        self.holder.wait(END_S)


@dataclass(slots=True)
class Network:
    """Hosts by name, each with one address, and a switch that has a cable to each."""

    switch: Namespace = field(default_factory=Namespace.begin)
    hosts: dict[str, Namespace] = field(default_factory=dict)
    gateway: str = "10.77.0.254"

    def __post_init__(self) -> None:
        self.switch.ip("link", "add", "switch", "type", "bridge")
        self.switch.ip("address", "add", f"{self.gateway}/24", "dev", "switch")
        self.switch.ip("link", "set", "switch", "up")

    def host(self, name: str) -> Namespace:
        """Return the host of that name, which is made if there is none."""
        if name not in self.hosts:
            made = self.hosts[name] = Namespace.begin()
            switch = str(self.switch.holder.pid)
            made.ip("link", "add", "eth0", "type", "veth", "peer", "name", self._cable(name), "netns", switch)
            made.ip("address", "add", f"{self.address(name)}/24", "dev", "eth0")
            made.ip("link", "set", "eth0", "up")
            self.switch.ip("link", "set", self._cable(name), "master", "switch", "up")
        return self.hosts[name]

    def address(self, name: str) -> str:
        return f"10.77.0.{[*self.hosts].index(name) + 1}"

    def close(self) -> None:
        """End all hosts with their processes."""
        for host in self.hosts.values():
            host.kill()
        for namespace in (*self.hosts.values(), self.switch):
            namespace.close()

    def _cable(self, name: str) -> str:
        return f"cable{[*self.hosts].index(name)}"


def obstacle() -> str:
    """Say why there can be no networks here; empty if there can."""
    missing = [name for name in ("ip", "nsenter", "unshare") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} is not installed (apt-get install iproute2 util-linux)"
    try:
        words: Sequence[str] = ("unshare", "--net", "ip", "link", "add", "a0", "type", "bridge")
        subprocess.run(words, capture_output=True, text=True, timeout=30, check=True)
    except subprocess.CalledProcessError as error:
        return f"this user has no right to make them ({error.stderr.strip()}); root has it"
    return ""


@dataclass(slots=True)
class _Placed:
    plan: HostPlan
    output: Path
    gpus: Sequence[int] = ()
    process: "subprocess.Popen[bytes] | None" = None
    is_over: bool = False  # it was to end, perhaps before it had its GPUs


@dataclass(slots=True)
class LocalCluster:
    """Implements `cluster.plans.Cluster`. Hosts end with the thread that started them."""

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
