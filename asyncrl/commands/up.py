"""`asyncrl up`: starts store, learner and generators on this machine, and restarts those that die."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from asyncrl.best_effort import BestEffort
from asyncrl.buffer.users import GENERATOR, LEARNER, user_of, with_user
from asyncrl.cluster.plans import store_url
from asyncrl.commands.scale import Scaled
from asyncrl.commands.supervising import StartedRun, claimed, supervised
from asyncrl.config.schema import Config
from asyncrl.data.data_files import DataFiles
from asyncrl.files import replace_text
from asyncrl.hosting.children import family
from asyncrl.hosting.environment import RUN_VARIABLE
from asyncrl.hosting.gpus import count_gpus
from asyncrl.hosting.placement import placement_of
from asyncrl.hosting.route import in_clear, peers_in, reaches, with_addresses
from asyncrl.launch import specs
from asyncrl.launch.own_store import opened_store
from asyncrl.launch.scorers import scorer_specs
from asyncrl.run.directory import RunDirectory, needing, write_text
from asyncrl.run.keys import SECRET_FILE_VARIABLE, is_given, run_keys
from asyncrl.run.saved import Saved, refuse_changes
from asyncrl.telemetry.logs import setup_logging


@contextmanager
def started(
    config: Config,
    saved: Saved | None,
    *,
    fresh: bool,
    generators: bool,
    console: bool,
    join_key: Path | None,
) -> Iterator[StartedRun]:
    """Start a run, or resume it from the checkpoint `saved`. Raises RunError.

    With `console` the supervisor also logs to standard error. `join_key` gets a copy of the generators' key.
    """
    config = with_addresses(config, peers_in(os.environ))
    directory, may_fail, how_to_join = RunDirectory(config.run.directory), BestEffort(), list[str]()
    placement = placement_of(config, count_gpus(), generators=None if generators else 0)
    with ExitStack() as stack:

        def refuse() -> None:
            refuse_changes(config, directory, saved, DataFiles(config))

        given = run_keys(os.environ) if not generators and is_given(os.environ) else None
        keys = stack.enter_context(claimed(directory, config, refuse, may_fail, fresh=fresh, given=given))
        members = stack.enter_context(family())
        setup_logging("supervisor", directory.logs, console=console)
        os.environ[RUN_VARIABLE] = str(directory.path.resolve())  # the store belongs to the run too
        url, tend_store = stack.enter_context(opened_store(config, directory, os.environ))
        is_own = config.store.url is None
        generator_url = with_user(url, GENERATOR) if is_own else url
        learner_url = with_user(url, LEARNER) if is_own else url
        learner = specs.learner_spec(config, directory, learner_url, placement)
        with needing(directory.path):
            replace_text(directory.path / "store.url", generator_url, durable=True)
            if not generators or config.control.bind is not None:
                if join_key is not None:
                    write_text(join_key, keys.join.text(), private=True)
                how_to_join = _how_to_join(config, directory.write_join_key(keys.join), generator_url)
        described = [learner, *scorer_specs(config, directory, config.served if generators else {})]
        run = stack.enter_context(supervised(described, config.control, directory, members, may_fail))
        scaled = None
        if generators:
            seats = placement.learner_seats
            make = specs.generator_maker(config, directory, generator_url, keys.join, learner=seats)
            scaled = stack.enter_context(Scaled(run.supervisor, make, directory.scale, directory.scaled))
            scaled.begin(len(placement.generators))

        def tend() -> None:
            if scaled is not None:
                with may_fail("scaling"):
                    scaled.tend()
            run.tend()

        yield replace(run, how_to_join=how_to_join, tend=tend, tend_store=tend_store)


def _how_to_join(config: Config, join_key: Path, url: str) -> list[str]:
    if user_of(url) == LEARNER:  # of a store with the users of docs/security.md
        url = with_user(url, GENERATOR)
    lines = [f"generators join with: asyncrl generator --store {url}"]
    if config.control.bind is None or (config.store.url is None and config.store.bind is None):
        lines.append(
            "from this host only: set control.bind, and store.bind or store.url, for generators elsewhere"
        )
    else:
        url = url if config.store.url else store_url(config, "")
        lines.append(f"from other hosts: asyncrl generator --store {url}")
        lines.append(f"with a copy of {join_key} there, which {SECRET_FILE_VARIABLE} names")
        lines += filter(None, [in_clear(reaches(config, ""))])
    return lines
