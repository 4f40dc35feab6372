"""The processes of a config's scorers: how they are started and reached, in a run or for one command."""

import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config.resolved import dump_config
from asyncrl.config.reward_section import ModelJudge, OfScorer, ScorerConfig
from asyncrl.config.schema import Config
from asyncrl.errors import RunError
from asyncrl.files import socket_path
from asyncrl.hosting.children import ProcessSpec
from asyncrl.hosting.environment import child_environment
from asyncrl.hosting.gpus import count_gpus
from asyncrl.hosting.placement import placement_of
from asyncrl.hosting.processes import module_argv
from asyncrl.hosting.progress import Limits
from asyncrl.hosting.supervisor import Supervisor
from asyncrl.rewards.opened import OpenScorer
from asyncrl.run.directory import RunDirectory

if TYPE_CHECKING:
    from asyncrl.control.scoring import ScorerService


def scorer_specs(
    config: Config,
    directory: RunDirectory,
    scorers: Mapping[str, ScorerConfig],
    *,
    generators: int | None = None,  # on a host without the learner
    place: Path | None = None,
    prefix: str = "",
) -> list[ProcessSpec]:
    """Describe the processes of these scorers, which listen in `place`, by default the run directory."""
    from asyncrl.control.scoring import endpoint_of

    made = []
    placement = placement_of(config, count_gpus(), generators=generators, has_learner=generators is None)
    for name, scorer in scorers.items():
        for index in range(scorer.count):
            own = f"{prefix}{name}.{index}"
            endpoint = endpoint_of(place or directory.path, name, index)
            options = placement.scorers[f"{name}.{index}"].options
            argv = ("--id", own, "--name", name, "--endpoint", endpoint, "--config", str(directory.config))
            made.append(
                ProcessSpec(
                    name=own,
                    argv=module_argv("asyncrl.launch.scorer_process", *argv, *options),
                    env=child_environment(config, directory.path, threads=1, gpus=scorer.gpus_of(index)),
                    log_path=directory.logs / f"{own}.out",
                    serves=bool(prefix),
                )
            )
    return made


def scorers_in(config: Config, directory: Path) -> OpenScorer:
    """Return what makes the Service of a scorer that listens in `directory`."""

    def open_scorer(settings: OfScorer) -> "ScorerService":
        from asyncrl.control.scoring import ScorerService

        name, call_s, writes = settings.scorer, config.reward.timeout_s, isinstance(settings, ModelJudge)
        count, remembers = config.scorers[name].count, settings.cache
        return ScorerService(name, directory, count, call_s=call_s, remembers=remembers, writes=writes)

    return open_scorer


@contextmanager
def started_scorers(config: Config) -> Iterator[Path]:
    """Run the scorers of a config for a command, apart from any run; yields where they listen.

    Raises RunError if they die while they load their models.
    """
    with tempfile.TemporaryDirectory(prefix="asyncrl-") as place:
        directory = RunDirectory(Path(place))
        if not config.scorers:
            yield directory.path
            return
        directory.create(fresh=False)
        directory.config.write_text(dump_config(config), encoding="utf-8")
        # Room for one engine, which the command starts after them.
        specs, control = scorer_specs(config, directory, config.scorers, generators=1), config.control
        supervisor = Supervisor(specs, max_restarts=control.max_restarts, limits=Limits.of(control))
        failed: list[RunError] = []

        def watch() -> None:
            try:
                supervisor.run()
            except RunError as error:
                failed.append(error)

        # This thread must not end before the processes, which the kernel kills with it.
        watching = threading.Thread(target=watch)
        watching.start()
        sockets = [socket_path(directory.path / f"{spec.name}.sock") for spec in specs]
        try:
            while watching.is_alive() and not all(socket.exists() for socket in sockets):
                watching.join(0.1)
            if failed:
                raise failed[0]
            yield directory.path
        finally:
            supervisor.request_stop("over")
            watching.join()
            supervisor.stop()
