"""The run directory: the paths of a run's files, its secret, and the record of its processes."""

import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from glob import glob
from pathlib import Path

import psutil
from safetensors import SafetensorError

from asyncrl import files
from asyncrl.config.document import parse
from asyncrl.config.sections import ModelConfig
from asyncrl.errors import RunError, RunNotUp
from asyncrl.hosting.processes import find_holder
from asyncrl.run.keys import SECRET_FILE_VARIABLE, JoinKeys, RunKeys, parse_keys, read_secret
from asyncrl.run.lock import holder_of, is_locked
from asyncrl.run.manifest import UNFINISHED, FileOps
from asyncrl.telemetry.status import SILENT_S, read_status

_CHECKPOINT = re.compile(r"(?:step-(?=\d{6})|checkpoint-)(\d+)", re.ASCII)
# Among a run's values that must not change: the digests of its first weights that stages made.
BEGAN_WITH = "weights of a stage"
RESTORE = "restore it from a copy, or begin again with --fresh"


class _Below:
    """A path below the run directory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, directory: "RunDirectory", owner: type) -> Path:
        return directory.path / self._name


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths below one run directory."""

    path: Path
    config = _Below("config.yaml")  # the resolved config, as YAML
    logs = _Below("logs")  # logs, one JSONL file per process
    metrics = _Below("metrics")  # metrics, one JSONL file per process
    samples = _Below("samples.jsonl")  # rollouts for people to read, JSONL
    evaluations = _Below("evaluations")  # all samples of evaluations, one JSONL file per evaluation
    pairs = _Below("pairs.jsonl")  # preferences, with `telemetry.pairs`, JSONL
    trace = _Below("trace_events.json")  # the timeline, for Perfetto
    starts = _Below("starts.jsonl")  # starts of the learner with their software, JSONL
    status = _Below("status.json")  # the learner's status, written every second
    processes = _Below("processes.json")  # process ids, written by the supervisor
    # The wanted number of generators, from `asyncrl scale`. It exists while a supervisor starts generators.
    scale = _Below("scale.json")
    scaled = _Below("scaled.json")  # the last one, for the next start, and the config's number then
    # How long a stop may take, from the supervisor. It exists from the stop to the next start.
    stopping = _Below("stopping.json")
    checkpoints = _Below("checkpoints")  # checkpoint directories
    trl_checkpoints = _Below("checkpoints/trl")  # those that TRL writes, in a stage
    stage = _Below("stage.json")  # what a stage was begun with, its metrics, and whether it is finished
    model = _Below("hf")  # the model that a finished stage has made
    store = _Below("store")  # data of a store that was started for this run
    weights = _Below("weights")  # published weights of the disk transport
    saved_mark = _Below("saved")  # a file that exists since the first checkpoint
    # The step that the learner is in, and the number of learners that died in it.
    step_under_way = _Below("step.json")
    lock = _Below("learner.lock")  # the lock that the learner holds
    # The lock that the supervisor holds. Unlike a time or a reused process id, it proves that it lives.
    supervisor_lock = _Below("supervisor.lock")
    # Of a run on many hosts: the lock of the process that starts them, their config, and their states.
    driver_lock = _Below("driver.lock")
    hosts_config = _Below("hosts.yaml")
    hosts = _Below("hosts.json")
    given = _Below("given")  # rows and rewards from a Python process, named by the config
    job = _Below("job.sh")  # what was submitted to Slurm
    secret_path = _Below("run.key")  # the file of the run's secret
    join_key = _Below("join.key")  # what a generator needs of it

    def target(self, process: str) -> Path:
        """The file by which Prometheus discovers a process, in one directory for all runs below a root."""
        return self.path.parent / "prometheus" / f"{self.path.name}@{process}.json"

    def evaluation(self, step: int, name: str = "") -> Path:
        """The file with all samples of the evaluation of `step`; each named set has a directory."""
        return self.evaluations / name / f"step-{step:06d}.jsonl"

    def require_run(self) -> None:
        """Raise RunError if the path is a directory other than a run's, which must not be deleted."""
        held = {*self.path.glob("*")} - {self.given}
        if held and not held & {self.config, self.supervisor_lock, self.driver_lock}:  # a removal keeps locks
            found = f"--fresh would delete {self.path}, which is no run directory (no config.yaml)"
            raise RunError(f"{found}; remove it yourself")

    def make(self) -> None:
        """Make the directory, private because it holds secrets and sockets."""
        files.make_private(self.path)

    def create(self, *, fresh: bool, config: str = "") -> None:
        """Make the directories; with `fresh`, first remove what an earlier run of this name left.

        That are not the files of `given` which the text of the config names. If it names others of them,
        nothing is removed. Raises RunError.
        """
        self.make()
        if fresh:
            # This process holds one of the locks.
            kept = {self.supervisor_lock, self.driver_lock, self.given}
            kept |= {file for file in self.given.glob("*") if file.name in config}
            self._refuse_named(config)
            for entry in (*self.path.iterdir(), *self.given.glob("*")):
                if entry not in kept:
                    FileOps().remove(entry)
        elif os.path.lexists(self.config) and not self.checkpoints.exists():
            raise RunError(f"{self.path} is a run that has lost its directory checkpoints/; {RESTORE}")
        elif self.saved_mark.exists() and not self._saved:
            found = f"{self.path} is a run that has saved checkpoints and has lost what was in checkpoints/"
            raise RunError(f"{found}; {RESTORE}")
        for directory in (self.logs, self.metrics, self.checkpoints):
            directory.mkdir(parents=True, exist_ok=True)

    def _refuse_named(self, config: str) -> None:
        for keys, node in parse(config, file="")[0].walk():
            value = node.value if isinstance(node.value, str) else ""
            # A function has its file before the colon. Only rows have patterns; a file may be named like one.
            paths = [name for name in (value, value.rpartition(":")[0]) if os.path.lexists(name)]
            if keys[:1] == ("data",) and keys[-1] in ("train", "eval", "path"):
                paths += glob(value, recursive=True)
            for parents in (Path(path).resolve().parents for path in paths):
                if self.path.resolve() in parents and self.given.resolve() not in parents:
                    found = f"{'.'.join(map(str, keys))}: found {node.value}, which --fresh would delete"
                    raise RunError(f"{found}; copy or export it to another place, or choose another run.name")

    @property
    def _saved(self) -> list[str]:
        """Names of checkpoints, including rejected ones."""
        names = os.listdir(self.checkpoints) if self.checkpoints.is_dir() else []
        return [name for name in names if not name.startswith(UNFINISHED)]

    def saved_steps(self) -> dict[int, Path]:
        """Directories of the checkpoints by step, also of TRL's; copies under other names are none."""
        sealed = self.trl_checkpoints.glob("checkpoint-*/MANIFEST.json")
        found = [*self.checkpoints.glob("step-*"), *(path.parent for path in sealed)]
        named = ((_CHECKPOINT.fullmatch(path.name), path) for path in found)
        return {int(match[1]): path for match, path in named if match}

    def mark_saved(self) -> None:
        """Record that a checkpoint was saved: an empty `checkpoints/` is then a loss, not a new run."""
        if not self.saved_mark.exists():
            files.replace_text(self.saved_mark, "A checkpoint was saved here.\n", durable=True)

    def forget_stop(self, *, by_slurm: bool) -> None:
        """Remove what `down` knows of an earlier start: the announced stop, and the job of another kind."""
        self.stopping.unlink(missing_ok=True)
        if not by_slurm:
            self.job.unlink(missing_ok=True)

    def forget_earlier(self) -> None:
        """Remove status, wanted number, and the Prometheus targets of killed processes."""
        self.status.unlink(missing_ok=True)
        self.scale.unlink(missing_ok=True)
        targets = self.target("*")
        for target in targets.parent.glob(targets.name):
            target.unlink()

    @property
    def was_up(self) -> bool:
        """Whether a supervisor has ever run here."""
        return os.path.lexists(self.supervisor_lock) or os.path.lexists(self.processes)

    @property
    def is_up(self) -> bool:
        """Whether the supervisor lives; without one on this host, whether the learner's status is recent."""
        if is_locked(self.driver_lock):
            return True
        if self.supervisor_lock.exists():
            return is_locked(self.supervisor_lock)
        status = read_status(self.status)
        return status is not None and not status.is_final and time.time() - status.updated_at < SILENT_S

    def write_processes(self, pids: Mapping[str, int]) -> None:
        """Record the supervisor and its children for `asyncrl status` and `asyncrl down`."""
        files.replace_text(self.processes, json.dumps({"supervisor": os.getpid(), "children": dict(pids)}))

    def children(self) -> dict[str, int]:
        """Process ids by name, as the supervisor last wrote them."""
        children = (files.read_record(self.processes) or {}).get("children")
        return children if isinstance(children, dict) else {}

    def supervisor(self) -> psutil.Process | None:
        """Return the run's supervisor, which holds its lock; None if it is not alive.

        Raises RunError if no supervisor ever ran here, or if it is not visible from here.
        """
        if not self.was_up:
            cure = "`asyncrl up --config …` starts one"
            raise RunError(f"{self.path} holds no run that was started here; {cure}")
        return self.holder(self.supervisor_lock)

    def holder(self, lock: Path) -> psutil.Process | None:
        """Return the process that holds one of the run's locks. Raises RunError if it is not visible."""
        was_locked = is_locked(lock)
        found = find_holder(lock)
        if found is None and was_locked and is_locked(lock):
            text = f"{self.path} is looked after by {holder_of(lock)}, which cannot be seen from here: it is"
            raise RunError(f"{text} of another user, container or host; give the command there")
        return found

    def draw_secret(self, given: RunKeys | None = None) -> None:
        """Make the run's secret unless it exists; it is that of `given`, or drawn.

        Raises RunError if it is lost and signed checkpoints, or if it is not that of `given`.
        """
        if os.path.lexists(self.secret_path):
            if given is not None and self.keys() != given:
                raise RunError(
                    f"{self.secret_path} is not the run.key that {SECRET_FILE_VARIABLE} names: the directory "
                    "is that of another run; name the run.key of that one, or choose another run.name"
                )
            return
        if given is None and (saved := self._saved):
            names = ", ".join(sorted(saved)[:3])
            found = f"{self.secret_path} is missing, and nothing in {self.checkpoints} ({names}, ...)"
            raise RunError(f"{found} can be loaded without it; {RESTORE}")
        secret = given.secret if given else secrets.token_bytes(32)
        files.replace_text(self.secret_path, secret.hex(), durable=True, private=True)

    def secret(self) -> str:
        """Return the run's secret, from which all keys in `run.keys` are derived. Raises RunError."""
        return read_secret(self.secret_path)

    def keys(self) -> RunKeys:
        """Return the keys derived from the secret. Raises RunError."""
        text, found = self.secret(), "a join.key"
        try:
            keys = parse_keys(text)
            if isinstance(keys, RunKeys):
                return keys
        except RunError:
            found = "no secret"
        raise RunError(f"{self.secret_path} holds {found}; 64 hexadecimal digits are needed: {RESTORE}")

    def checkpoint_key(self) -> bytes:
        return self.keys().secret.hex().encode()

    def write_join_key(self, keys: JoinKeys) -> Path:
        """Write the key with which generators on other hosts join."""
        files.replace_text(self.join_key, keys.text(), durable=True, private=True)
        return self.join_key

    def store_url(self) -> str | None:
        """Return the URL of the store; None if the run has never been up here."""
        path = self.path / "store.url"
        try:
            return path.read_text() or None
        except (OSError, ValueError) as error:
            if not isinstance(error, FileNotFoundError):
                files.tell_unreadable(path, error)
            return None


@contextmanager
def needing(path: Path) -> Iterator[None]:
    """Turn OSError into RunError where a run cannot begin without the operation."""
    try:
        yield
    except OSError as error:
        raise RunError(f"the run directory {path} cannot be used: {files.with_cure(error, path)}") from error


def find_run(run: Path | None) -> RunDirectory:
    """Find a run: `run`, runs/`run`, or by default the newest run below runs/. Raises RunNotUp."""
    root = Path("runs")
    if run:
        candidates = [run, root / run]
    else:
        candidates = sorted(root.glob("*/config.yaml"), key=lambda path: -path.stat().st_mtime)
    for path in candidates:
        directory = RunDirectory(path.parent if path.name == "config.yaml" else path)
        if directory.config.exists():
            return directory
    raise RunNotUp(
        f"no run found at {run or root}; give the directory that `asyncrl up` printed, it holds a config.yaml"
    )


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    """Replace a file that a user asked for, atomically. Raises RunError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace_text(path, text, private=private)
    except (OSError, ValueError) as error:
        raise _refused(path, error) from error


@contextmanager
def write_directory(path: Path) -> Iterator[Path]:
    """Yield a directory that replaces `path` when it is complete and durable. Raises RunError.

    A failed attempt leaves nothing. The next attempt removes what a killed one left.
    """
    writing = path.with_name(f"{UNFINISHED}{path.name}")
    try:
        if os.path.lexists(writing):
            FileOps().remove(writing)
        writing.mkdir(parents=True)
        yield writing
        files.sync_below(writing)
        if os.path.lexists(path):
            FileOps().remove(path)
        writing.rename(path)
        files.sync(path.parent)
    except (OSError, SafetensorError) as error:
        raise _refused(path, error) from error
    finally:
        shutil.rmtree(writing, ignore_errors=True)


def _refused(path: Path, error: Exception) -> RunError:
    # `shutil` collects the errors of a copy; the first one is named.
    reason = error.args[0][0][-1] if isinstance(error, shutil.Error) else error
    return RunError(f"{path} cannot be written: {reason}; make room there, or give another place")


def first_weights(model: ModelConfig) -> tuple[str, str | None]:
    """Name the first weights, base and adapter, with the digests that stages which made them recorded."""
    start = model.lora and model.lora.start
    paths = [Path(model.path), *([start] if start else [])]
    found = [(files.read_record(RunDirectory(path.parent).stage) or {}).get("digest") for path in paths]
    return " and ".join(map(str, paths)), " ".join(filter(None, found)) or None
