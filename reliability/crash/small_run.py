"""A whole run without a model: `python -m reliability.crash.small_run up CONFIG STEPS`.

The shipped `asyncrl up` with its supervisor, run directory, store and checkpoints; in place of the learner a
process that leases, puts, takes, saves and commits by itself, whose weights are the ids that it was trained
on, and one generator that does nothing.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from asyncrl.buffer.base import BufferRules
from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.redis import RedisBuffer
from asyncrl.buffer.run_record import RunRecord, StoredRun
from asyncrl.cli.foreground import run_here
from asyncrl.commands import supervising
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.data.data_files import DataFiles
from asyncrl.errors import AsyncRLError, RunError
from asyncrl.hosting.children import ProcessSpec
from asyncrl.hosting.environment import PARENT_VARIABLE
from asyncrl.hosting.processes import die_with_parent
from asyncrl.launch import specs
from asyncrl.launch.step_deaths import StepDeaths
from asyncrl.run.checkpoint import CheckpointStore
from asyncrl.run.directory import RunDirectory
from asyncrl.run.keys import store_password
from asyncrl.run.lock import RunLock
from asyncrl.telemetry.jsonl import Lines
from asyncrl.telemetry.logs import setup_logging
from asyncrl.telemetry.status import StatusSnapshot, write_status
from asyncrl.telemetry.trackers import JsonlTracker
from tests.support.fake_trainer import save_whole

NAME, GROUPS = "small", 4
RULES = BufferRules(groups=GROUPS)


class Weights:
    """The ids of all groups that went into them, in order."""

    rank = 0

    def __init__(self) -> None:
        self.ids: list[int] = []

    def broadcast(self, value: bytes | None) -> bytes:
        return value or b""

    def save(self, directory: Path) -> None:
        (directory / "trainer.json").write_text(json.dumps({"ranks": 1, "ids": self.ids}))

    def export(self) -> Callable[[Path], object]:
        text = json.dumps(self.ids)

        def write(directory: Path) -> None:
            directory.mkdir()
            (directory / "model.safetensors").write_text(text)

        return write

    def load(self, directory: Path) -> None:
        self.ids = json.loads((directory / "trainer.json").read_text())["ids"]


def config_in(work: Path, root: Path, **control: Any) -> Path:
    """The config of such a run below `root`."""
    path, train = work / "run.yaml", work / "train.jsonl"
    train.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    values = {
        "run": {"name": NAME, "root": str(root / "runs")},
        "model": {"path": "model", "dtype": "float32"},
        "data": {"train": str(train)},
        "reward": {"functions": [{"function": "exact_match"}]},
        "batch": {"groups": GROUPS, "group_size": 4},
        "learner": {"device": "cpu"},
        "generator": {"count": 1},
        "control": control,
    }
    path.write_text(yaml.safe_dump(values))
    return path


def learn(config: Config, directory: RunDirectory, url: str) -> None:
    """Train up to `learner.steps` and save after each step; pause in steps while a file `slowly` exists."""
    weights, keys = Weights(), directory.keys()
    checkpoints = CheckpointStore(directory.checkpoints, directory.checkpoint_key(), 2)
    state: dict[str, Any] = checkpoints.load(weights) or {"version": 0, "ledger": Ledger().to_dict()}
    version, ledger, steps = state["version"], Ledger.from_dict(state["ledger"]), config.learner.steps
    Lines(directory.starts).write(
        [{"time": time.time(), "step": version, "versions": {}, "hardware": "none"}]
    )
    connection = StoreConnection(url, password=store_password(config.store, url, keys, {}), retry_s=30.0)
    record = StoredRun(name=config.run.name, config_json="{}", config_hash="", release="", key_id="")
    RunRecord(connection, keys.join.record).claim(record, fresh=version == 0)
    buffer = RedisBuffer(connection, config.run.name, RULES)
    buffer.recover(ledger, version=version, limit=GROUPS * steps)
    tracker, deaths = (
        JsonlTracker(directory.metrics / "learner.jsonl", directory.samples),
        StepDeaths(directory.step_under_way),
    )
    while version < steps:
        if (directory.path / "slowly").exists():
            time.sleep(0.2)
        for ticket in buffer.lease("g", GROUPS).tickets:
            buffer.put("g", ticket.id, b"frame %d" % ticket.id)
        if (take := buffer.take(ledger, GROUPS, window=GROUPS)) is None:
            continue
        deaths.begin(version, [b"frame %d" % number for number in take.ids])
        ledger.consume(take.ids)
        ledger.trained += len(take.ids)
        weights.ids += take.ids
        version += 1
        values = {
            "version": version,
            "ledger": ledger.to_dict(),
            "fixed": config.fixed_values(rows=DataFiles(config).train),
        }
        save_whole(checkpoints, version, weights, values)
        buffer.commit(ledger.takes, ledger.chain)
        tracker.log({"reward/mean": 1.0, "time/step": 0.1}, step=version)
        deaths.end(version - 1)
        tell(config, directory, version)


def tell(config: Config, directory: RunDirectory, version: int) -> None:
    """As the learner does each second; it may fail."""
    state = "finished" if version == config.learner.steps else "training"
    told: dict[str, Any] = {
        "run": config.run.name,
        "state": state,
        "step": version,
        "total_steps": config.learner.steps,
        "version": version,
    }
    try:
        write_status(
            directory.status, StatusSnapshot(**told, started_at=0.0, updated_at=time.time(), pid=os.getpid())
        )
    except OSError as error:
        logging.getLogger(__name__).warning("no status this time: %s", error)


def learner(path: Path, url: str) -> int:
    """The learner's process."""
    die_with_parent(int(os.environ[PARENT_VARIABLE]))
    config = load_config(path)
    directory = RunDirectory(config.run.directory)
    setup_logging("learner", directory.logs, console=True)
    try:
        with RunLock(directory.lock):
            learn(config, directory, url)
    except RunError as error:
        logging.getLogger(__name__).error("%s: %s", type(error).__name__, error)
        return 2
    return 0


def spec(name: str, argv: list[str], directory: RunDirectory, **more: Any) -> ProcessSpec:
    """One of this module's processes."""
    argv = [sys.executable, *argv]
    env = os.environ | {PARENT_VARIABLE: str(os.getpid())}
    return ProcessSpec(name=name, argv=argv, env=env, log_path=directory.logs / f"{name}.out", **more)


def main() -> int:
    """Entry point."""
    kind, path, last = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    if kind == "learner":
        return learner(path, last)
    idle = (
        f"from asyncrl.hosting.processes import die_with_parent; import time; die_with_parent({os.getpid()}); "
        "time.sleep(600)"
    )
    specs.learner_spec = lambda config, directory, store_url, placement: spec(
        "learner",
        ["-m", "reliability.crash.small_run", "learner", str(directory.config), store_url],
        directory,
        ends_run=True,
    )
    specs.generator_maker = lambda config, directory, store_url, keys, *, learner, prefix="g", scorers=None: (
        lambda index, count, running: spec(f"{prefix}{index}", ["-c", idle], directory)
    )
    supervising.LEAVE_S = 0.1
    try:
        return run_here(
            load_config(path, [f"learner.steps={last}"]), fresh=False, generators=True, plain=True
        )
    except AsyncRLError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
