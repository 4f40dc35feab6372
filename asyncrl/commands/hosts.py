"""`asyncrl up` with `cluster.kind`: starts one command on each host, and restarts hosts that are lost.

Kubernetes does both itself, so that for it there is only a text to print.
"""

import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict

from asyncrl.best_effort import BestEffort
from asyncrl.cluster.driver import Hosts, host_spec, open_cluster, wants_gpus
from asyncrl.cluster.kubernetes import rendered
from asyncrl.cluster.plans import (
    GENERATORS,
    HostState,
    described,
    generators_plan,
    learner_plans,
    node_plan,
    nodes_in,
    reachable,
)
from asyncrl.cluster.slurm import COMPLETING, allocation, jobs_of, run_script, submit
from asyncrl.commands.rank_host import longest_save
from asyncrl.commands.scale import Scaled
from asyncrl.commands.supervising import StartedRun, last_status, require_not_up
from asyncrl.config.resolved import dump_config
from asyncrl.config.schema import Config
from asyncrl.errors import RunError
from asyncrl.files import replace_text
from asyncrl.hosting.children import ProcessSpec, family
from asyncrl.hosting.processes import module_argv
from asyncrl.hosting.route import PEERS_VARIABLE, reaches
from asyncrl.hosting.supervisor import Supervisor
from asyncrl.run.directory import RunDirectory, needing
from asyncrl.run.lock import RunLock
from asyncrl.telemetry.logs import setup_logging


@contextmanager
def started_on_hosts(config: Config, *, fresh: bool, console: bool) -> Iterator[StartedRun]:
    """Start a run on the hosts of `config.cluster`, or resume it. Raises RunError.

    The learner's host checks the rest of the config, and reads and writes the same run directory.
    """
    directory, config, may_fail = RunDirectory(config.run.directory), reachable(config), BestEffort()
    on_gpus = wants_gpus(config)
    with ExitStack() as stack:
        with needing(directory.path):
            require_not_up(directory, fresh=fresh)
            directory.make()
        stack.enter_context(RunLock(directory.driver_lock))
        with needing(directory.path):
            directory.create(fresh=fresh, config=dump_config(config))
            directory.draw_secret()
            # Before any host looks for it: NFS remembers for a minute that a file was not there.
            directory.write_join_key(keys := directory.keys().join)
            directory.forget_stop(by_slurm=config.cluster.kind == "slurm")
            replace_text(directory.hosts_config, dump_config(config), durable=True)
        members = stack.enter_context(family())
        setup_logging("driver", directory.logs, console=console)
        cluster = stack.enter_context(closing(open_cluster(config)))

        def record(states: Mapping[str, HostState]) -> None:
            found = {name: asdict(state) for name, state in states.items()}
            with may_fail("the record of hosts"):
                replace_text(directory.hosts, json.dumps(found))

        hosts = Hosts(cluster, config.cluster.pending_s, record)

        def make(index: int, count: int, running: Collection[str]) -> ProcessSpec:
            plan = generators_plan(config, directory.hosts_config, index, keys, on_gpus=on_gpus)
            hosts.plans[plan.name] = plan
            return host_spec(plan, directory.logs, is_extra=index >= config.cluster.generator_hosts)

        # All hosts with ranks save together.
        save_s, file = longest_save(config), directory.hosts_config
        learners = learner_plans(config, file, on_gpus=on_gpus)
        hosts.plans |= {plan.name: plan for plan in learners}
        supervisor = Supervisor(
            [host_spec(plan, directory.logs, grace_s=save_s) for plan in learners],
            max_restarts=config.control.max_restarts,
            host=hosts,
        )
        stack.enter_context(last_status(directory, may_fail))
        stack.enter_context(supervisor)
        each = config.generator.count or 1
        paths = directory.scale, directory.scaled
        scaled = stack.enter_context(Scaled(supervisor, make, *paths, prefix=GENERATORS, each=each))
        scaled.begin(config.cluster.generator_hosts)

        def tend() -> None:
            hosts.tend()
            with may_fail("scaling"):
                scaled.tend()
            members.tend()

        yield StartedRun(supervisor, (), tend, lambda: save_s)


def become_host(config: Config, *, fresh: bool) -> None:
    """Replace this process by the command of its node, if SkyPilot has several. Raises RunError."""
    if config.cluster.kind != "local" or not nodes_in(os.environ):
        return
    if fresh:
        found = "found --fresh, but SkyPilot repeats the command of lost nodes"
        raise RunError(f"{found}; choose another run.name")
    directory, config = RunDirectory(config.run.directory), reachable(config)
    plan = node_plan(config, directory.hosts_config, os.environ)
    with needing(directory.path):
        directory.make()
        replace_text(directory.hosts_config, dump_config(config), durable=True)
    os.environ.setdefault(PEERS_VARIABLE, " ".join(nodes_in(os.environ)[1:]))
    os.execv(sys.executable, module_argv("asyncrl.cli.main", *plan.argv))


def manifests(config: Config, *, fresh: bool, with_keys: bool) -> str:
    """Return what `kubectl apply -f -` takes. Raises RunError.

    The run's secret stays in the run directory on this machine, so that the next manifests have the same.
    """
    if fresh:
        raise RunError(
            "found --fresh, but each start of a pod would delete the run's files; delete their claim instead "
            f"(kubectl delete pvc {config.cluster.claim or config.run.name}), or choose another run.name"
        )
    directory = RunDirectory(config.run.directory)
    if not with_keys:
        ports = reaches(reachable(config), f"{config.run.name}-learner")
        return "".join(f"# {one}\n" for one in ports) + rendered(config, None)
    with needing(directory.path):
        directory.make()
        directory.draw_secret()
    return rendered(config, directory.keys())


def submits(config: Config) -> bool:
    """Return whether this process is not in a job of Slurm, which it only submits."""
    return config.cluster.kind == "slurm" and not allocation()


def dry_lines(config: Config, command: Sequence[str]) -> Iterator[str]:
    """Yield what each host would run, by line, and the job in which `command` would start it."""
    if submits(config):
        yield run_script(config, command)
    yield from described(config, on_gpus=wants_gpus(config))


def submitted(config: Config, command: Sequence[str], *, fresh: bool) -> Iterator[str]:
    """Submit the job in which `command` starts the run; yield how to follow it, by line. Raises RunError."""
    directory = RunDirectory(config.run.directory)
    try:
        live = (job for job in jobs_of(directory.path) if job.state != COMPLETING)
        for job in live:
            found = f"run {directory.path} is up already, or waits: job {job.id} is {job.state}"
            cure = f"stop it with `asyncrl down {directory.path}`, or choose another run.name"
            raise RunError(f"{found}; {cure}")
        with needing(directory.path):
            require_not_up(directory, fresh=fresh)
            directory.make()
        with RunLock(directory.driver_lock), needing(directory.path):
            directory.create(fresh=fresh, config=dump_config(config))
            if not directory.config.exists():  # by which other commands know a run
                replace_text(directory.config, dump_config(config))
            directory.forget_stop(by_slurm=True)
            replace_text(directory.job, script := run_script(config, command))
        job_id = submit(script)
    except OSError as error:
        raise RunError(f"cluster.kind is slurm, but {error}; see cluster.sbatch") from error
    yield f"job {job_id} is submitted, and writes to {directory.logs}/job.out once it has its nodes"
    yield f"what it waits for: squeue --job={job_id}; how it goes: asyncrl status {directory.path}"
    yield f"end it: asyncrl down {directory.path}"
