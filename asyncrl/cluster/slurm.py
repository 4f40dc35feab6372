"""Hosts on the nodes of a Slurm allocation: each is a step, or a job of its own if no node is free.

Each job of a run has the run's directory as its comment.
"""

import contextlib
import logging
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, NamedTuple

from asyncrl.cluster.plans import LEARNER, SIGNALS, HostPlan, HostState, generators_plan, learner_plans
from asyncrl.config.schema import Config
from asyncrl.errors import RunError
from asyncrl.hosting.processes import module_argv
from asyncrl.hosting.route import PEERS_VARIABLE
from asyncrl.run.directory import RunDirectory
from asyncrl.run.keys import SECRET_FILE_VARIABLE, SECRET_VARIABLE

log = logging.getLogger(__name__)

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
_FOLLOW = """\
while sleep 60; do
  [ "$(squeue --noheader --jobs={run} --format=%T)" = PENDING ] && scancel $SLURM_JOB_ID
done &
"""
_FIELDS = "--Format=JobID:|,State:|,exit_code:|,Reason:|,Comment:|"
LOOK_S = 2.0
END_S = 60.0  # longer than Slurm's usual KillWait
# Leaves the process id of a command in a file.
_NAMED = 'echo $$ > "$0"; exec "$@"'
# Ends it from another step. Of a command that is only just placed, it awaits the file for half a minute.
_TERMINATED = (
    'n=0; until [ -s "$0" ] || [ $((n += 1)) -gt 150 ]; do sleep 0.2; done; kill -TERM "$(cat "$0")"'
)
# Prints which of the files a node does not have.
_LOOK = 'for file; do [ -e "$file" ] || echo "node $SLURMD_NODENAME has no $file"; done'
SUBMITTED = HostState(phase="pending")


class Job(NamedTuple):
    """What Slurm says of a job."""

    id: str
    state: str
    status: str  # as wait() has it
    why: str  # it waits
    run: str  # the run's directory

    def host(self) -> HostState:
        """Return the state of the host whose job this is."""
        match self.state:
            case "COMPLETED" | "FAILED":
                return HostState(phase="ended", status=os.waitstatus_to_exitcode(int(self.status)))
            case "CANCELLED":  # by us, or by the user
                return HostState(phase="ended", status=-signal.SIGTERM)
            case "RUNNING" | "COMPLETING" | "SUSPENDED":
                return HostState(phase="running")
            case state if state in LOST:
                return HostState(phase="lost", why=f"job {self.id}: {state}")
            case _:
                return HostState(phase="pending", why=f"job {self.id}: {self.why}")


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


@dataclass(slots=True)
class _Placed:
    node: str = ""
    step: "subprocess.Popen[bytes] | None" = None  # srun, on our node
    job: str = ""
    last: HostState = SUBMITTED


@dataclass(slots=True)
class SlurmCluster:
    """Implements `cluster.plans.Cluster` in an allocation. It is made in the main thread, for a signal."""

    config: Config
    addresses: Mapping[str, str] = field(init=False)  # of the nodes, by name
    _run: RunDirectory = field(init=False)
    _placed: dict[str, _Placed] = field(default_factory=dict)
    _look_at_s: float = 0.0
    _is_at_limit: bool = False

    def __post_init__(self) -> None:
        self._run = RunDirectory(self.config.run.directory)
        try:
            nodes, wanted = self._nodes(), self.config.cluster
            if len(nodes) < (hosts := wanted.learner_hosts + wanted.generator_hosts):
                raise RunError(
                    f"job {allocation()} has {len(nodes)} nodes, but cluster.learner_hosts and "
                    f"cluster.generator_hosts are {hosts}; ask for more, or leave it, and `up` submits one"
                )
            lines = ask("scontrol", "show", "node", "--oneliner", ",".join(nodes)).splitlines()
            found = [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines]
            self.addresses = {node["NodeName"]: node["NodeAddr"] for node in found}
            self._end_other_jobs()  # of a driver that was killed
            needed = (str(self._run.hosts_config.resolve()), module_argv("")[0])
            each = (f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1")
            lacking = ask("srun", *each, "sh", "-c", _LOOK, "sh", *needed).splitlines()
        except OSError as error:
            raise RunError(f"cluster.kind is slurm, but {error}") from error
        if lacking:
            cure = "run.root and Python's environment must be in a file system that all nodes share"
            raise RunError(f"{', '.join(sorted(lacking))}; {cure}")
        signal.signal(LIMIT, self._save_at_limit)

    def start(self, plan: HostPlan, output: Path) -> None:
        command, secret = module_argv("asyncrl.cli.main", *plan.argv), dict[str, str]()
        if plan.keys is not None:
            secret[SECRET_FILE_VARIABLE] = str(self._run.join_key.resolve())
        taken = {one.node for one in self._placed.values() if one.step and one.step.poll() is None}
        node = next((node for node in self._nodes() if node not in taken), None)
        if node is None:
            if plan.name == LEARNER:
                raise OSError(f"no node of job {allocation()} is free")
            words = ["env", *(f"{name}={value}" for name, value in secret.items()), *command]
            before = _FOLLOW.format(run=allocation())
            made = submit(rendered(self.config, plan.name, words, output, gpus=plan.gpus, before=before))
            self._placed[plan.name] = _Placed(job=made)
            return
        peers = {PEERS_VARIABLE: " ".join(at for name, at in self.addresses.items() if name != node)}
        self._pid_file(plan.name).unlink(missing_ok=True)  # of an earlier command, whose number may be taken
        # In a job that has whole nodes, but did not ask for their GPUs, a step sees those that it asks for.
        gpus = [f"--gpus-per-node={plan.gpus}"] if plan.gpus else []
        words = [*gpus, "sh", "-c", _NAMED, str(self._pid_file(plan.name)), *command]
        with output.open("ab") as file:
            self._placed[plan.name] = _Placed(
                node,
                _step(plan.name, node, words, file, peers | secret),
                last=HostState(phase="running", address=self.addresses[node]),
            )

    def states(self) -> Mapping[str, HostState]:
        if (now_s := time.monotonic()) >= self._look_at_s:
            with contextlib.suppress(OSError):  # Slurm's controller may be away; its nodes work on
                self._look()
            self._look_at_s = now_s + LOOK_S
        return {name: placed.last for name, placed in self._placed.items()}

    def _look(self) -> None:
        live = [one for one in self._placed.values() if one.last.phase in ("pending", "running")]
        found = jobs_of(self._run.path, "--states=all") if any(one.job for one in live) else []
        jobs = {job.id: job.host() for job in found}
        statuses = [one.step.poll() if one.step else None for one in live]
        nodes = self._nodes() if any(status is not None for status in statuses) else []
        for one, status in zip(live, statuses, strict=True):
            if one.step is None:
                one.last = jobs.get(one.job, one.last)
            elif status is not None:
                # Of a node that fails, srun reports 0; of a signal, 128 and its number.
                if status - SIGNALS in {*signal.Signals}:
                    status = SIGNALS - status
                if one.node in nodes:
                    one.last = HostState(phase="ended", address=one.last.address, status=status)
                else:
                    one.last = HostState(phase="lost", why=f"node {one.node} has failed")

    def stop(self, name: str, *, kill: bool) -> None:
        placed = self._placed[name]
        if placed.last.phase not in ("pending", "running"):
            return
        is_job = placed.step is None
        with contextlib.suppress(OSError):  # it has ended by itself
            # What `scancel` sends to a step reaches all of its processes, also a store that the learner needs
            # to save. To the command of a job it can send something alone.
            if is_job and (kill or placed.last.phase == "pending"):
                ask("scancel", placed.job)
            elif is_job:
                ask("scancel", "--batch", "--signal=TERM", placed.job)
            elif kill:
                ask("scancel", "--signal=KILL", *self._steps(name))
            else:
                words = ["sh", "-c", _TERMINATED, str(self._pid_file(name))]
                _step("stop", placed.node, words, subprocess.DEVNULL, {})

    def close(self) -> None:
        until_s = time.monotonic() + END_S
        try:
            while left := [*self._end_other_jobs(), *self._steps(*self._placed)]:
                if time.monotonic() > until_s:
                    log.error("Slurm does not end %s; look at them with squeue", ", ".join(left))
                    break
                for name in self._placed:
                    self.stop(name, kill=True)
                time.sleep(LOOK_S / 4)
            learner = self.states().get(LEARNER)
            if self._is_at_limit and learner and learner.status != 0:
                log.warning("at its time limit the job is queued again; the run then goes on")
                ask("scontrol", "requeue", allocation())
        except OSError as error:
            log.error("%s; `asyncrl down %s` ends what is left", error, self._run.path)

    def _save_at_limit(self, number: int, frame: FrameType | None) -> None:
        self._is_at_limit = True
        signal.raise_signal(signal.SIGTERM)

    def _pid_file(self, name: str) -> Path:
        return self._run.logs.resolve() / f"{name}.pid"

    def _nodes(self) -> list[str]:
        """Return the nodes of the allocation without those that have failed. Raises OSError."""
        names = ask("squeue", "--noheader", f"--jobs={allocation()}", "--format=%N").strip()
        return ask("scontrol", "show", "hostnames", names).split()

    def _steps(self, *names: str) -> list[str]:
        """Return the ids of hosts that are steps, on nodes that have not failed. Raises OSError."""
        words = ask("squeue", "--steps", "--noheader", f"--jobs={allocation()}", "--format=%i %j %N").split()
        steps, nodes = zip(words[::3], words[1::3], words[2::3], strict=True), self._nodes()
        return [step for step, name, node in steps if name in names and node in nodes]

    def _end_other_jobs(self) -> list[str]:
        others = [job.id for job in jobs_of(self._run.path) if job.id != allocation()]
        if others:
            ask("scancel", *others)
        return others


def _step(
    name: str, node: str, words: Sequence[str], output: IO[bytes] | int, env: dict[str, str]
) -> "subprocess.Popen[bytes]":
    """Run a command (after options of srun, if any) on an allocated node. srun ends with its status."""
    where = ["--nodes=1", "--ntasks=1", f"--nodelist={node}", f"--job-name={name}", "--overlap"]
    return subprocess.Popen(
        ["srun", *where, "--kill-on-bad-exit=1", "--cpu-bind=none", "--export=ALL", *words],
        env=environment() | env,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
