"""Hosts of a Ray cluster. Ray chooses their nodes, and says when it has lost one; it carries nothing else.

A host is an actor in a placement group of its own. It runs the command as a child, which dies with it.
"""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from asyncrl.cluster.base import HostPlan, HostState
from asyncrl.errors import RunError
from asyncrl.hosting.processes import bound_to_us, module_argv
from asyncrl.hosting.route import PEERS_VARIABLE
from asyncrl.hosting.supervisor import USER_ERROR
from asyncrl.run.keys import SECRET_FILE_VARIABLE, SECRET_VARIABLE

CONNECT_S = 60.0
END_S = 15.0
LOOK_S = 2.0
AUTH_VARIABLE = "RAY_AUTH_MODE"
_NO_TOKEN = (
    f"{AUTH_VARIABLE} is not `token`, and without that everybody who reaches a Ray cluster runs programs in "
    "it; make a token with `ray get-auth-token --generate`, copy ~/.ray/auth_token to every node, and set "
    f"{AUTH_VARIABLE}=token for `ray start` on each node and for `asyncrl up`"
)


class _Host:
    """The actor of a host."""

    def __init__(self) -> None:
        self._is_begun = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, argv: list[str], output: Path, secret: str | None) -> int:
        """Run the command to its end, and return its exit status. Raises RunError."""
        us = ray.util.get_node_ip_address()
        if os.environ.get(AUTH_VARIABLE) != "token":
            raise RunError(f"on node {us} {_NO_TOKEN}")
        env = {name: value for name, value in os.environ.items() if name != SECRET_VARIABLE}
        # The route to our own address is our address: that which Ray gives to the others.
        env |= {PEERS_VARIABLE: us}
        if secret is not None:
            env[SECRET_FILE_VARIABLE] = "/dev/stdin"
        try:
            with output.open("ab") as file:
                self._process = subprocess.Popen(
                    # Linux ends it with this thread, which waits for it.
                    bound_to_us(argv),
                    env=env,
                    stdin=subprocess.PIPE,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            raise RunError(
                f"node {us} cannot begin ({error}); every node needs the run directory, on a shared file "
                "system, and run.root says where"
            ) from error
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write((secret or "").encode())
        self._is_begun.set()
        return self._process.wait()

    def where(self) -> tuple[str, int]:
        """Return our address and the id of the command's process, when it runs."""
        self._is_begun.wait()
        assert self._process is not None
        return ray.util.get_node_ip_address(), self._process.pid

    def terminate(self) -> None:
        """Ask the command to end."""
        os.kill(self.where()[1], signal.SIGTERM)

    def kill(self) -> None:
        """End the command and all that it has started."""
        with suppress(psutil.NoSuchProcess):
            command = psutil.Process(self.where()[1])
            for process in [command, *command.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()


@dataclass(slots=True)
class _Placed:
    plan: HostPlan
    output: Path
    group: Any
    actor: Any
    done: Any  # references to what `run` and `where` return
    where: Any
    state: HostState = field(default_factory=lambda: HostState(phase="pending", why="Ray looks for a node"))

    @property
    def is_live(self) -> bool:
        return self.state.phase in ("pending", "running")


class RayCluster:
    """Implements `cluster.base.Cluster` for the Ray cluster at RAY_ADDRESS, or that of this machine."""

    def __init__(self) -> None:
        self._placed: dict[str, _Placed] = {}
        self._free, self._looked_s = "", 0.0
        if os.environ.get(AUTH_VARIABLE) != "token":
            raise RunError(f"cluster.kind is ray, but {_NO_TOKEN}")
        _require_cluster()
        # Ray puts a handler of its own in its place.
        on_term = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(address="auto", log_to_driver=False, configure_logging=False)
        except (RayError, OSError, RuntimeError, ValueError) as error:
            raise RunError(_unreachable(str(error))) from error
        finally:
            signal.signal(signal.SIGTERM, on_term)

    def start(self, plan: HostPlan, output: Path) -> None:
        if (earlier := self._placed.get(plan.name)) and earlier.is_live:  # its node does not answer
            self._end(earlier, HostState(phase="lost"))
        needs = {"CPU": 1, "GPU": plan.gpus} if plan.gpus else {"CPU": 1}
        group = ray.util.placement_group([needs], strategy="STRICT_PACK", name=plan.name)
        actor = (
            ray.remote(_Host)
            .options(
                num_cpus=1,
                num_gpus=plan.gpus,
                max_concurrency=4,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group),
            )
            .remote()
        )
        argv = module_argv("asyncrl.cli.main", *plan.argv)
        # A call goes to the actor only. What a constructor is called with is kept where others can look.
        done = actor.run.remote(argv, output, plan.keys and plan.keys.text())
        self._placed[plan.name] = _Placed(plan, output, group, actor, done, actor.where.remote())

    def states(self) -> Mapping[str, HostState]:
        for placed in self._placed.values():
            if placed.is_live:
                self._look(placed)
        return {name: placed.state for name, placed in self._placed.items()}

    def stop(self, name: str, *, kill: bool) -> None:
        placed = self._placed[name]
        if placed.state.phase == "pending":
            self._end(placed, HostState(phase="lost", why="it was stopped before it had a node"))
        elif placed.is_live:
            (placed.actor.kill if kill else placed.actor.terminate).remote()

    def close(self) -> None:
        for name in self.states():
            self.stop(name, kill=True)
        if live := [placed.done for placed in self._placed.values() if placed.is_live]:
            ray.wait(live, num_returns=len(live), timeout=END_S)
        self.states()
        ray.shutdown()  # ends the actors of nodes that do not answer, too

    def _look(self, placed: _Placed) -> None:
        ready, _ = ray.wait([placed.done, placed.where], num_returns=2, timeout=0)
        try:
            if placed.done in ready:
                status = ray.get(placed.done)
                self._end(placed, HostState(phase="ended", status=status, address=placed.state.address))
            elif placed.where in ready:
                address, pid = ray.get(placed.where)
                placed.state = HostState(phase="running", address=address, pid=pid)
            else:
                placed.state = HostState(phase="pending", why=self._waits(placed.plan))
        except RayTaskError as error:
            self._end(placed, HostState(phase="ended", status=USER_ERROR, why=str(error.cause)))
        except RayError as error:
            self._end(placed, HostState(phase="lost", why=_last_line(str(error))))

    def _end(self, placed: _Placed, state: HostState) -> None:
        """Give back what the host holds, and say below its output why."""
        placed.state = state
        if state.why:
            with suppress(OSError), placed.output.open("a") as output:
                output.write(f"{placed.plan.name}: {state.why}\n")
        ray.kill(placed.actor)
        ray.util.remove_placement_group(placed.group)

    def _waits(self, plan: HostPlan) -> str:
        if time.monotonic() - self._looked_s > LOOK_S:
            free = available_resources_per_node()
            live = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
            have = {name: free.get(node, {}) for node, name in live.items()}
            self._free = ", ".join(f"{name} {_amount(found)}" for name, found in have.items())
            self._looked_s = time.monotonic()
        return f"it waits for {_amount({'GPU': plan.gpus, 'CPU': 1})} on one node; free: {self._free}"


def _amount(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{resources.get(kind, 0):g} {kind}s" for kind in ("GPU", "CPU"))


def _require_cluster() -> None:
    """Raise RunError if no cluster answers. Without this, `ray.init` may try for a quarter of an hour."""
    try:
        subprocess.run(
            module_argv("ray.scripts.scripts", "status"),
            capture_output=True,
            text=True,
            timeout=CONNECT_S,
            check=True,
        )
    except subprocess.TimeoutExpired as error:
        raise RunError(_unreachable(f"no answer within {CONNECT_S:g} s")) from error
    except subprocess.CalledProcessError as error:
        raise RunError(_unreachable(_last_line(error.stderr))) from error


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2].removeprefix("ray.exceptions.")


def _unreachable(found: str) -> str:
    address = os.environ.get("RAY_ADDRESS")
    where = f"at RAY_ADDRESS={address}" if address else "on this machine"
    return (
        f"cluster.kind is ray, but no Ray cluster {where} takes us: {found}; start one with `ray start "
        "--head`, name its HOST:PORT in RAY_ADDRESS, and give this command the token of the cluster"
    )
