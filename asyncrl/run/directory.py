"""The run directory: where everything of a run lives, and the record of its processes."""

import hashlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from safetensors import SafetensorError

from asyncrl.errors import RunError, RunNotUp
from asyncrl.files import make_directory, read_record, replace_text, sync, sync_below, tell_unreadable, with_cure
from asyncrl.processes import find_holder
from asyncrl.run.checkpoint import UNFINISHED
from asyncrl.run.keys import JoinKeys, MalformedSecret, RunKeys, parse_keys, read_secret
from asyncrl.run.lock import holder_of, is_locked


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
    def saved_mark(self) -> Path:
        """There since the first checkpoint."""
        return self.path / "saved"

    @property
    def step_under_way(self) -> Path:
        """Which step the learner is in, and how many died in it."""
        return self.path / "step.json"

    @property
    def lock(self) -> Path:
        """Held by the learner."""
        return self.path / "learner.lock"

    @property
    def supervisor_lock(self) -> Path:
        """Held by the supervisor as long as it lives, which proves that it does: clocks step, and process ids come again."""
        return self.path / "supervisor.lock"

    def require_run(self) -> None:
        """Before something is deleted: raises RunError where another directory than a run's has this name."""
        if self.path.exists() and any(self.path.iterdir()) and not self.config.exists():
            raise RunError(f"--fresh would delete {self.path}, which is no run directory (no config.yaml); remove it yourself")

    def make(self) -> None:
        """Private, because it holds secrets and sockets."""
        make_directory(self.path, private=True)

    def create(self, *, fresh: bool) -> None:
        """Make the directories; with `fresh`, after removing what an earlier run of this name left."""
        self.make()
        if fresh:
            for entry in self.path.iterdir():
                if entry != self.supervisor_lock:  # this process's, if anybody's
                    _remove(entry)
        elif os.path.lexists(self.config) and not self.checkpoints.exists():
            raise RunError(
                f"{self.path} is a run that has lost its directory checkpoints/; restore it from a copy, or begin again with "
                "--fresh"
            )
        elif self.saved_mark.exists() and not self._saved:
            raise RunError(
                f"{self.path} is a run that has saved checkpoints and has lost what was in checkpoints/; restore it from a copy, "
                "or begin again with --fresh"
            )
        for directory in (self.logs, self.metrics, self.checkpoints):
            directory.mkdir(parents=True, exist_ok=True)

    @property
    def _saved(self) -> list[str]:
        """Names of what was saved here, or set aside."""
        names = os.listdir(self.checkpoints) if self.checkpoints.is_dir() else []
        return [name for name in names if not name.startswith(UNFINISHED)]

    def mark_saved(self) -> None:
        """From now on an empty `checkpoints/` is a loss. Before the first checkpoint a run that died begins again by itself."""
        if not self.saved_mark.exists():
            replace_text(self.saved_mark, "A checkpoint was saved here.\n", durable=True)

    def forget_targets(self) -> None:
        """Remove what processes that were killed left for Prometheus."""
        targets = self.target("*")
        for target in targets.parent.glob(targets.name):
            target.unlink()

    @property
    def was_up(self) -> bool:
        """Whether a supervisor ever was here."""
        return os.path.lexists(self.supervisor_lock) or os.path.lexists(self.processes)

    def write_processes(self, pids: Mapping[str, int]) -> None:
        """Record the supervisor and its children for `asyncrl status` and `asyncrl down`."""
        replace_text(self.processes, json.dumps({"supervisor": os.getpid(), "children": dict(pids)}))

    def children(self) -> dict[str, int]:
        """Process ids by name, as the supervisor wrote them last."""
        children = (read_record(self.processes) or {}).get("children")
        return children if isinstance(children, dict) else {}

    def supervisor(self) -> psutil.Process | None:
        """The process that looks after the run, if it is alive: whoever holds its lock.

        Raises RunError when there never was one, and when it cannot be seen from here.
        """
        if not self.was_up:
            raise RunError(f"{self.path} holds no run that was started here; `asyncrl up --config …` starts one")
        was_locked = is_locked(self.supervisor_lock)
        found = find_holder(self.supervisor_lock)
        if found is None and was_locked and is_locked(self.supervisor_lock):
            raise RunError(
                f"{self.path} is looked after by {holder_of(self.supervisor_lock)}, which cannot be seen from here: it is of "
                "another user, container or host; give the command there"
            )
        return found

    def draw_secret(self) -> None:
        """Make the run's secret unless it has one. Raises RunError where something was saved with one that is gone."""
        if os.path.lexists(self.secret_path):
            return
        if saved := self._saved:
            raise RunError(
                f"{self.secret_path} is missing, and nothing in {self.checkpoints} ({', '.join(sorted(saved)[:3])}, ...) can be "
                "loaded without it; restore it from a copy, or begin again with --fresh"
            )
        replace_text(self.secret_path, secrets.token_hex(32), durable=True, private=True)

    @property
    def secret_path(self) -> Path:
        """run.key."""
        return self.path / "run.key"

    def secret(self) -> str:
        """The run's secret, readable by its owner only: everything in `launch.keys` follows from it. Raises RunError."""
        return read_secret(self.secret_path)

    def keys(self) -> RunKeys:
        """Made of the secret."""
        text = self.secret()
        try:
            keys: RunKeys | JoinKeys | None = parse_keys(text)
        except MalformedSecret:
            keys = None
        if isinstance(keys, RunKeys):
            return keys
        found = "no secret" if keys is None else "a join.key"
        raise RunError(
            f"{self.secret_path} holds {found}; 64 hexadecimal digits are needed: restore it from a copy, or begin again with "
            "--fresh"
        )

    def checkpoint_key(self) -> bytes:
        """With which checkpoints are signed."""
        return self.keys().secret.hex().encode()

    def write_join_key(self, keys: JoinKeys) -> Path:
        """For people who start generators on other hosts."""
        replace_text(self.path / "join.key", keys.text(), durable=True, private=True)
        return self.path / "join.key"

    def write_store_url(self, url: str) -> None:
        """Where this run's store listens for generators on this machine."""
        replace_text(self.path / "store.url", url, durable=True)

    def store_url(self) -> str | None:
        """None when the run has never been up here."""
        path = self.path / "store.url"
        try:
            return path.read_text() or None
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            tell_unreadable(path, error)
            return None

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


@contextmanager
def needing(path: Path) -> Iterator[None]:
    """What a run cannot begin without. Raises RunError when the disk does not give it."""
    try:
        yield
    except OSError as error:
        raise RunError(f"the run directory {path} cannot be used: {with_cure(error, path)}") from error


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink()


def find_run(run: Path | None) -> RunDirectory:
    """The run that a command means: a directory, a name below runs/, or the newest run there. Raises RunError."""
    root = Path("runs")
    candidates = [run, root / run] if run else sorted(root.glob("*/config.yaml"), key=lambda path: -path.stat().st_mtime)
    for path in candidates:
        directory = RunDirectory(path.parent if path.name == "config.yaml" else path)
        if directory.config.exists():
            return directory
    raise RunNotUp(f"no run found at {run or root}; give the directory that `asyncrl up` printed, it holds a config.yaml")


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    """Write a file that somebody asked for, at once: who has it open sees the old or the new one. Raises RunError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, text, private=private)
    except OSError as error:
        raise _refused(path, error) from error


@contextmanager
def write_directory(path: Path) -> Iterator[Path]:
    """Where to put what `path` shall hold, which gets that name when it is whole and durable. Raises RunError.

    What was there before goes then. An attempt that fails leaves nothing, the rest of one that was killed goes with the next.
    """
    writing = path.with_name(f"{UNFINISHED}{path.name}")
    try:
        if os.path.lexists(writing):
            _remove(writing)
        writing.mkdir(parents=True)
        yield writing
        sync_below(writing)
        if os.path.lexists(path):
            _remove(path)
        writing.rename(path)
        sync(path.parent)
    except (OSError, SafetensorError) as error:
        raise _refused(path, error) from error
    finally:
        shutil.rmtree(writing, ignore_errors=True)


def _refused(path: Path, error: OSError | SafetensorError) -> RunError:
    reason = error.args[0][0][-1] if isinstance(error, shutil.Error) else error  # of copying: the first
    return RunError(f"{path} cannot be written: {reason}; make room there, or give another place")
