"""What a dead host costs a run of asyncrl on three hosts, and whether it loses or repeats a group.

The hosts are networks of this machine (`namespaces`: needs root), or nodes of a Ray cluster or of a Slurm
that this program starts. A tiny model is really trained, by the engine `transformers` and a DeepSpeed
learner. All times are what the run wrote, in seconds from the fault:

step_s      to the learner's next step, also one that it makes again after its checkpoint
new_step_s  to the next step that it had not made before
pause_s     the longest time without a step, until the host is back
back_s      until the host has its generator again; of the learner's, until all generators have joined again

`moves` is a learner whose host dies, and which begins on another one while the store and a generator stay:
learner_s      until its control plane listens there
follow_s       from then on, until the generator has joined

`generator process` is the measure of `generator host`: only the generator is killed. Ray has a node to spare;
a node of Slurm is turned on again as soon as Slurm has missed it.

    python -m bench.hosts [--engine namespaces ray slurm] [--times 20] [--minutes 60] [--json FILE]
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import psutil
import yaml

from asyncrl.buffer.server import find_server
from asyncrl.cluster.local import Network
from asyncrl.hosting.route import PEERS_VARIABLE
from bench.environment import describe, report
from bench.host_runs import Namespaces, Row, Run, opened
from tests.support.command import ASYNCRL
from tests.support.waiting import let_pass
from tests.support.whole_run import tiny_run

GENERATORS = ("cluster.generator_hosts=2", "generator.count=1")
RANKS = ("cluster.learner_hosts=2", "learner.ranks=2", "cluster.generator_hosts=1", "generator.count=1")
CUT_S, OFF_S, GOOD_S = 5.0, 20.0, 60.0
LOADING_S = 30.0  # in which a standby loads its libraries
# How often, on each engine: a learner's host or one of its ranks; a cable; a host of generators. A job of
# Slurm that has lost its first node is queued again, and how long it waits is up to Slurm.
TIMES = {"namespaces": (5, 3, 20), "moves": (5, 0, 0), "ray": (2, 0, 5), "slurm": (0, 0, 5)}
MEASURED = ("step_s", "new_step_s", "pause_s", "back_s", "learner_s", "follow_s")


def lose(run: Run, host: str) -> float:
    """All processes of a host end. Returns when."""
    run.engine.lose(run, host)
    at = time.time()
    run.engine.restore(run, host)
    return at


def kill_generator(run: Run, host: str) -> float:
    run.generator(host).kill()
    return time.time()


def cut(run: Run, host: str, for_s: float, *, is_off: bool = False) -> float:
    """Pull out a host's cable, for good if for `GOOD_S`; with `is_off`, all its processes end behind that."""
    cable = run.engine.cable(run, host)
    cable.cut()
    if is_off:
        cable.ends[1].kill()
    at = time.time()
    let_pass(for_s)
    if for_s != GOOD_S:
        cable.heal()
    return at


def generators_die(times: tuple[int, ...], until_s: float, run: Run) -> None:
    """All faults of a run with two hosts of generators; the learner's first."""
    run.wait(lambda: run.joined("learner-0", 0.0), "generator")
    first = "generators-0"
    for _ in range(times[0]):
        run.strike("learner host", "learner-0", lose, run.joined)
    for _ in range(times[1]):
        healed = lambda host, at: run.heard(host, at + CUT_S)  # noqa: E731
        run.strike("cable cut for 5 s", first, partial(cut, for_s=CUT_S), healed)
        run.strike("host off for 20 s, no FIN", first, partial(cut, for_s=OFF_S, is_off=True), run.joined)
    for number in range(times[2]):
        host = f"generators-{number % 2}"
        if time.monotonic() < until_s:
            run.strike("generator process", host, kill_generator, run.joined)
            run.strike("generator host", host, lose, run.joined)
    if times[1]:
        run.strike("cable cut for good", first, partial(cut, for_s=GOOD_S))


def ranks_die(times: int, run: Run) -> None:
    """A host of a rank dies while that of rank 0 has a standby, and again before it has one."""
    since = 0.0
    for _ in range(times):
        run.wait(lambda since=since: run.has_standby(since), "standby")
        let_pass(LOADING_S)
        run.strike("host of a rank", "learner-1", lose)
        since = time.time()
        run.strike("host of a rank, no standby", "learner-1", lose)


def learner_moves(at: Path, times: int, found: list[Row], save: Callable[[], None]) -> None:
    """The learner's host dies and another one gets its command; the store and generators have their own."""
    at.mkdir()
    with tiny_run(at) as config, closing(Network()) as network:
        store = network.host("store")
        url = f"redis://{network.address('store')}:6379/0"
        server = [str(find_server()), "--port", "6379", "--save", "", "--protected-mode", "no"]
        values = yaml.safe_load(config.read_text()) | {"store": {"url": url, "insecure": True}}
        values |= {"control": {"bind": "auto"}, "checkpoint": {"every": 10}}
        values["data"]["eval"], values["learner"]["steps"] = None, 100_000
        config.write_text(yaml.safe_dump(values))
        run = Run(Namespaces(), config, found, save)
        begun = [subprocess.Popen(store.command(*server), stdout=subprocess.DEVNULL)]

        def begin(host: str, *words: str) -> None:
            with (at / f"{host}.out").open("ab") as out:
                command = network.host(host).command(*ASYNCRL, *words, "--config", str(config))
                env = os.environ | {PEERS_VARIABLE: network.gateway}
                begun.append(subprocess.Popen(command, env=env, stdout=out, stderr=out))

        begin("a", "learner")
        run.wait((run.directory / "store.url").exists, "learner")
        begin("far", "generator", "--name", "far", "--store", url, "--wait", "300")
        run.wait(run.steps, "first step")
        for number in range(times):
            here, there = ("a", "b")[:: 1 if number % 2 == 0 else -1]
            network.hosts[here].kill()
            killed = time.time()
            begin(there, "learner")
            run.wait(lambda since=killed: run.joined("far", since), "generator")
            run.wait(lambda since=killed: run.steps(since), "next step")
            up = json.loads(run.directory.joinpath("status.json").read_text())["started_at"]
            joined, step = run.joined("far", killed), run.steps(killed)[0]["time"]
            assert joined is not None
            row = {"fault": "learner moves", "host": there, "learner_s": up - killed, "follow_s": joined - up}
            row = {key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()}
            found.append(row | {"step_s": round(step - killed, 2)})
            print(json.dumps(found[-1]), flush=True)
        audit = subprocess.run(
            store.command(*ASYNCRL, "audit", str(run.directory)), capture_output=True, text=True, check=True
        )
        found.append({"missing": json.loads(audit.stdout)["missing"]})
        print(json.dumps(found[-1]), flush=True)
        save()
        network.close()
        for process in begun:
            process.wait(60)


def measured(
    engine: Namespaces,
    at: Path,
    found: list[Row],
    save: Callable[[], None],
    faults: Callable[[Run], object],
    *overrides: str,
) -> None:
    """A run from its command to the proof after its end. What gets stuck ends it, and is a row."""
    at.mkdir()
    with tiny_run(at) as config:
        run = Run(engine, config, found, save)
        try:
            found.append({"started": [*engine.overrides, *overrides], "start_s": run.begin(*overrides)})
            print(json.dumps(found[-1]), flush=True)
            faults(run)
            found.append(run.end())
        except (AssertionError, ValueError, OSError, psutil.Error, subprocess.SubprocessError) as error:
            found.append({"stuck": f"{type(error).__name__}: {error}"})
        finally:
            print(json.dumps(found[-1]), flush=True)
            save()
            if run.up is not None:
                run.up.kill()
                run.up.wait(60)


def summary(found: list[Row]) -> Row:
    """Median and maximum by fault, and how much more the death of a host costs than that of a process."""
    faults = dict[str, Row]()
    for fault in dict.fromkeys(row["fault"] for row in found if "fault" in row):
        rows = [row for row in found if row.get("fault") == fault and "step_s" in row]
        values = {key: [row[key] for row in rows if key in row] for key in MEASURED}
        both = {key: [round(statistics.median(of), 2), max(of)] for key, of in values.items() if of}
        faults[fault] = {"times": len(rows), **both}
    host, process = (faults.get(f"generator {what}", {}) for what in ("host", "process"))
    more = {
        key: round(host[key][0] - process[key][0], 2) for key in MEASURED if key in host and key in process
    }
    return {"median and maximum": faults, "generator host less generator process, medians": more}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", nargs="+", choices=TIMES, default=["namespaces"])
    parser.add_argument("--times", type=int, default=20, help="most repetitions of each fault")
    parser.add_argument("--minutes", type=float, default=60.0, help="no generator of an engine dies later")
    parser.add_argument("--json", type=Path, metavar="FILE", help="which keeps the results of other engines")
    options = parser.parse_args()
    result = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    for name in options.engine:
        found, described = list[Row](), describe("asyncrl", "torch", "deepspeed", "transformers", "ray")
        times, until_s = (
            tuple(min(options.times, most) for most in TIMES[name]),
            time.monotonic() + options.minutes * 60,
        )

        def save(name: str = name, found: list[Row] = found, described: Row = described) -> None:
            result[name] = {"environment": described, **summary(found), "rows": found}
            if options.json:
                options.json.write_text(json.dumps(result, indent=1) + "\n")

        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as at, opened(name, Path(at)) as engine:
            if name == "namespaces":  # for comparison, without hosts
                alone = Namespaces(("generator.count=2",))
                measured(alone, Path(at, "alone"), found, save, lambda run: None)
            if name == "moves":
                learner_moves(Path(at, "moves"), times[0], found, save)
                continue
            die = partial(generators_die, times, until_s)
            measured(engine, Path(at, "generators"), found, save, die, *GENERATORS)
            if name == "namespaces":
                measured(engine, Path(at, "ranks"), found, save, partial(ranks_die, times[0]), *RANKS)
    report(result, options.json)


if __name__ == "__main__":
    main()
