"""The processes of learner and generators: what `asyncrl up` and its relatives start, with which options."""

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from asyncrl.config.schema import Config
from asyncrl.errors import RunError
from asyncrl.hosting.children import ProcessSpec
from asyncrl.hosting.environment import LEARNER, child_environment
from asyncrl.hosting.gpus import count_gpus
from asyncrl.hosting.machine import share_of_cores
from asyncrl.hosting.placement import Placement, Seat, overfull, placement_of
from asyncrl.hosting.processes import module_argv
from asyncrl.hosting.rank_group import FLAG as STANDBY
from asyncrl.hosting.rank_group import MEMORY_SHARE, workers_of
from asyncrl.run.directory import RunDirectory
from asyncrl.run.keys import SECRET_VARIABLE, JoinKeys
from asyncrl.run.starts import CODE_VARIABLE, code_of


def learner_spec(
    config: Config, directory: RunDirectory, store_url: str, placement: Placement
) -> ProcessSpec:
    """Describe the learner's process, or with several ranks the process that starts them."""
    # At max_lag 0 the generators wait while the learner trains, and it waits while they sample.
    busy = config.staleness.max_lag and (len(placement.generators) or config.generator.count or 0)
    threads = config.learner.threads or share_of_cores(config.ranks_per_host + busy)
    module = "learner_process" if config.learner.ranks == 1 else "ranks"
    argv = module_argv(f"asyncrl.launch.{module}")
    argv += ["--config", str(directory.config), "--store", store_url]
    argv += [MEMORY_SHARE, f"{placement.learner_share:g}"]
    gpus = placement.learner_gpus
    env = child_environment(config, directory.path, threads=threads, gpus=gpus, also=LEARNER)
    return ProcessSpec(
        name="learner",
        argv=argv,
        standby_argv=[*argv, STANDBY],
        env=env | {SECRET_VARIABLE: directory.secret(), CODE_VARIABLE: json.dumps(code_of(config))},
        log_path=directory.logs / "learner.out",
        ends_run=True,
        workers=() if config.learner.ranks == 1 else workers_of(range(config.ranks_per_host)),
    )


def generator_maker(
    config: Config,
    directory: RunDirectory,
    store_url: str,
    keys: JoinKeys,
    *,
    learner: Sequence[Seat],
    prefix: str = "g",
    scorers: Path | None = None,
) -> Callable[[int, int, Collection[str]], ProcessSpec]:
    """Return a function (index, number of generators, names of those that run) -> a generator's process.

    `learner` are the seats of the ranks on this machine; `scorers` is where this command's scorers listen.
    The function raises RunError if a generator's GPUs have no room: running processes keep their shares.
    """
    gpus, seats = count_gpus(), {f"rank {rank} of the learner": seat for rank, seat in enumerate(learner)}
    ranks = tuple(seats)

    def make(index: int, count: int, running: Collection[str]) -> ProcessSpec:
        busy = len(ranks) if config.staleness.max_lag else 0
        threads = config.generator.threads or share_of_cores(count + busy)
        # An index beyond the count: generators that are leaving still have their GPUs.
        wanted = max(count, index + 1)
        placement = placement_of(config, gpus, generators=wanted, has_learner=bool(ranks))
        seat = placement.generators[index]
        name = f"{prefix}{index}"
        # A scorer keeps the share that it was started with.
        scoring = {other: seats.setdefault(other, one) for other, one in placement.scorers.items()}
        others = {other: seats[other] for other in (*ranks, *scoring, *running) if other in seats}
        if found := overfull(seat, others):
            raise RunError(
                f"{name} would need {found}; to divide the GPUs among {count} generators, start the run "
                f"again: `asyncrl down`, then `asyncrl up` with generator.count={count}"
            )
        seats[name] = seat
        argv = module_argv("asyncrl.launch.generator_process", "--id", name)
        argv += ["--config", str(directory.config), "--store", store_url]
        argv += ["--scorers", str(scorers)] if scorers else []
        argv += seat.options
        env = child_environment(config, directory.path, threads=threads, gpus=seat.gpus)
        return ProcessSpec(
            name=name,
            argv=argv,
            env=env | {SECRET_VARIABLE: keys.text()},
            log_path=directory.logs / f"{name}.out",
        )

    return make
