"""Hosts of a Ray cluster. Ray chooses their nodes, and says when it has lost one; it carries nothing else.

A host is an actor in a placement group of its own. It runs the command as a child, which dies with it.
"""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen
from typing import Any

import psutil
import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from asyncrl.cluster.plans import HostPlan, HostState
from asyncrl.errors import RunError
from asyncrl.hosting.processes import bound_to_us, module_argv
from asyncrl.hosting.route import PEERS_VARIABLE
from asyncrl.hosting.supervisor import USER_ERROR
from asyncrl.run.keys import SECRET_FILE_VARIABLE, SECRET_VARIABLE

CONNECT_S, END_S, LOOK_S = 60.0, 15.0, 2.0
# A host ends if its driver was silent so long. Ray ends it with the driver, but not without its own head.
SILENT_S = 120.0
LEAVE_S = 4 * 3600.0  # then it is killed; longer than it takes to save (`commands.rank_host.longest_save`)
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
        self._process: Popen[bytes] | None = None
        self._asked_s = time.monotonic()

    def run(self, words: Sequence[str], directory: Path, output: Path, secret: str | None) -> int:
        """Run the command in a directory to its end, and return its exit status. Raises RunError."""
        us = ray.util.get_node_ip_address()
        if os.environ.get(AUTH_VARIABLE) != "token":
            raise RunError(f"on node {us} {_NO_TOKEN}")
        env = {name: value for name, value in os.environ.items() if name != SECRET_VARIABLE}
        # The route to our own address is our address: that which Ray gives to the others.
        env |= {PEERS_VARIABLE: us} | ({SECRET_FILE_VARIABLE: "/dev/stdin"} if secret else {})
        # Linux ends it with this thread, which waits for it.
        argv = bound_to_us(module_argv("asyncrl.cli.main", *words))
        try:
            with output.open("ab") as file:
                pipes: dict[str, Any] = {"stdin": PIPE, "stdout": file, "stderr": STDOUT}
                self._process = Popen(argv, cwd=directory, env=env, start_new_session=True, **pipes)
        except OSError as error:
            raise RunError(
                f"node {us} cannot begin ({error}); every node needs the working directory of `asyncrl up` "
                "and that of the run, run.root, at the same place on a shared file system"
            ) from error
        self._is_begun.set()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write((secret or "").encode())
        while self._process.poll() is None and time.monotonic() < self._asked_s + SILENT_S:
            time.sleep(LOOK_S / 4)
        if self._process.poll() is None:
            self.end(kill=False)
            with suppress(subprocess.TimeoutExpired):
                return self._process.wait(LEAVE_S)
            self.end(kill=True)
        return self._process.wait()

    def ask_for(self) -> None:
        """Hear that the driver still wants this host."""
        self._asked_s = time.monotonic()

    def where(self) -> tuple[str, int]:
        """Return our address and the id of the command's process, when it runs."""
        self._is_begun.wait()
        assert self._process is not None
        return ray.util.get_node_ip_address(), self._process.pid

    def end(self, *, kill: bool) -> None:
        """Ask the command to end; with `kill`, end it and all that it has started."""
        with suppress(psutil.NoSuchProcess):
            command = psutil.Process(self.where()[1])
            for process in [command, *command.children(recursive=True)] if kill else [command]:
                with suppress(psutil.Error):
                    process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)


@dataclass(slots=True)
class _Placed:
    plan: HostPlan
    output: Path
    group: Any
    actor: Any
    done: Any  # references to what `run` and `where` return
    where: Any
    state: HostState = field(default=HostState(phase="pending", why="Ray looks for a node"))


class RayCluster:
    """Implements `cluster.plans.Cluster` for the Ray cluster at RAY_ADDRESS, or that of this machine."""

    def __init__(self) -> None:
        self._placed: dict[str, _Placed] = {}
        self._free, self._looked_s, self._asked_s = "", 0.0, 0.0
        if os.environ.get(AUTH_VARIABLE) != "token":
            raise RunError(f"cluster.kind is ray, but {_NO_TOKEN}")
        on_term = signal.getsignal(signal.SIGTERM)
        _connect()
        signal.signal(signal.SIGTERM, on_term)  # Ray has put its own in its place

    def start(self, plan: HostPlan, output: Path) -> None:
        if plan.name in self._live():  # its node does not answer
            self._end(self._placed[plan.name], HostState(phase="lost"))
        needs = {"CPU": 1, "GPU": plan.gpus} if plan.gpus else {"CPU": 1}
        group = ray.util.placement_group([needs], strategy="STRICT_PACK", name=plan.name)
        place = PlacementGroupSchedulingStrategy(group)
        kind = ray.remote(num_cpus=1, num_gpus=plan.gpus, max_concurrency=4, scheduling_strategy=place)(_Host)
        actor = kind.remote()
        # A call goes to the actor only. What a constructor is called with is kept where others can look.
        secret = plan.keys and plan.keys.text()
        done = actor.run.remote(plan.argv, Path.cwd(), output.absolute(), secret)
        self._placed[plan.name] = _Placed(plan, output, group, actor, done, actor.where.remote())

    def states(self) -> Mapping[str, HostState]:
        if is_due := time.monotonic() > self._asked_s + LOOK_S:
            self._asked_s = time.monotonic()
        for placed in self._live().values():
            if is_due:
                placed.actor.ask_for.remote()
            self._look(placed)
        return {name: placed.state for name, placed in self._placed.items()}

    def stop(self, name: str, *, kill: bool) -> None:
        placed = self._placed[name]
        if placed.state.phase == "pending":
            self._end(placed, HostState(phase="lost", why="it was stopped before it had a node"))
        elif placed.state.phase == "running":
            placed.actor.end.remote(kill=kill)

    def close(self) -> None:
        for name in self.states():
            self.stop(name, kill=True)
        if ending := [placed.done for placed in self._live().values()]:
            ray.wait(ending, num_returns=len(ending), timeout=END_S)
        self.states()
        ray.shutdown()  # ends the actors of nodes that do not answer, too

    def _live(self) -> dict[str, _Placed]:
        return {name: one for name, one in self._placed.items() if one.state.phase in ("pending", "running")}

    def _look(self, placed: _Placed) -> None:
        ready, _ = ray.wait([placed.done, placed.where], num_returns=2, timeout=0)
        try:
            if placed.done in ready:
                self._end(placed, HostState(phase="ended", status=ray.get(placed.done)))
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
            free, live = available_resources_per_node(), [node for node in ray.nodes() if node["Alive"]]
            found = [(node["NodeManagerAddress"], free.get(node["NodeID"], {})) for node in live]
            self._free = ", ".join(f"{address} {_amount(left)}" for address, left in found)
            self._looked_s = time.monotonic()
        return f"it waits for {_amount({'GPU': plan.gpus, 'CPU': 1})} on one node; free: {self._free}"


def _amount(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{resources.get(kind, 0):g} {kind}s" for kind in ("GPU", "CPU"))


def _connect() -> None:
    """Connect this process. Raises RunError."""
    try:
        # If nothing answers, or not to our token, `ray.init` tries for a quarter of an hour, or says neither.
        words = module_argv("ray.scripts.scripts", "status")
        subprocess.run(words, capture_output=True, text=True, timeout=CONNECT_S, check=True)
        ray.init(address="auto", log_to_driver=False, configure_logging=False)
        return
    except subprocess.TimeoutExpired:
        found = f"no answer within {CONNECT_S:g} s"
    except subprocess.CalledProcessError as error:
        found = _last_line(error.stderr)
    except (RayError, OSError, RuntimeError, ValueError) as error:
        found = _last_line(str(error))
    address = os.environ.get("RAY_ADDRESS", "auto")
    raise RunError(
        f"cluster.kind is ray, but no Ray cluster at RAY_ADDRESS={address} takes us: {found}; start one with "
        "`ray start --head`, name its HOST:PORT in RAY_ADDRESS, and give this command the cluster's token"
    )


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2].removeprefix("ray.exceptions.")
