"""Looks at a run: its status and the audit of its groups."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from asyncrl.buffer.redis import RedisBuffer
from asyncrl.buffer.shards import ShardedBuffer
from asyncrl.buffer.users import LEARNER, with_user
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.data.data_files import DataFiles
from asyncrl.errors import DataError, RunError, StoreError
from asyncrl.files import read_record
from asyncrl.launch.own_store import own_store
from asyncrl.run.directory import RunDirectory, find_run
from asyncrl.run.lock import RunLock
from asyncrl.telemetry.advice import bottleneck
from asyncrl.telemetry.jsonl import to_json
from asyncrl.telemetry.state import read_state
from asyncrl.telemetry.status import status_json


def status_values(directory: RunDirectory) -> dict[str, Any]:
    """Return the learner's status (`state` is None before the first) and values that follow from it."""
    state, up = read_state(directory.path), directory.is_up
    none_yet: dict[str, Any] = {"run": directory.path.name, "state": None, "members": []}
    values = (status_json(state.status) if state.status else none_yet) | {
        "directory": str(directory.path),
        "up": up,
        "processes": directory.children() if up else {},
        "hosts": (read_record(directory.hosts) or {}) if up else {},
        "silent_s": state.silent_s,
        "eta_s": state.eta_s,
        "idle": {
            "learner": state.idle_learner,
            "generators": state.idle_generators,
            "update": state.paused_generators,
            "stall": state.stalled_generators,
        },
        "generated_tokens_per_s": state.generated_tokens_per_s,
        "alarms": state.alarms,
        "dropped": state.dropped,
        "advice": bottleneck(state),
        "metrics": next(reversed(state.recent("time/step")), {}),
    }
    plain: dict[str, Any] = to_json(values)
    return plain


def audit_run(run: Path | None, store_url: str | None) -> dict[str, Any]:
    """Return counts of the ids of a run that is over, or up with a store that answers, by lane and place.

    `require_whole` judges them. Raises RunError and StoreError.
    """
    directory = find_run(run)
    config = load_config(directory.config)
    try:
        return _audit_store(config, directory, store_url)
    except StoreError as error:
        if store_url or config.store.url:
            raise  # a new empty store would prove nothing
        # A second server would write to the data of the first, which may live though it does not answer.
        if directory.is_up:
            found = f"{error}; {directory.path} is up, and its data belongs to its own store"
            raise RunError(f"{found}; try again, or end it: asyncrl down {directory.path}") from error
        with RunLock(directory.supervisor_lock), own_store(config, directory, needs_data=True) as server:
            return _audit_store(config, directory, server.url)


def require_whole(audit: dict[str, Any]) -> None:
    """Raise RunError if an id is missing or in two places."""
    lanes = [("training", audit), *((name, one) for name, one in audit.items() if name.startswith("eval"))]
    for lane, found in lanes:
        if found and (missing := int(found.get("missing", 0))):
            where = "nowhere" if missing > 0 else "in two places"
            problem = f"{abs(missing)} issued ids are {where}"
            raise RunError(f"{lane}: {problem}; please report this with the run directory")


def _audit_store(config: Config, directory: RunDirectory, store_url: str | None) -> dict[str, Any]:
    """Return counts of the training lane's ids by place, and under `evaluation NAME` those of each set."""
    from asyncrl.buffer.connection import StoreConnection
    from asyncrl.buffer.lanes import eval_lane, train_lane
    from asyncrl.evaluation import Rounds
    from asyncrl.run.keys import store_password

    url = store_url or directory.store_url()
    if url is None:
        raise RunError(f"{directory.path} has never been up here; give --store URL")
    if config.store.url is None:
        url = with_user(url, LEARNER)
    password = store_password(config.store, url, directory.keys(), os.environ)
    connection = StoreConnection(url, password=password, retry_s=2.0)
    found = _audit_of(train_lane(config, connection))
    try:
        rounds = Rounds.of(config, DataFiles(config).held_out)
    except DataError as error:  # for example a relative path, seen from another directory
        return found | {"evaluation": {"not_counted": str(error)}}
    for name, one in rounds.items():
        lane = eval_lane(config, connection, one.lane, one.prompts)
        found[f"evaluation {name}".strip()] = _audit_of(lane)
    return found


def _audit_of(lane: ShardedBuffer | RedisBuffer) -> dict[str, Any]:
    audit = lane.audit()
    return asdict(audit) | {
        "missing": audit.missing,
        "dead_letters": [asdict(letter) for letter in lane.dead_letters()],
    }
