"""Runs of the real asyncrl under a real Slurm of three nodes, which are networks of this machine."""

import json
import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest
import yaml

from asyncrl.commands.down import processes_of
from tests.support.command import ASYNCRL
from tests.support.slurm import COMMANDS, missing, on_node, three_nodes
from tests.support.waiting import wait_until
from tests.support.whole_run import steps, tiny_run

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]
WAIT_S = 600.0
FREE_S = 30.0


@pytest.fixture
def slurm(tmp_path):
    with three_nodes(tmp_path) as found:
        yield found


@pytest.fixture
def config(tmp_path):
    with tiny_run(tmp_path) as path:
        values = yaml.safe_load(path.read_text())
        values["cluster"] = {"kind": "slurm", "generator_hosts": 1, "sbatch": ["--time=60"]}
        values["generator"]["count"], values["learner"]["steps"] = 1, 100_000
        path.write_text(yaml.safe_dump(values))
        yield path


def run_of(config: Path) -> Path:
    return config.parent / "runs" / "whole"


def status(slurm, run: Path) -> dict:
    return json.loads(slurm.asyncrl("status", str(run), "--json"))


def phases(slurm, run: Path) -> dict[str, str]:
    return {name: host["phase"] for name, host in status(slurm, run)["hosts"].items()}


def members(slurm, run: Path) -> set[str]:
    return {one["generator_id"] for one in status(slurm, run)["members"] if one["silent_s"] < 5}


def await_that(condition, slurm, run: Path) -> None:
    def said() -> str:
        outs = [path.read_text()[-2000:] for path in sorted((run / "logs").glob("*.out"))]
        return "\n".join([slurm.run("squeue"), slurm.run("sinfo", "-N"), *outs])

    wait_until(condition, WAIT_S, said)


def nothing_is_left(slurm, run: Path, *, again: bool = False) -> None:
    """Steps after a checkpoint may be trained `again`."""
    assert slurm.jobs() == {}
    assert not processes_of(run)
    audit = json.loads(slurm.asyncrl("audit", str(run)))
    assert audit["missing"] == 0 == audit["evaluation"]["missing"]
    done = sorted(set(steps(run))) if again else steps(run)
    assert audit["done"] + audit["taken"] >= 4 * len(done)
    assert done == [*range(1, len(done) + 1)], "each step was trained once"


def test_a_run_on_slurm_needs_no_ray_cluster_built_by_hand_and_its_end_frees_every_node(slurm, config):
    """One command on a host where users log in, which finds programs of Slurm and a shell, and nothing else."""
    run, client, up = run_of(config), slurm.at / "client", ("up", "--config", str(config))
    client.mkdir()
    for name in (*COMMANDS, "sh", "sleep"):
        (client / name).symlink_to(shutil.which(name) or name)
    alone = (shutil.which("env") or "env", f"PATH={client}", *ASYNCRL, *up)
    assert "job 1 is submitted" in slurm.run(*alone, "learner.steps=3")
    await_that(lambda: status(slurm, run)["state"] == "finished", slurm, run)
    wait_until(lambda: slurm.jobs() == {}, FREE_S)
    assert "ExitCode=0:0" in slurm.run("scontrol", "show", "job", "1")
    assert steps(run) == [1, 2, 3] and not processes_of(run)


def test_a_run_with_one_dead_component_neither_holds_its_nodes_for_ever_nor_ends(slurm, config):
    run = run_of(config)
    assert "job 1 is submitted" in slurm.asyncrl("up", "--config", str(config))
    assert "job 1" in slurm.asyncrl("up", "--config", str(config), status=2), "a second one of that name"
    await_that(lambda: len(steps(run)) >= 2, slurm, run)
    hosts = status(slurm, run)["hosts"]
    assert {name: (host["phase"], host["address"]) for name, host in hosts.items()} == {
        "learner-0": ("running", "10.77.0.1"),
        "generators-0": ("running", "10.77.0.2"),
    }
    listens = {one.laddr.ip for one in on_node(slurm, "n1", "learner")[0].net_connections("tcp")}
    keys = [(run / name).read_text() for name in ("run.key", "join.key")]
    shown = [slurm.run("scontrol", "show", "job", "--details"), slurm.run("scontrol", "show", "steps")]
    shown += [" ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"])]
    assert listens <= {"10.77.0.1", "127.0.0.1"}

    # A generator on a node without a run of its own.
    said = slurm.asyncrl("scale", "generators=+1", str(run))
    assert "generators-1" in said
    await_that(lambda: members(slurm, run) == {"generators-0.g0", "generators-1.g0"}, slurm, run)
    assert slurm.jobs() == {"whole": "RUNNING", "generators-1": "RUNNING"}
    shown.append(slurm.run("scontrol", "write", "batch_script", "2", "-"))

    # No node is free for another one, which the run does not wait for.
    assert "generators-2 when there is a host" in slurm.asyncrl("scale", "generators=+1", str(run))
    await_that(lambda: slurm.jobs().get("generators-2") == "PENDING", slurm, run)
    assert "left: generators-2" in slurm.asyncrl("scale", "generators=-1", str(run))
    await_that(lambda: "generators-2" not in slurm.jobs(), slurm, run)

    [command] = on_node(slurm, "n2", "generators-0")
    os.kill(command.pid, signal.SIGKILL)
    await_that(lambda: not command.is_running() and on_node(slurm, "n2", "generators-0"), slurm, run)

    before = len(steps(run))
    slurm.power_off("n2")
    await_that(lambda: len(steps(run)) >= before + 2, slurm, run)
    lost = "generators-0 is lost: node n2 has failed"
    await_that(lambda: lost in (run / "logs" / "job.out").read_text(), slurm, run)
    await_that(lambda: phases(slurm, run).get("generators-0") == "pending", slurm, run)
    why = status(slurm, run)["hosts"]["generators-0"]["why"]
    assert why.startswith("job 4: ") or not why, why
    slurm.node("n2")
    await_that(lambda: members(slurm, run) == {"generators-0.g0", "generators-1.g0"}, slurm, run)

    slurm.power_off("n3")
    await_that(lambda: phases(slurm, run).get("generators-1") == "pending", slurm, run)
    slurm.node("n3")
    # Slurm lets a job wait for two minutes before it begins again. Within a second of the requeue a node would
    # refuse it, as a job that it has just killed.
    slurm.run("scontrol", "update", "jobid=2", "starttime=now+10")
    await_that(lambda: members(slurm, run) == {"generators-0.g0", "generators-1.g0"}, slurm, run)

    said = slurm.asyncrl("down", str(run))
    assert f"no process is left; step {len(steps(run))} is saved" in said and "lost" not in said
    nothing_is_left(slurm, run)
    for path in [*run.glob("logs/*"), run / "hosts.yaml", run / "hosts.json", run / "job.sh"]:
        shown.append(path.read_text())
    assert not [text for text in shown if any(key in text for key in keys)]


def test_a_run_with_a_learner_on_two_nodes_loses_one_and_goes_on(slurm, config):
    run, values = run_of(config), yaml.safe_load(config.read_text())
    values["cluster"]["learner_hosts"] = values["learner"]["ranks"] = 2
    config.write_text(yaml.safe_dump(values))
    slurm.asyncrl("up", "--config", str(config))
    await_that(lambda: len(steps(run)) >= 3, slurm, run)
    hosts = {name: host["address"] for name, host in status(slurm, run)["hosts"].items()}
    assert hosts == {"learner-0": "10.77.0.1", "learner-1": "10.77.0.2", "generators-0": "10.77.0.3"}
    launchers = on_node(slurm, "n2", "asyncrl.launch.ranks")
    [launcher] = [one for one in launchers if "--standby" not in one.cmdline()]
    before = len(steps(run))
    launcher.kill()
    await_that(lambda: len(steps(run)) >= before + 2, slurm, run)

    slurm.power_off("n2")
    await_that(lambda: phases(slurm, run)["learner-1"] == "pending", slurm, run)
    before = len(steps(run))
    slurm.node("n2")
    await_that(lambda: len(steps(run)) >= before + 2, slurm, run)
    said = slurm.asyncrl("down", str(run))
    assert f"step {steps(run)[-1]} is saved" in said
    nothing_is_left(slurm, run, again=True)


def test_a_run_that_loses_its_first_node_or_reaches_its_time_limit_is_queued_again(slurm, config):
    run = run_of(config)
    slurm.asyncrl("up", "--config", str(config))
    await_that(lambda: len(steps(run)) >= 3, slurm, run)
    slurm.asyncrl("scale", "generators=+1", str(run))
    await_that(lambda: slurm.jobs() == {"whole": "RUNNING", "generators-1": "RUNNING"}, slurm, run)
    # With the first node, all is gone that would end the job, which then needs the node of the other one.
    slurm.power_off("n1")
    await_that(lambda: slurm.jobs()["whole"] == "PENDING", slurm, run)
    before = len(steps(run))
    slurm.run("scontrol", "update", "jobid=1", "starttime=now+10")
    await_that(lambda: len(steps(run)) >= before + 2, slurm, run)
    slurm.node("n1")
    # Slurm warns five minutes before the limit.
    slurm.run("scontrol", "update", "jobid=1", "timelimit=5")
    await_that(lambda: slurm.jobs().get("whole") == "PENDING", slurm, run)
    saved = max(int(path.name.rpartition("-")[2]) for path in (run / "checkpoints").glob("step-*"))
    assert saved == steps(run)[-1]
    values = yaml.safe_load(config.read_text())
    values["learner"]["steps"] = saved + 3
    config.write_text(yaml.safe_dump(values))
    slurm.run("scontrol", "update", "jobid=1", "timelimit=60", "starttime=now+10")
    finished = lambda: status(slurm, run)["state"] == "finished"  # noqa: E731
    await_that(finished, slurm, run)
    wait_until(lambda: slurm.jobs() == {}, FREE_S)
    job = slurm.run("scontrol", "show", "job", "1")
    assert {"JobState=COMPLETED", "Restarts=2", "ExitCode=0:0"} <= {*job.split()}
    nothing_is_left(slurm, run, again=True)
    assert steps(run)[-1] == saved + 3


def test_what_cannot_be_is_refused_with_the_key_and_the_way_out(slurm, config):
    up = ("up", "--config", str(config))
    said = slurm.asyncrl(*up, 'cluster.sbatch=["--partition=gone"]', status=2)
    assert "invalid partition specified: gone" in said and "cluster.sbatch" in said
    said = slurm.asyncrl(*up, 'cluster.sbatch=["partition=all"]', status=2)
    assert "cluster.sbatch.0: found 'partition=all'; allowed is text matching `^--[a-z-]+(=.+)?$`" in said
    said = slurm.run(shutil.which("env") or "env", "PATH=/nowhere", *ASYNCRL, *up, status=2)
    assert "no squeue on PATH" in said
    assert slurm.jobs() == {}
    said = slurm.run("srun", "--nodes=1", *ASYNCRL, *up, status=2)
    assert (
        "has 1 nodes, but cluster.learner_hosts and cluster.generator_hosts are 2" in said and "leave" in said
    )
    assert not (run_of(config) / "checkpoints" / "step-1").exists()

    # The first node makes it, and the second one cannot see it.
    root = slurm.at / "n1"
    alone = [shutil.which("nsenter") or "nsenter", f"--mount=/proc/{slurm.daemons['n1'].pid}/ns/mnt"]
    slurm.run(*alone, *ASYNCRL, *up, f"run.root={root}")
    said = ["cat", f"{root}/whole/logs/job.out"]
    wait_until(lambda: slurm.jobs() == {})
    out = slurm.run(*alone, *said)
    assert f"node n2 has no {root}/whole/hosts.yaml" in out and "run.root" in out and "Traceback" not in out
