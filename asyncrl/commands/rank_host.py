"""`asyncrl rank`: the ranks of one further host of a learner."""

import os
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from asyncrl.buffer.users import LEARNER as STORE_USER
from asyncrl.cluster.plans import store_url
from asyncrl.commands.down import MARGIN, PATIENCE_S
from asyncrl.commands.supervising import StartedRun, supervised_apart
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError, RunError
from asyncrl.hosting.environment import RUN_VARIABLE
from asyncrl.hosting.gpus import count_gpus
from asyncrl.hosting.placement import placement_of
from asyncrl.hosting.rank_group import FLAG, HOST, LEARNER, name_of, workers_of
from asyncrl.hosting.route import reaches, unreached
from asyncrl.launch.specs import learner_spec
from asyncrl.run.directory import RunDirectory
from asyncrl.telemetry.logs import setup_logging


def started_ranks(
    config: Config, file: Path, number: int, *, learner: str
) -> AbstractContextManager[StartedRun]:
    """Start the ranks of host `number`, which meet those of the host with the address `learner`.

    The config is that of `file`. Raises RunError.
    """
    hosts, directory = config.cluster.learner_hosts, RunDirectory(config.run.directory)
    if not 0 < number < hosts:
        allowed = f"1 to {hosts - 1}" if hosts > 1 else "none"
        raise ConfigError(
            f"found --host {number}, but cluster.learner_hosts is {hosts}; allowed is {allowed}: host 0 has "
            "the command `asyncrl learner`"
        )
    if not directory.secret_path.exists():
        raise RunError(
            f"{directory.secret_path} is not on this host: the hosts of a learner share its run directory; "
            "set run.root to a directory that all of them share, and start the learner first"
        )
    meeting = [one for one in reaches(config, learner) if one.who == "learner-*"]
    for closed in unreached(meeting, config.control.timeout_s):
        raise RunError(closed)
    setup_logging(f"supervisor-{number}", directory.logs, console=True)
    os.environ[RUN_VARIABLE] = str(directory.path.resolve())
    placement = placement_of(config, count_gpus(), generators=0)
    url = store_url(config, learner, STORE_USER)
    spec, name = learner_spec(config, directory, url, placement), name_of(number)
    # Of an option that is given twice, the second counts.
    argv = [*spec.argv, "--config", str(file), HOST, str(number), LEARNER, learner]
    here = range(number * config.ranks_per_host, (number + 1) * config.ranks_per_host)
    spec = replace(
        spec,
        name=name,
        argv=argv,
        standby_argv=[*argv, FLAG],
        log_path=directory.logs / f"{name}.out",
        workers=workers_of(here),
    )
    return supervised_apart([spec], config.control, lambda: longest_save(config))


def longest_save(config: Config) -> float:
    """Return the seconds that a host of ranks gets to save; that of the learner has a closer limit."""
    return 2 * MARGIN * config.control.slow_s + PATIENCE_S
