"""The run directory: where everything of a run lives, and the record of its processes."""

import hashlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from asyncrl.errors import RunError
from asyncrl.files import replace_text
from asyncrl.launch.keys import JoinKeys, RunKeys, check_private, parse_keys


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths below one run directory."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved config, as YAML."""
        return self.path / "config.yaml"

    @property
    def logs(self) -> Path:
        """One file per process."""
        return self.path / "logs"

    @property
    def metrics(self) -> Path:
        """One JSONL file per process."""
        return self.path / "metrics"

    def target(self, process: str) -> Path:
        """Where Prometheus finds a process, in the form of its file-based discovery.

        Beside the run directories and not in them: its patterns reach into one directory only.
        """
        return self.path.parent / "prometheus" / f"{self.path.name}@{process}.json"

    @property
    def samples(self) -> Path:
        """Rollouts for people to read, JSONL."""
        return self.path / "samples.jsonl"

    @property
    def trace(self) -> Path:
        """The timeline, for Perfetto."""
        return self.path / "trace_events.json"

    @property
    def starts(self) -> Path:
        """Each start of the learner with its software, JSONL."""
        return self.path / "starts.jsonl"

    @property
    def status(self) -> Path:
        """What the learner says about itself, every second."""
        return self.path / "status.json"

    @property
    def processes(self) -> Path:
        """Who is running, written by the supervisor."""
        return self.path / "processes.json"

    @property
    def scale(self) -> Path:
        """How many generators there shall be, written by `asyncrl scale`; only there while a supervisor starts some."""
        return self.path / "scale.json"

    @property
    def checkpoints(self) -> Path:
        """Checkpoint directories."""
        return self.path / "checkpoints"

    @property
    def store(self) -> Path:
        """Data of a store that was started for this run."""
        return self.path / "store"

    @property
    def weights(self) -> Path:
        """Published weights of the disk transport."""
        return self.path / "weights"

    @property
    def lock(self) -> Path:
        """Held by the learner."""
        return self.path / "learner.lock"

    def create(self, *, fresh: bool) -> None:
        """Make the directories; with `fresh`, after removing what an earlier run of this name left."""
        if fresh and self.path.exists():
            if any(self.path.iterdir()) and not self.config.exists():
                raise RunError(
                    f"--fresh would delete {self.path}, which is no run directory (no config.yaml); remove it yourself"
                )
            shutil.rmtree(self.path)
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)  # it holds secrets and sockets
        for directory in (self.logs, self.metrics, self.checkpoints):
            directory.mkdir(parents=True, exist_ok=True)

    def write_processes(self, pids: Mapping[str, int]) -> None:
        """Record the supervisor and its children for `asyncrl status` and `asyncrl down`."""
        me = psutil.Process()
        record = {"supervisor": me.pid, "started_at": me.create_time(), "children": dict(pids)}
        replace_text(self.processes, json.dumps(record))

    def supervisor(self) -> psutil.Process | None:
        """The process that looks after the run, if it is alive. Raises RunError when there never was one."""
        if not self.processes.exists():
            raise RunError(f"{self.path} holds no run that was started here; `asyncrl up --config …` starts one")
        record = json.loads(self.processes.read_text())
        try:
            process = psutil.Process(record["supervisor"])
            # the kernel uses process ids again
            return process if abs(process.create_time() - record["started_at"]) < 1.0 else None
        except psutil.NoSuchProcess:
            return None

    def secret(self) -> str:
        """The run's secret, made once and readable by its owner only: everything in `launch.keys` follows from it."""
        path = self.path / "run.key"
        if not path.exists():
            _write_private(path, secrets.token_hex(32))
        check_private(path)
        return path.read_text()

    def keys(self) -> RunKeys:
        """Made of the secret."""
        keys = parse_keys(self.secret())
        if not isinstance(keys, RunKeys):
            raise RunError(f"{self.path / 'run.key'} holds a join.key; 64 hexadecimal digits are needed: restore or remove it")
        return keys

    def write_join_key(self, keys: JoinKeys) -> Path:
        """For people who start generators on other hosts."""
        _write_private(self.path / "join.key", keys.text())
        return self.path / "join.key"

    def write_store_url(self, url: str) -> None:
        """Where this run's store listens for generators on this machine."""
        (self.path / "store.url").write_text(url)

    def store_url(self) -> str | None:
        """None when the run has never been up here."""
        path = self.path / "store.url"
        return path.read_text() if path.exists() else None

    def socket_path(self, name: str) -> Path:
        """A path for a unix socket: below the run directory, or in a private directory when that is too long."""
        path = (self.path / name).resolve()
        if len(str(path)) < 100:  # the kernel allows 107 bytes
            return path
        digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
        private = Path(tempfile.gettempdir()) / f"asyncrl-{os.getuid()}-{digest}"
        private.mkdir(mode=0o700, exist_ok=True)
        if private.stat().st_uid != os.getuid():
            raise RunError(f"{private} belongs to somebody else; choose a shorter run.root")
        return private / name


def _write_private(path: Path, text: str) -> None:
    """Whole or not at all, and never readable by others."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    temporary.replace(path)


def find_run(run: Path | None) -> RunDirectory:
    """The run that a command means: a directory, a name below runs/, or the newest run there. Raises RunError."""
    root = Path("runs")
    candidates = [run, root / run] if run else sorted(root.glob("*/config.yaml"), key=lambda path: -path.stat().st_mtime)
    for path in candidates:
        directory = RunDirectory(path.parent if path.name == "config.yaml" else path)
        if directory.config.exists():
            return directory
    raise RunError(f"no run found at {run or root}; give the directory that `asyncrl up` printed, it holds a config.yaml")


def write_text(path: Path, text: str) -> None:
    """Write a file that somebody asked for, at once: who has it open sees the old or the new one. Raises RunError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, text)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error}; give --to another place") from error
