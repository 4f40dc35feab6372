"""The runs of bench.hosts: engines, how a host of theirs loses its power, and what a run says of itself."""

import contextlib
import itertools
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import psutil

from asyncrl.cluster.local import Namespace
from asyncrl.commands.down import processes_of
from asyncrl.telemetry.jsonl import Tail
from reliability.chaos.hosts import Cable
from reliability.chaos.real import lineage_of, longest_pause
from tests.support.ports import free_ports
from tests.support.ray_nodes import RayNodes, add_node, ray_nodes
from tests.support.slurm import NODES, Slurm, on_node, three_nodes
from tests.support.waiting import wait_until
from tests.support.whole_run import B, call, start

SETTINGS = ("learner.steps=100000", "data.eval=null", "checkpoint.every=10", "control.max_restarts=1000")
WAIT_S = 420.0
Row = dict[str, Any]


class Namespaces:
    """What the benchmark needs to know of an engine, and a run does not; here of networks of this machine."""

    def __init__(self, overrides: tuple[str, ...] = ("cluster.kind=local",)) -> None:
        self.overrides = overrides

    def up(self, config: Path, *overrides: str) -> "subprocess.Popen[bytes] | None":
        return start(config, *overrides)

    def command(self, *words: str) -> str:
        return call(*words)

    def lose(self, run: "Run", host: str) -> None:
        self.cable(run, host).ends[1].kill()

    def restore(self, run: "Run", host: str) -> None: ...

    def make_ready(self) -> None: ...

    def cable(self, run: "Run", host: str) -> Cable:
        """From the switch to a host. Who holds a network is found by its age: the switch came first."""
        assert run.up is not None
        children = [one for one in psutil.Process(run.up.pid).children() if one.name() == "sleep"]
        holders = sorted(children, key=lambda one: one.create_time())
        number = int(run.hosts()[host]["address"].rpartition(".")[2]) - 1
        switch, end = (Namespace(cast(Any, holders[place])) for place in (0, number + 1))
        return Cable((switch, end), number)


class OnRay(Namespaces):
    """Nodes of a Ray cluster, of which one is to spare when a host is lost."""

    def __init__(self, nodes: RayNodes) -> None:
        store, control = (f"tcp://auto:{port}" for port in free_ports(2))
        super().__init__(("cluster.kind=ray", f"store.bind={store}", f"control.bind={control}"))
        self.nodes, self.has_spare = nodes, True

    def lose(self, run: "Run", host: str) -> None:
        raylet = self.nodes.of(run.hosts()[host]["pid"])
        for process in [raylet, *raylet.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        raylet.wait(60)
        self.has_spare = False

    def make_ready(self) -> None:
        if not self.has_spare:
            add_node(self.nodes.cluster, 0)
            self.has_spare = True


class OnSlurm(Namespaces):
    """A Slurm of three nodes, all of which the run has."""

    def __init__(self, slurm: Slurm) -> None:
        super().__init__(("cluster.kind=slurm", 'cluster.sbatch=["--time=120"]'))
        self.slurm, self.off = slurm, ""

    def up(self, config: Path, *overrides: str) -> None:
        self.slurm.asyncrl("up", "--config", str(config), *overrides)

    def command(self, *words: str) -> str:
        return self.slurm.asyncrl(*words)

    def lose(self, run: "Run", host: str) -> None:
        [self.off] = [node for node in NODES if on_node(self.slurm, node, host)]
        self.slurm.power_off(self.off)

    def restore(self, run: "Run", host: str) -> None:
        run.wait(lambda: run.hosts()[host]["phase"] == "pending", f"loss of {host}")
        self.slurm.node(self.off)


@contextlib.contextmanager
def opened(name: str, directory: Path) -> Iterator[Namespaces]:
    """Start what the engine of that name needs."""
    if name == "ray":
        os.environ["RAY_AUTH_MODE"] = "token"  # Ray reads it at its import
        with ray_nodes(directory, gpus=[0] * 4) as nodes:
            yield OnRay(nodes)
    elif name == "slurm":
        with three_nodes(directory) as slurm:
            yield OnSlurm(slurm)
    else:
        yield Namespaces()


class Run:
    """A run on an engine. Times are Unix seconds, unless they are called seconds."""

    def __init__(self, engine: Namespaces, config: Path, found: list[Row], save: Callable[[], None]) -> None:
        self.engine, self.config, self.found, self.save = engine, config, found, save
        self.directory = config.parent / "runs" / "whole"
        self.up: subprocess.Popen[bytes] | None = None
        files = {"metrics": "metrics/learner"}
        files |= {name: f"logs/{name}" for name in ("learner", "driver", "supervisor")}
        self._tails = {name: Tail(self.directory / f"{file}.jsonl") for name, file in files.items()}
        self._read: dict[str, list[Row]] = {name: [] for name in files}

    def lines(self, name: str, since: float = 0.0) -> list[Row]:
        """Return the records of a file, whose times ascend."""
        for line in self._tails[name]:
            if isinstance(line["time"], str):
                line["time"] = datetime.fromisoformat(line["time"]).timestamp()
            self._read[name].append(line)
        return [*itertools.takewhile(lambda line: line["time"] > since, reversed(self._read[name]))][::-1]

    def hosts(self) -> dict[str, Row]:
        return json.loads((self.directory / "hosts.json").read_text())

    def steps(self, since: float = 0.0) -> list[Row]:
        return [row for row in self.lines("metrics", since) if "time/step" in row]

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Fail after `WAIT_S` or when the run has ended, with the end of what was printed."""

        def seen() -> str:
            out = self.config.parent / "up.out" if self.up else self.directory / "logs" / "job.out"
            return f"no {what} within {WAIT_S:g} s: {out.read_text()[-1500:] if out.exists() else ''}"

        def is_so() -> object:
            assert self.up is None or self.up.poll() is None, f"the run ended; {seen()}"
            return condition()

        wait_until(is_so, WAIT_S, seen)

    def begin(self, *overrides: str) -> float:
        """Return the seconds from the command to the first step."""
        at = time.time()
        self.up = self.engine.up(self.config, *SETTINGS, *self.engine.overrides, *overrides)
        self.wait(self.steps, "first step")
        return round(self.steps()[0]["time"] - at, 1)

    def joined(self, host: str, since: float) -> float | None:
        """Return when the generator of a host joined; of the learner's host, when those of all others had."""
        if host == "learner-0":
            each = [self.joined(one, since) for one in self.hosts() if one.startswith("generators")]
            return max(at for at in each if at) if all(each) else None
        is_it = re.compile(rf"generator {host}\.g0\S* joined ").match
        return next((line["time"] for line in self.lines("learner", since) if is_it(line["event"])), None)

    def has_standby(self, since: float) -> bool:
        """Return whether a standby of rank 0's host was started."""
        return any(
            "a standby of learner started" in line["event"] for line in self.lines("supervisor", since)
        )

    def heard(self, host: str, since: float) -> float | None:
        """Return when the learner heard the generator of a host."""
        status = json.loads((self.directory / "status.json").read_text())
        silent_s = {one["generator_id"]: one["silent_s"] for one in status["members"]}.get(f"{host}.g0", 9.0)
        return status["updated_at"] if status["updated_at"] > since and silent_s < 2 else None

    def generator(self, host: str) -> psutil.Process:
        words = {"asyncrl.launch.generator_process", f"{host}.g0"}
        [found] = [one for one in processes_of(self.directory) if words <= {*one.cmdline()}]
        return found

    def strike(
        self,
        fault: str,
        host: str,
        act: Callable[["Run", str], float],
        back: Callable[[str, float], float | None] | None = None,
    ) -> None:
        """Measure a fault. `act` returns when it was; `back(host, since)`, when the host was there again."""
        self.engine.make_ready()
        known = max(row["step"] for row in self.steps())
        row: Row = {"fault": fault, "host": host}
        self.found.append(row)
        try:
            at = act(self, host)
            self.wait(lambda: any(one["step"] > known for one in self.steps(at)), "new step")
            if back is not None:
                times = list[float]()
                self.wait(lambda: times.append(back(host, at) or 0.0) or times[-1], f"return of {host}")
                row["back_s"] = round(times[-1] - at, 2)
            seen = len(self.steps(at))
            self.wait(lambda: len(self.steps(at)) >= seen + 5, "five more steps")
            steps = self.steps(at)
            row["step_s"] = round(steps[0]["time"] - at, 2)
            row["new_step_s"] = round(next(one["time"] for one in steps if one["step"] > known) - at, 2)
            row["pause_s"] = round(longest_pause(steps, at), 2)
            said = [line["event"] for line in self.lines("driver", at) if line["level"] != "info"]
            row |= {"rejoined": self.joined(host, at) is not None, "driver": said[:4]}
        except AssertionError as error:
            row["stuck"] = str(error)
            raise
        finally:
            print(json.dumps(row), flush=True)
            self.save()

    def end(self) -> Row:
        """`asyncrl down`, and the proof that no group was lost or trained twice."""
        began_s = time.monotonic()
        said, took_s = self.engine.command("down", str(self.directory)), time.monotonic() - began_s
        newest = max((self.directory / "checkpoints").glob("step-*"))
        state = json.loads((newest / "state.json").read_text())
        audit = json.loads(self.engine.command("audit", str(self.directory)))
        ledger, steps = state["ledger"], state["version"]
        consumed, rejected = ledger["watermark"] + len(ledger["above"]), sum(ledger["rejected"].values())
        groups, twice = self._lasting_groups()
        printed = [self.config.parent / "up.out", *self.directory.glob("logs/*.out")]
        texts = {one.name: one.read_text(errors="replace") for one in printed if one.exists()}
        return {
            "down_s": round(took_s, 1),
            "down": said.strip().rpartition("\n")[2],
            "processes_left": len(processes_of(self.directory)),
            "steps": steps,
            "groups": consumed,
            "missing": audit["missing"],
            "unaccounted": consumed - rejected - steps * B,
            "groups_in_timeline": groups,
            "trained_twice": twice,
            "steps_in_a_row": lineage_of(self.steps())[:steps] == [*range(1, steps + 1)],
            "tracebacks": {name: n for name, text in texts.items() if (n := text.count("Traceback"))},
        }

    def _lasting_groups(self) -> tuple[int, int]:
        """Return how many groups the timeline has in steps that lasted, and how many of them twice."""
        lasting: dict[int, list[str]] = {}
        step = 0
        for path in (self.directory / "trace_events.1.json", self.directory / "trace_events.json"):
            for line in path.read_text().splitlines()[1:] if path.exists() else ():
                name = json.loads(line.removesuffix(","))["name"]
                if found := re.fullmatch(r"step (\d+)", name):
                    step = int(found[1])
                    for later in [one for one in lasting if one >= step]:  # it was made again
                        del lasting[later]
                    lasting[step] = []
                elif name.startswith("group "):
                    lasting[step].append(name)
        groups = [group for of in lasting.values() for group in of]
        return len(groups), len(groups) - len({*groups})
