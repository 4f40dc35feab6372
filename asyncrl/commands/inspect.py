"""Commands that look at a run: status, audit."""

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from asyncrl.buffer.redis import RedisBuffer
from asyncrl.buffer.shards import ShardedBuffer
from asyncrl.buffer.users import LEARNER, with_user
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.data.dataset import DataFiles
from asyncrl.errors import DataError, RunError, StoreError
from asyncrl.launch.own_store import own_store
from asyncrl.run.directory import RunDirectory, find_run
from asyncrl.run.lock import is_locked
from asyncrl.telemetry.advice import bottleneck
from asyncrl.telemetry.dashboard import SILENT_S, render
from asyncrl.telemetry.jsonl import to_json
from asyncrl.telemetry.live import watch
from asyncrl.telemetry.state import read_state
from asyncrl.telemetry.status import read_status, status_json


def show_status(run: Path | None, *, as_json: bool, watch_it: bool) -> None:
    """Print the dashboard once, keep showing it while the run is up, or print all it knows as JSON."""
    directory = find_run(run)
    if watch_it:
        watch(directory.path, over=lambda: not is_up(directory))
    elif as_json:
        print(json.dumps(status_values(directory)))  # noqa: T201 - the command's output
    else:
        console = Console()
        console.print(render(read_state(directory.path), console.width))


def is_up(directory: RunDirectory) -> bool:
    """Whether its supervisor is alive; of a run that is looked after elsewhere, whether its learner has spoken lately."""
    if directory.supervisor_lock.exists():
        return is_locked(directory.supervisor_lock)
    status = read_status(directory.status)
    return status is not None and not status.is_final and time.time() - status.updated_at < SILENT_S


def status_values(directory: RunDirectory) -> dict[str, Any]:
    """The learner's own status (`state` is null before its first), and what follows from metrics and processes."""
    state = read_state(directory.path)
    status = status_json(state.status) if state.status else {"run": directory.path.name, "state": None, "members": []}
    up = is_up(directory)
    derived = {
        "directory": str(directory.path),
        "up": up,
        "processes": directory.children() if up else {},
        "silent_s": state.silent_s,
        "eta_s": state.eta_s,
        "idle": {"learner": state.idle_learner, "generators": state.idle_generators, "update": state.paused_generators},
        "generated_tokens_per_s": state.generated_tokens_per_s,
        "alarms": state.alarms,
        "dropped": state.dropped,
        "advice": bottleneck(state),
        "metrics": state.history.rows[state.trained_steps[-1]] if state.trained_steps else {},
    }
    values: dict[str, Any] = to_json({**status, **derived})
    return values


def show_audit(run: Path | None, store_url: str | None) -> None:
    """Print where every issued id is; RunError when one is missing or in two places."""
    directory = find_run(run)
    config = load_config(directory.config)
    try:
        audit = audit_store(config, directory, store_url)
    except StoreError:
        if store_url or config.store.url:
            raise  # an empty store of our own would prove nothing
        with own_store(config, directory, needs_data=True) as server:  # the run is over; its data is still there
            audit = audit_store(config, directory, server.url)
    print(json.dumps(to_json(audit), indent=1))  # noqa: T201 - the command's output
    for lane, found in (("training", audit), ("evaluation", audit["evaluation"])):
        if found and (missing := int(found.get("missing", 0))):
            where = "nowhere" if missing > 0 else "in two places"
            raise RunError(f"{lane}: {abs(missing)} issued ids are {where}; please report this with the run directory")


def audit_store(config: Config, directory: RunDirectory, store_url: str | None) -> dict[str, Any]:
    """The conservation law of the train lane, and under `evaluation` that of the other one, if the run has held-out data."""
    from asyncrl.buffer.connection import StoreConnection
    from asyncrl.launch.wiring import eval_lane, store_password, train_lane

    url = store_url or directory.store_url()
    if url is None:
        raise RunError(f"{directory.path} has never been up here; give --store URL")
    if config.store.url is None:
        url = with_user(url, LEARNER)
    password = store_password(config.store, url, directory.keys(), os.environ)
    connection = StoreConnection(url, password=password, retry_s=2.0)
    found = _audit_of(train_lane(config, connection))
    try:
        held_out = min(config.eval.prompts, DataFiles(config.data).held_out_rows)
    except DataError as error:  # such as a relative path, seen from another directory
        return found | {"evaluation": {"not_counted": str(error)}}
    return found | {"evaluation": _audit_of(eval_lane(config, connection, held_out)) if held_out else None}


def _audit_of(lane: ShardedBuffer | RedisBuffer) -> dict[str, Any]:
    audit = lane.audit()
    return asdict(audit) | {"missing": audit.missing, "dead_letters": [asdict(letter) for letter in lane.dead_letters()]}
