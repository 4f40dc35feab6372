"""Atomic checkpoints: written to another name, signed, made durable, then renamed.

A checkpoint `step-000012/` holds the trainer's files (DeepSpeed state, random number generators), the
learner's `state.json`, and MANIFEST.json. DeepSpeed's files are pickles, so a directory is loaded only if its
manifest verifies. Order of a save, each line durable before the next:

    trainer's files, state.json   in .writing-step-000012/
    MANIFEST.json                 ... and every directory
    (on several hosts, a call to the store proves that no other learner has the run)
    rename to step-000012/        ... and the parent directory
    NEWEST                        the number of the step, which shows whether a directory is gone
    removal of the oldest

The Hugging Face model of a checkpoint is written next to training, and counts when the manifest lists it:

    model's files                 in step-000012/.writing-hf/
    rename to step-000012/hf/     ... and its parent directory
    MANIFEST.json                 again, with the model's files

A run that has saved a checkpoint never begins again by itself: if none can be loaded, `load` raises
CheckpointsRefused with the reason for each directory.
"""

import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from asyncrl.config.named_files import EXPORT
from asyncrl.errors import CheckpointError, CheckpointsRefused
from asyncrl.files import read_record
from asyncrl.run.best import BEST, ENDED
from asyncrl.run.manifest import MANIFEST, STATE, UNFINISHED, FileOps, Manifests, files_in

log = logging.getLogger(__name__)

NEWEST = "NEWEST"
REJECTED = "rejected-"


class Saveable(Protocol):
    """The part of `Trainer` that checkpoints need."""

    @property
    def rank(self) -> int: ...
    def broadcast(self, value: bytes | None) -> bytes: ...
    def save(self, directory: Path) -> None: ...
    def load(self, directory: Path) -> None: ...


class Exportable(Saveable, Protocol):
    """The part of `Trainer` that exports need, too."""

    def export(self) -> Callable[[Path], object]: ...


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

        `form` gives the name of a step's directory. TRL, which writes its own, has another.
        """
        self._directory, self._keep, self._files = directory, keep, files or FileOps()
        self._manifests = Manifests(key, self._files)
        self._name, self._prefix = form.format, form.partition("{")[0]
        self._stays = set[Path]()  # what could not be removed
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

        def commit() -> bool:
            self._files.write(writing / STATE, json.dumps(state, allow_nan=False).encode())
            self._manifests.seal(step, writing)
            require_run()
            self._files.rename(writing, self._directory / self._name(step))
            self._files.fsync(self._directory)
            return True

        if self._on_rank_0(trainer, lambda: self._prepare(step, writing)):
            try:
                trainer.save(writing)
                self._on_rank_0(trainer, commit)
            except CheckpointError:
                if trainer.rank == 0 and writing.exists():
                    self._discard(writing)
                raise
        return self._on_rank_0(trainer, lambda: self._conclude(step))

    def exporter(self, step: int, trainer: Exportable, *, is_busy: bool = False) -> Callable[[], None] | None:
        """Copy the policy, and return what adds it to the checkpoint of `step`; None if that has its model.

        With `is_busy` on rank 0, None, and no copy: the last one is still in memory.

        Every rank calls this while it has those weights. Rank 0 alone gets a result, and may call it in any
        thread. If that cannot write, it raises what its library does.
        """
        if self._on_rank_0(trainer, lambda: is_busy or self.is_exported(step)):
            return None
        write, directory = trainer.export(), self._directory / self._name(step)
        writing = directory / f"{UNFINISHED}{EXPORT}"

        def export() -> None:
            if writing.exists():
                self._files.remove(writing)
            try:
                write(writing)
                self._manifests.add_export(directory, writing)
            except Exception:
                if writing.exists():
                    self._discard(writing)
                raise

        return export if trainer.rank == 0 else None

    def is_exported(self, step: int) -> bool:
        """Whether a kept step has its Hugging Face model. Raises CheckpointError."""
        return self._manifests.is_exported(self._directory / self._name(step))

    def steps(self) -> set[int]:
        """Return the steps of the kept checkpoints. Raises OSError."""
        return set(map(_step, self._steps()))

    def latest(self, *, exported: bool = False) -> Path | None:
        """Return the newest checkpoint that verifies, or whose model does if it is to be `exported`.

        The reasons against newer ones are logged.
        """
        newest, passed_over = self._newest(self.verify_export if exported else self.verify)
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
        self._forget_after(step)
        self._files.replace(self._directory / NEWEST, f"{step}\n".encode())

    def seal(self, step: int) -> None:
        """Sign what a library has written as the checkpoint of `step`, and prune old ones. Raises OSError."""
        self._manifests.seal(step, self._directory / self._name(step))
        self._files.fsync(self._directory)
        self._conclude(step)

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
        return self._manifests.state(self._directory / self._name(step))

    def newest_state(self) -> tuple[Path, dict[str, Any]] | None:
        """Return the newest checkpoint whose state verifies, and that state; reads no large file."""
        newest, _ = self._newest(self._manifests.state)
        return None if newest is None else (newest, self.state(_step(newest)))

    def require_signature(self) -> None:
        """Raise CheckpointsRefused if there were checkpoints and none has this key; reads only manifests."""
        newest, passed_over = self._newest(self._manifests.read)
        if newest is None:
            self._require_beginning(passed_over)

    def verify(self, directory: Path, part: str = "") -> None:
        """Check signature, step and bytes of files whose names begin with `part`. Raises CheckpointError."""
        step = self._manifests.verify(directory, part)
        if self._name(step) != directory.name:
            signed = f"{directory}: signed as step {step}"
            raise CheckpointError(f"{signed}; give the directory its name back")

    def verify_export(self, directory: Path) -> None:
        """Verify the Hugging Face model without other files. Raises CheckpointError, also if it is absent."""
        self.verify(directory, f"{EXPORT}/")
        if not self._manifests.is_exported(directory):
            why = f"{directory} has no {EXPORT}/ yet, which its run writes next to training"
            raise CheckpointError(
                f"{why}; if the run has ended, `asyncrl up` on it writes that of the newest"
            )

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
                self._manifests.read(self._directory / name)
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
                self._discard(self._directory / name)
        # The next checkpoint is as large as the newest. A full disk is reported before the long write.
        needed = sum(path.stat().st_size for directory in self._steps()[-1:] for path in files_in(directory))
        if (free := self._files.free_bytes(self._directory)) < needed:
            raise CheckpointError(
                f"{self._directory}: the newest checkpoint has {needed / 2**20:.1f} MiB, the disk has "
                f"{free / 2**20:.1f} MiB left for the next one; make room there"
            )
        writing.mkdir()
        return True

    def _discard(self, path: Path) -> None:
        """Remove what is of no use any more. A failure, which only costs room, is logged once."""
        try:
            self._files.remove(path)
        except OSError as error:
            if path not in self._stays:
                text = "%s could not be removed (%s); every save tries again, or remove it yourself"
                log.warning(text, path, error)
            self._stays.add(path)

    def _conclude(self, step: int) -> int:
        """Record a durable checkpoint as the newest, remove old ones, and return the oldest of the newest."""
        if self._newest_saved() != step:
            self._files.replace(self._directory / NEWEST, f"{step}\n".encode())
        steps = self._steps()
        for directory in steps[: -self._keep]:
            if not self.keeps(_step(directory)):
                self._discard(directory)
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
        self._forget_after(_step(newest))
        return _step(newest)

    def _forget_after(self, step: int) -> None:
        """Remove what was recorded of metrics of later steps, whose weights are lost."""
        for path in (self._directory / BEST, self._directory / ENDED):
            if (read_record(path) or {}).get("step", step) > step:
                self._files.remove(path)

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


def _step(directory: Path) -> int:
    return int(directory.name.rpartition("-")[2])
