"""Atomic checkpoints: written to another name, signed, made durable, then renamed.

A checkpoint `step-000012/` holds the trainer's files (DeepSpeed state, random number generators), the Hugging
Face model that it exports (`hf/`), the learner's `state.json`, and MANIFEST.json: the sha256 of every file,
under an HMAC with the run's key. DeepSpeed's files are pickles, so a directory is loaded only if its manifest
verifies. Order of a save, each line durable before the next:

    trainer's files, state.json   in .writing-step-000012/
    MANIFEST.json                 ... and every directory
    (on several hosts, a call to the store proves that no other learner has the run)
    rename to step-000012/        ... and the parent directory
    NEWEST                        the number of the step, which shows whether a directory is gone
    removal of the oldest

A run that has saved a checkpoint never begins again by itself: if none can be loaded, `load` raises
CheckpointsRefused with the reason for each directory.
"""

import hashlib
import hmac
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from asyncrl.errors import CheckpointError, CheckpointsRefused
from asyncrl.hosting.progress import beat
from asyncrl.run.file_ops import UNFINISHED, FileOps

log = logging.getLogger(__name__)

MANIFEST = "MANIFEST.json"
STATE = "state.json"
EXPORT = "hf"
NEWEST = "NEWEST"
RESTORE = "restore the directory or remove it"
REJECTED = "rejected-"


class Saveable(Protocol):
    """The part of `Trainer` that checkpoints need."""

    @property
    def rank(self) -> int: ...
    def broadcast(self, value: bytes | None) -> bytes: ...
    def save(self, directory: Path) -> None: ...
    def export(self, directory: Path) -> None: ...
    def load(self, directory: Path) -> None: ...


class CheckpointStore:
    """The checkpoints of one run. Every rank calls `save` and `load`; rank 0 decides for all."""

    def __init__(
        self,
        directory: Path,
        key: bytes,
        keep: int,
        files: FileOps | None = None,
        *,
        form: str = "step-{:06}",
    ) -> None:
        """Keep the newest `keep` in `directory`; `key` signs and verifies manifests.

        `form` gives the name of a step's directory. TRL, which writes and removes its own, has another.
        """
        self._directory, self._key, self._keep, self._files = directory, key, keep, files or FileOps()
        self._name, self._prefix = form.format, form.partition("{")[0]
        # Whether the checkpoint of an older step stays, too.
        self.keeps: Callable[[int], bool] = lambda step: False

    def save(
        self,
        step: int,
        trainer: Saveable,
        state: dict[str, Any],
        require_run: Callable[[], object] = lambda: None,
    ) -> int:
        """Make a durable checkpoint of `step`, prune old ones, and return the oldest of the newest ones.

        `state` must be JSON values. A step that has a valid checkpoint is not written again. Raises
        CheckpointError on every rank if one cannot write; then older checkpoints are unchanged, and the
        attempt leaves no files. Rank 0 calls `require_run` last; if that raises, nothing is saved.
        """
        writing = self._directory / f"{UNFINISHED}{self._name(step)}"
        if self._on_rank_0(trainer, lambda: self._prepare(step, writing)):
            try:
                trainer.save(writing)
                trainer.export(writing / EXPORT)
                self._on_rank_0(trainer, lambda: self._commit(step, writing, state, require_run))
            except CheckpointError:
                if trainer.rank == 0 and writing.exists():
                    self._discard(writing)
                raise
        return self._on_rank_0(trainer, lambda: self._conclude(step))

    def steps(self) -> set[int]:
        """Return the steps of the kept checkpoints. Raises OSError."""
        return set(map(_step, self._steps()))

    def latest(self) -> Path | None:
        """Return the newest checkpoint that verifies; newer ones that do not are logged with the reason."""
        newest, passed_over = self._newest(self.verify)
        for reason in passed_over.values():
            log.warning("checkpoint passed over: %s", reason)
        return newest

    def load(self, trainer: Saveable) -> dict[str, Any] | None:
        """Restore `trainer` from the newest valid checkpoint and return its state; None if nothing was saved.

        Newer checkpoints that do not verify are renamed to `rejected-...`, so that they count neither as kept
        nor as newest. Raises CheckpointsRefused if there were checkpoints and none verifies.
        """
        step = self._on_rank_0(trainer, self._choose)
        if step < 0:
            return None
        directory = self._directory / self._name(step)
        trainer.load(directory)
        return self.state(step)

    def go_back(self, step: int) -> None:
        """Set all later checkpoints aside. Raises CheckpointError if that of `step` does not verify."""
        self.verify(self._directory / self._name(step))
        for directory in self._steps():
            if _step(directory) > step:
                self._set_aside(directory, f"the run goes on from step {step}, as it was asked to")
        self._files.replace(self._directory / NEWEST, f"{step}\n".encode())

    def seal(self, step: int) -> None:
        """Sign what a library has written as the checkpoint of `step`. Raises OSError."""
        self._seal(step, self._directory / self._name(step))
        self._files.fsync(self._directory)

    def choose(self) -> Path | None:
        """Return the newest checkpoint that verifies, of those that a library wrote; None if there is none.

        What was not sealed was being written when its process ended, and is removed. Otherwise as `load`.
        """
        for directory in self._steps():
            if not (directory / MANIFEST).exists():
                log.warning("%s was not finished and is removed", directory)
                self._files.remove(directory)
        step = self._choose()
        return None if step < 0 else self._directory / self._name(step)

    def state(self, step: int) -> dict[str, Any]:
        """Return the learner's state at a kept step. Raises CheckpointError, on this rank alone."""
        directory = self._directory / self._name(step)
        self._verify_state(directory)
        return dict(json.loads(_read(directory / STATE)))

    def newest_state(self) -> tuple[Path, dict[str, Any]] | None:
        """Return the newest checkpoint whose state verifies, and that state; reads no large file."""
        newest, _ = self._newest(self._verify_state)
        return None if newest is None else (newest, self.state(_step(newest)))

    def require_signature(self) -> None:
        """Raise CheckpointsRefused if there were checkpoints and none has this key; reads only manifests."""
        newest, passed_over = self._newest(self._manifest)
        if newest is None:
            self._require_beginning(passed_over)

    def verify(self, directory: Path) -> None:
        """Check signature, step, and the content of every file. Raises CheckpointError with what is wrong."""
        manifest = self._manifest(directory)
        if self._name(manifest["step"]) != directory.name:
            signed = f"{directory}: signed as step {manifest['step']}"
            raise CheckpointError(f"{signed}; give the directory its name back")
        expected, found = manifest["files"], {str(p.relative_to(directory)): p for p in _files_in(directory)}
        found.pop(MANIFEST)
        if expected.keys() != found.keys():
            names = ", ".join(sorted(expected.keys() ^ found.keys()))
            raise CheckpointError(f"{directory}: {names} missing or not in {MANIFEST}; {RESTORE}")
        for name, path in found.items():
            if path.is_symlink() or not path.is_file() or _sha256(path) != expected[name]:
                raise CheckpointError(f"{directory}: {name} is not what was written; {RESTORE}")

    def _verify_state(self, directory: Path) -> None:
        if self._manifest(directory)["files"].get(STATE) != _sha256(directory / STATE):
            raise CheckpointError(f"{directory}: {STATE} is not what was written; {RESTORE}")

    def _manifest(self, directory: Path) -> dict[str, Any]:
        """Return the manifest if it is signed with our key. Raises CheckpointError."""
        path = directory / MANIFEST
        try:
            manifest = json.loads(_read(path))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: no JSON ({error}); the checkpoint is torn, remove it") from error
        if not isinstance(manifest, dict):
            found = f"{path}: holds {type(manifest).__name__}, not a mapping"
            raise CheckpointError(f"{found}; the checkpoint is torn, remove it")
        signature = ascii(manifest.get("hmac")).strip("'")
        if not hmac.compare_digest(self._sign(manifest).encode(), signature.encode()):
            raise CheckpointError(
                f"{directory}: the signature of {MANIFEST} is wrong: altered, or of another run; {RESTORE}"
            )
        return manifest

    def _newest(self, check: Callable[[Path], object]) -> tuple[Path | None, dict[Path, CheckpointError]]:
        """Return (the newest directory that passes `check`, the reasons why newer ones did not)."""
        passed_over: dict[Path, CheckpointError] = {}
        for directory in reversed(self._steps()):
            try:
                check(directory)
            except CheckpointError as error:
                passed_over[directory] = error
            else:
                return directory, passed_over
        return None, passed_over

    def _require_beginning(self, passed_over: dict[Path, CheckpointError]) -> None:
        """Raise CheckpointsRefused if there were checkpoints here."""
        reasons = [str(error) for error in passed_over.values()]
        for name in (name for name in self._names() if name.startswith(f"{REJECTED}{self._prefix}")):
            try:
                self._manifest(self._directory / name)
            except CheckpointError as error:
                reasons.append(str(error))
            else:
                cure = f"if you have repaired it, name it {name.removeprefix(REJECTED)}"
                reasons.append(f"{self._directory / name}: set aside earlier; {cure}")
        if not reasons and (saved := self._newest_saved()):
            reasons = [f"{self._directory / self._name(saved)}: it was saved here, and is gone"]
        if reasons:
            raise CheckpointsRefused(
                f"{self._directory}: training was saved here, and nothing of it can be loaded:"
                + "".join(f"\n  {reason}" for reason in reasons)
                + "\nrestore one of these directories, or run.key, from a copy; --fresh deletes what was "
                "trained and starts again"
            )

    def _newest_saved(self) -> int:
        """Return the step of the last save; 0 if there was none or the file cannot be read."""
        try:
            return int((self._directory / NEWEST).read_text())
        except FileNotFoundError:
            return 0
        except (OSError, ValueError) as error:
            log.warning("%s cannot be read (%s); the next save replaces it", self._directory / NEWEST, error)
            return 0

    def _on_rank_0(self, trainer: Saveable, action: Callable[[], int]) -> int:
        """Run `action` on rank 0 and return or raise its outcome on every rank: no rank waits for another."""
        message = None
        if trainer.rank == 0:
            try:
                outcome: dict[str, Any] = {"value": int(action())}
            except CheckpointsRefused as error:
                outcome = {"refused": str(error)}
            except (OSError, CheckpointError) as error:
                outcome = {"error": f"{self._directory}: {error}"}
            message = json.dumps(outcome).encode()
        outcome = json.loads(trainer.broadcast(message))
        if "refused" in outcome:
            raise CheckpointsRefused(outcome["refused"])
        if "error" in outcome:
            raise CheckpointError(outcome["error"])
        return int(outcome["value"])

    def _prepare(self, step: int, writing: Path) -> bool:
        """Remove what crashed saves left and make `writing`; False if the step has a valid checkpoint."""
        target = self._directory / self._name(step)
        if target.exists():
            try:
                self.verify(target)
            except CheckpointError as error:
                self._set_aside(target, error)
            else:
                self._files.fsync(self._directory)
                return False
        self._directory.mkdir(parents=True, exist_ok=True)
        self._files.fsync(self._directory.parent)
        for name in self._names():
            if name.startswith(UNFINISHED):
                self._files.remove(self._directory / name)
        # The next checkpoint is as large as the newest. A full disk is reported before the long write.
        needed = sum(path.stat().st_size for directory in self._steps()[-1:] for path in _files_in(directory))
        if (free := self._files.free_bytes(self._directory)) < needed:
            raise CheckpointError(
                f"{self._directory}: the newest checkpoint has {needed / 2**20:.1f} MiB, the disk has "
                f"{free / 2**20:.1f} MiB left for the next one; make room there"
            )
        writing.mkdir()
        return True

    def _discard(self, writing: Path) -> None:
        try:
            self._files.remove(writing)
        except OSError as error:
            log.warning("%s could not be removed (%s); the next save removes it", writing, error)

    def _commit(
        self, step: int, writing: Path, state: dict[str, Any], require_run: Callable[[], object]
    ) -> bool:
        self._files.write(writing / STATE, json.dumps(state, allow_nan=False).encode())
        self._seal(step, writing)
        require_run()
        self._files.rename(writing, self._directory / self._name(step))
        self._files.fsync(self._directory)
        return True

    def _seal(self, step: int, writing: Path) -> None:
        """Make what is in a directory durable, and sign it as a checkpoint of `step`."""
        files = list(_files_in(writing))
        for path in files:
            self._files.fsync(path)
        manifest: dict[str, Any] = {
            "step": step,
            "files": {str(path.relative_to(writing)): _sha256(path) for path in files},
        }
        manifest["hmac"] = self._sign(manifest)
        self._files.write(writing / MANIFEST, json.dumps(manifest, indent=1).encode())
        self._files.fsync(writing / MANIFEST)
        for directory in [*(path for path in writing.rglob("*") if path.is_dir()), writing]:
            self._files.fsync(directory)

    def _conclude(self, step: int) -> int:
        """Record a durable checkpoint as the newest, remove old ones, and return the oldest of the newest."""
        if self._newest_saved() != step:
            self._files.replace(self._directory / NEWEST, f"{step}\n".encode())
        steps = self._steps()
        for directory in steps[: -self._keep]:
            if not self.keeps(_step(directory)):
                self._files.remove(directory)
        return _step(steps[-self._keep :][0])

    def _choose(self) -> int:
        newest, passed_over = self._newest(self.verify)
        if newest is None:
            self._require_beginning(passed_over)
            return -1
        for directory, reason in passed_over.items():
            log.warning("checkpoint passed over: %s", reason)
            self._set_aside(directory, reason)
        if (saved := self._newest_saved()) > _step(newest) and not passed_over:
            log.warning("step %d was saved and is gone; the run goes on from %s", saved, newest)
        return _step(newest)

    def _set_aside(self, directory: Path, reason: object) -> None:
        aside = directory.with_name(f"{REJECTED}{directory.name}")
        if os.path.lexists(aside):
            self._files.remove(aside)
        log.warning("checkpoint set aside as %s: %s", aside, reason)
        self._files.rename(directory, aside)

    def _steps(self) -> list[Path]:
        """Return the directories of checkpoints, oldest first."""
        form = re.compile(re.escape(self._prefix) + r"(\d+)")
        found = [(name, form.fullmatch(name)) for name in self._names()]
        names = [name for name, match in found if match and name == self._name(int(match[1]))]
        return sorted((self._directory / name for name in names), key=_step)

    def _names(self) -> list[str]:
        """Return the names of all entries. Raises OSError if the directory exists and cannot be listed."""
        try:
            return sorted(os.listdir(self._directory))
        except FileNotFoundError:
            return []

    def _sign(self, manifest: dict[str, Any]) -> str:
        content = {key: value for key, value in manifest.items() if key != "hmac"}
        return hmac.new(self._key, json.dumps(content, sort_keys=True).encode(), hashlib.sha256).hexdigest()


def _step(directory: Path) -> int:
    return int(directory.name.rpartition("-")[2])


def _files_in(directory: Path) -> Iterator[Path]:
    return (path for path in sorted(directory.rglob("*")) if path.is_symlink() or not path.is_dir())


def _sha256(path: Path) -> str:
    beat()
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); use a step that is kept") from error
