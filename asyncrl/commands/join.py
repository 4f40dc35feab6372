"""`asyncrl generator`: starts generators that join a run from this or another host."""

import os
import socket
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from asyncrl.commands.found import found_run
from asyncrl.commands.supervising import StartedRun, supervised_apart
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.control.base import check_names
from asyncrl.errors import RunError
from asyncrl.hosting.children import ProcessSpec
from asyncrl.launch.scorers import scorer_specs
from asyncrl.launch.specs import generator_maker
from asyncrl.run.keys import forget_secrets
from asyncrl.telemetry.logs import setup_logging


@contextmanager
def joined(
    count: int,
    config_path: Path | None,
    *,
    store_url: str | None,
    allowed: Collection[str],
    wait_s: float,
    report: Callable[[str], object],
    check: Callable[[Config], object],
    name: str | None = None,
) -> Iterator[StartedRun]:
    """Start `count` generators that leave when the run is over. Raises RunError.

    Their ids begin with `name`, by default with those of this host and process.
    `report` gets the reason for waiting, at most `wait_s`. `check` gets the config before anything is
    started, and raises if this machine cannot run it. For `allowed` see `check_allowed`.
    """
    prefix = f"{name}.g" if name else f"{socket.gethostname()}.{os.getpid()}."
    try:
        check_names(f"{prefix}{count - 1}")
    except ValueError as error:
        raise RunError(f"--name: {error}; give another --name") from error
    own = load_config(config_path) if config_path else None
    found, config = found_run(own, store_url=store_url, allowed=allowed, wait_s=wait_s, report=report)
    check(config)
    directory = found.directory(config, own)
    setup_logging(name or "generators", directory.logs, console=True)
    forget_secrets(os.environ)
    with ExitStack() as stack:
        scorers, place, running = list[ProcessSpec](), None, set[str]()
        if needed := config.served:
            with suppress(RunError):  # raised for the supervisor of another host
                running = {*directory.children()} if directory.supervisor() else running
        if not {f"{name}.0" for name in needed} <= running:  # else `asyncrl up` has them on this host
            place = Path(stack.enter_context(TemporaryDirectory(prefix="asyncrl-")))
            of_host = f"{name}." if name else prefix
            scorers = scorer_specs(config, directory, needed, generators=count, place=place, prefix=of_host)
        make = generator_maker(
            config, directory, found.url, found.keys, learner=(), prefix=prefix, scorers=place
        )
        specs = [make(index, count, ()) for index in range(count)]
        if own is None:
            specs = [replace(spec, argv=[*spec.argv, "--from-record"]) for spec in specs]
        yield stack.enter_context(supervised_apart([*scorers, *specs], config.control))
