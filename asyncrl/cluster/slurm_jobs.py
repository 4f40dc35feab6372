"""The jobs of a run that Slurm knows. Each has the run's directory as its comment."""

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from asyncrl.cluster.plans import generators_plan, learner_plans
from asyncrl.config.schema import Config
from asyncrl.errors import RunError
from asyncrl.run.directory import RunDirectory
from asyncrl.run.keys import SECRET_VARIABLE

# Slurm sends it to `asyncrl up` before the time limit. `scancel` sends others, so the two are not confused.
LIMIT, LIMIT_S = signal.SIGUSR1, 300
ASK_S, AGAIN_S = 60.0, 0.5
# State of a job whose command has ended, while Slurm clears its nodes; `down` waits for that so long.
COMPLETING, COMPLETING_S = "COMPLETING", 120.0
# States of a job whose command Slurm has ended.
LOST = {"BOOT_FAIL", "DEADLINE", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"}
# Runs on all nodes but the first. What ends the job runs on that; `--no-kill` keeps a job that has lost it.
_WATCH = """\
others=$((SLURM_JOB_NUM_NODES - 1))
srun --overlap --no-kill --kill-on-bad-exit=0 --job-name=watch --relative=1 \\
  --nodes=$others --ntasks=$others sh -c 'while sleep 60; do
    jobs=$(squeue --noheader --jobs=$SLURM_JOB_ID --nodelist=$0) && [ -z "$jobs" ] &&
      scontrol requeue $SLURM_JOB_ID
  done' $SLURMD_NODENAME &
"""
# Cancels its host's job when the run's is queued again: that may need the node, and starts all hosts again.
FOLLOW = """\
while sleep 60; do
  [ "$(squeue --noheader --jobs={run} --format=%T)" = PENDING ] && scancel $SLURM_JOB_ID
done &
"""
_FIELDS = "--Format=JobID:|,State:|,exit_code:|,Reason:|,Comment:|"


class Job(NamedTuple):
    """What Slurm says of a job."""

    id: str
    state: str
    status: str  # as wait() has it
    why: str  # it waits
    run: str  # the run's directory


def allocation() -> str:
    """Return the id of the job that this process belongs to; empty outside of jobs."""
    return os.environ.get("SLURM_JOB_ID", "")


def environment() -> dict[str, str]:
    """Return our environment, without the run's secret."""
    return {name: value for name, value in os.environ.items() if name != SECRET_VARIABLE}


def ask(*words: str, text: str = "") -> str:
    """Return what a command of Slurm prints. Raises OSError with what it says."""
    try:
        done = subprocess.run(
            words, input=text, env=environment(), capture_output=True, text=True, timeout=ASK_S, check=False
        )
    except FileNotFoundError as error:
        raise OSError(f"there is no {words[0]} on PATH; use a host from which jobs are submitted") from error
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{words[0]} has not answered within {ASK_S:g} s") from error
    if done.returncode:
        raise OSError("; ".join(done.stderr.split("\n")).strip("; ") or f"{words[0]} has failed")
    return done.stdout


def jobs_of(run: Path, *which: str) -> list[Job]:
    """Return the jobs of a run: those that have not ended, or `which` as squeue has it. Raises OSError."""
    said = ask("squeue", "--noheader", f"--user={os.getuid()}", _FIELDS, *which)
    found = [Job(*line.strip().removesuffix("|").split("|", 4)) for line in said.splitlines()]
    return [job for job in found if job.run == str(run.resolve())]


def rendered(
    config: Config,
    name: str,
    command: Sequence[str],
    output: Path,
    *,
    gpus: int,
    nodes: int = 1,
    more: Sequence[str] = (),
    before: str = "",
) -> str:
    """Return the script of a job, which has `more` options, and runs `before` first."""
    words = [f"--job-name={name}", f"--comment={config.run.directory.resolve()}", f"--nodes={nodes}"]
    words += ["--ntasks-per-node=1", "--exclusive", "--mem=0", *([f"--gpus-per-node={gpus}"] if gpus else [])]
    words += ["--requeue", "--open-mode=append", f"--output={output.resolve()}", *more]
    lines = [f"#SBATCH {shlex.quote(word)}" for word in [*words, *config.cluster.sbatch]]
    return "\n".join(["#!/bin/sh", *lines, f"{before}exec {shlex.join(command)}", ""])


def run_script(config: Config, command: Sequence[str]) -> str:
    """Return the script of the job that has the nodes of all hosts, and runs `command` on the first."""
    run, on_gpus = RunDirectory(config.run.directory), config.learner.device != "cpu"
    learner, *_ = learner_plans(config, run.hosts_config, on_gpus=on_gpus)
    generators = generators_plan(config, run.hosts_config, 0, None, on_gpus=on_gpus)
    return rendered(
        config,
        config.run.name,
        command,
        run.logs / "job.out",
        gpus=max(learner.gpus, generators.gpus),
        nodes=config.cluster.learner_hosts + config.cluster.generator_hosts,
        more=("--no-kill", f"--signal=B:{LIMIT.name.removeprefix('SIG')}@{LIMIT_S}"),
        before=_WATCH,
    )


def submit(script: str) -> str:
    """Submit a job and return its id. Raises OSError."""
    return ask("sbatch", "--parsable", text=script).strip().partition(";")[0]


def end_jobs(run: Path, is_over: Callable[[], bool], report: Callable[[str], object]) -> bool:
    """Let the jobs of a run save and end, and cancel those that are left when `is_over()`.

    Returns whether there were any. A job that Slurm does not clear from its nodes counts as ended, and
    `report` gets its id. Raises RunError.
    """
    asked, lived_s = set[str](), time.monotonic()
    while True:
        try:
            if not (found := jobs_of(run)):
                break
            live = [job for job in found if job.state != COMPLETING]
            waiting = [job.id for job in live if job.state == "PENDING"]
            running = [job.id for job in live if job.state == "RUNNING" and job.id not in asked]
            if live:
                lived_s = time.monotonic()
            elif time.monotonic() > lived_s + COMPLETING_S:
                left = ", ".join(job.id for job in found)
                said = f"the commands of jobs {left} have ended, but Slurm clears their nodes for longer than"
                report(f"{said} {COMPLETING_S:g} s; look at the nodes with squeue, and tell who runs them")
                break
            if ids := [job.id for job in live] if is_over() else waiting:
                ask("scancel", *ids)
            elif running:
                ask("scancel", "--batch", "--signal=TERM", *running)
            asked |= {*running, *waiting}
        except OSError as error:
            # Jobs that were asked to leave save also while Slurm's controller is away; scancel ends that.
            if not asked or is_over():
                raise RunError(f"the jobs of {run}: {error}; end them with scancel") from error
        time.sleep(AGAIN_S)
    return bool(asked)
