"""`asyncrl stage`: starts TRL's training on this machine, and restarts it if it dies."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from asyncrl.best_effort import BestEffort
from asyncrl.commands.supervising import StartedRun, claimed, supervised
from asyncrl.config.sections import ControlConfig
from asyncrl.hosting.children import ProcessSpec, family
from asyncrl.hosting.environment import LEARNER, role_environment
from asyncrl.hosting.gpus import count_gpus
from asyncrl.hosting.machine import share_of_cores
from asyncrl.hosting.processes import module_argv
from asyncrl.hosting.rank_group import workers_of
from asyncrl.run.directory import RunDirectory, needing
from asyncrl.stages.record import begin_stage, refuse_changed_stage
from asyncrl.stages.settings import StageConfig
from asyncrl.telemetry.logs import setup_logging

# How long a stage may be silent, and how often it may die, as in a run that says nothing else.
CONTROL = ControlConfig()
# Neither sends what is trained where.
QUIET = {"HF_HUB_DISABLE_TELEMETRY": "1", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}


@contextmanager
def started_stage(
    config: StageConfig, fixed: Mapping[str, Any], *, fresh: bool, console: bool
) -> Iterator[StartedRun]:
    """Start a stage, or resume it. `fixed` are settings and rows that must not change. Raises RunError."""
    directory, may_fail = RunDirectory(config.run.directory), BestEffort()

    def refuse() -> None:
        if not fresh:
            refuse_changed_stage(config, directory, fixed)

    on_cpu = bool(config.trl.get("use_cpu"))
    # With more GPUs in sight than ranks, transformers would divide each batch among them.
    gpus, threads = () if on_cpu else range(min(config.ranks, count_gpus())), share_of_cores(config.ranks)
    inherited = [*config.run.environment, *LEARNER]
    env = role_environment(inherited, directory.path, threads=threads, gpus=gpus, on_cpu=on_cpu)
    spec = ProcessSpec(
        name="stage",
        argv=module_argv("asyncrl.stages.process", "--config", str(directory.config)),
        env=env | QUIET,
        log_path=directory.logs / "stage.out",
        ends_run=True,
        workers=() if config.ranks == 1 else workers_of(range(config.ranks)),
    )
    with ExitStack() as stack:
        stack.enter_context(claimed(directory, config, refuse, may_fail, fresh=fresh))
        members = stack.enter_context(family())
        setup_logging("supervisor", directory.logs, console=console)
        with needing(directory.path):
            begin_stage(config, directory, fixed)
        yield stack.enter_context(supervised([spec], CONTROL, directory, members, may_fail))
