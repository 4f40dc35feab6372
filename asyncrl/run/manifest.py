"""File operations, and the signed list of a checkpoint's files: the sha256 of each, under the run's key."""

import hashlib
import hmac
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.config.named_files import EXPORT
from asyncrl.errors import CheckpointError
from asyncrl.files import sync
from asyncrl.hosting.progress import beat

MANIFEST = "MANIFEST.json"
STATE = "state.json"
RESTORE = "restore the directory or remove it"
UNFINISHED = ".writing-"


class FileOps:
    """Operations that change the disk or the order of its writes, as one object: tests make each fail."""

    def write(self, path: Path, data: bytes) -> None:
        """Create or overwrite a file; durable only after `fsync`."""
        path.write_bytes(data)

    def fsync(self, path: Path) -> None:
        """Make a file's content, or a directory's entries, durable."""
        beat()
        sync(path)

    def rename(self, source: Path, target: Path) -> None:
        """Rename atomically; durable only after `fsync` of the directory."""
        source.rename(target)

    def replace(self, path: Path, data: bytes) -> None:
        """Write a file in place of what has its name, atomically; durable after `fsync` of the directory."""
        writing = path.with_name(f"{UNFINISHED}{path.name}")
        self.write(writing, data)
        self.fsync(writing)
        if path.is_dir():  # not ours
            self.remove(path)
        self.rename(writing, path)

    def remove(self, path: Path) -> None:
        """Remove a directory with its content, or a file of that name."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()

    def free_bytes(self, directory: Path) -> int:
        return shutil.disk_usage(directory).free


@dataclass(frozen=True, slots=True)
class Manifests:
    """The manifests of one run's checkpoints. `key` signs and verifies them."""

    key: bytes
    files: FileOps

    def read(self, directory: Path) -> dict[str, Any]:
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

    def seal(self, step: int, directory: Path) -> None:
        """Make what is in a directory durable, and sign it as a checkpoint of `step`. Raises OSError."""
        manifest = self._signed({"step": step, "files": self._durable(directory)})
        self.files.write(directory / MANIFEST, manifest)
        self.files.fsync(directory / MANIFEST)
        self.files.fsync(directory)

    def add_export(self, directory: Path, writing: Path) -> None:
        """Make the model in `writing`, inside a checkpoint, durable and the export of that. Raises OSError.

        The export is listed last, and until then counts as missing.
        """
        manifest, export = self.read(directory), directory / EXPORT
        found = self._durable(writing)
        if export.exists():  # its process ended before the manifest listed it
            self.files.remove(export)
        self.files.rename(writing, export)
        self.files.fsync(directory)
        manifest["files"] |= {f"{EXPORT}/{name}": digest for name, digest in found.items()}
        self.files.replace(directory / MANIFEST, self._signed(manifest))
        self.files.fsync(directory)

    def is_exported(self, directory: Path) -> bool:
        """Whether a checkpoint lists its Hugging Face model. Raises CheckpointError."""
        return _lists_export(self.read(directory))

    def verify(self, directory: Path, part: str = "") -> int:
        """Check the signature, and the content of every file whose name begins with `part`; return the step.

        Raises CheckpointError.
        """
        manifest = self.read(directory)
        passed_over = (UNFINISHED,) if _lists_export(manifest) else (UNFINISHED, f"{EXPORT}/")
        expected = {name: digest for name, digest in manifest["files"].items() if name.startswith(part)}
        found = {str(path.relative_to(directory)): path for path in files_in(directory)}
        found = {n: p for n, p in found.items() if n.startswith(part) and not n.startswith(passed_over)}
        found.pop(MANIFEST, None)
        if expected.keys() != found.keys():
            names = ", ".join(sorted(expected.keys() ^ found.keys()))
            raise CheckpointError(f"{directory}: {names} missing or not in {MANIFEST}; {RESTORE}")
        for name, path in found.items():
            if path.is_symlink() or not path.is_file() or _sha256(path) != expected[name]:
                raise CheckpointError(f"{directory}: {name} is not what was written; {RESTORE}")
        return int(manifest["step"])

    def state(self, directory: Path) -> dict[str, Any]:
        """Return the learner's state, after checking it and the signature alone. Raises CheckpointError."""
        listed, content = self.read(directory)["files"].get(STATE), _read(directory / STATE)
        if listed != hashlib.sha256(content).hexdigest():
            raise CheckpointError(f"{directory}: {STATE} is not what was written; {RESTORE}")
        return dict(json.loads(content))

    def _durable(self, directory: Path) -> dict[str, str]:
        """Make all below a directory durable; return the sha256 of each file by its name there."""
        files = list(files_in(directory))
        for path in files:
            self.files.fsync(path)
        for path in [*(path for path in directory.rglob("*") if path.is_dir()), directory]:
            self.files.fsync(path)
        return {str(path.relative_to(directory)): _sha256(path) for path in files}

    def _signed(self, manifest: dict[str, Any]) -> bytes:
        return json.dumps(manifest | {"hmac": self._sign(manifest)}, indent=1).encode()

    def _sign(self, manifest: dict[str, Any]) -> str:
        content = {key: value for key, value in manifest.items() if key != "hmac"}
        return hmac.new(self.key, json.dumps(content, sort_keys=True).encode(), hashlib.sha256).hexdigest()


def _lists_export(manifest: Mapping[str, Any]) -> bool:
    return any(name.startswith(f"{EXPORT}/") for name in manifest["files"])


def files_in(directory: Path) -> Iterator[Path]:
    """Return all files and links below a directory, in order."""
    return (path for path in sorted(directory.rglob("*")) if path.is_symlink() or not path.is_dir())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); use a step that is kept") from error


def _sha256(path: Path) -> str:
    beat()
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
