"""The few file operations that a checkpoint's durability rests on, in one object, so that a test can fail each of them."""

import shutil
from pathlib import Path

from asyncrl.files import sync
from asyncrl.progress import beat


class FileOps:
    """Operations that change or order what is on disk."""

    def write(self, path: Path, data: bytes) -> None:
        """Create or overwrite a file; durable only after `fsync`."""
        path.write_bytes(data)

    def fsync(self, path: Path) -> None:
        """Make a file's content, or a directory's entries, durable."""
        beat()
        sync(path)

    def rename(self, source: Path, target: Path) -> None:
        """Atomic; durable only after `fsync` of the directory."""
        source.rename(target)

    def remove(self, path: Path) -> None:
        """A whole directory, or whatever has its name."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()

    def free_bytes(self, directory: Path) -> int:
        """What the disk under `directory` still takes."""
        return shutil.disk_usage(directory).free
