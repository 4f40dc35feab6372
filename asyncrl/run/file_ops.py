"""The file operations that make checkpoints durable, as one object, so that tests can make each fail."""

import shutil
from pathlib import Path

from asyncrl.files import sync
from asyncrl.hosting.progress import beat

UNFINISHED = ".writing-"


class FileOps:
    """Operations that change the disk or the order of its writes."""

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
        """Return the free bytes of the disk that holds `directory`."""
        return shutil.disk_usage(directory).free
