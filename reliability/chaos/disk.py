"""What becomes of the store's files: power loss, a slow disk, a full one, a lost one. See disk.c."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Disk:
    """The disk below one store."""

    def __init__(self, store: Path, scratch: Path) -> None:
        """`store` is the server's directory; `scratch` outlives it. RuntimeError without a compiler."""
        self._store = store
        self._syncs, self._slow, self._full = scratch / "syncs", scratch / "slow", scratch / "full"
        self.discarded_bytes = 0
        """Of the log, over all power losses."""
        self._library = scratch / "disk.so"
        if shutil.which("cc") is None:
            raise RuntimeError("the power-loss shim needs a C compiler (cc)")
        source = Path(__file__).with_name("disk.c")
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-O1", "-o", self._library, source, "-ldl"], check=True, timeout=60
        )

    @contextmanager
    def below(self) -> Iterator[None]:
        """A server that is started within has this disk."""
        ours = {
            "LD_PRELOAD": str(self._library),
            "CHAOS_SYNCS": str(self._syncs),
            "CHAOS_SLOW": str(self._slow),
            "CHAOS_FULL": str(self._full),
        }
        before = {name: os.environ.pop(name, None) for name in ours}
        os.environ.update(ours)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value

    def lose_power(self) -> None:
        """After a kill: forget what was written since the last completed sync of each file."""
        synced: dict[str, int] = {}
        if self._syncs.exists():
            for line in self._syncs.read_text().splitlines():
                path, _, size = line.rpartition(" ")
                synced[path] = int(size)
        for file in self._store.rglob("*.incr.aof"):
            kept = min(synced.get(str(file.resolve()), 0), file.stat().st_size)
            self.discarded_bytes += file.stat().st_size - kept
            os.truncate(file, kept)

    def lose_everything(self) -> None:
        """A new, empty disk."""
        shutil.rmtree(self._store)
        self._syncs.unlink(missing_ok=True)

    def slow(self, is_slow: bool) -> None:
        """Syncs take half a second longer."""
        _flag(self._slow, is_slow)

    def fill(self, is_full: bool) -> None:
        """Nothing more can be written."""
        _flag(self._full, is_full)


def _flag(path: Path, is_set: bool) -> None:
    if is_set:
        path.touch()
    else:
        path.unlink(missing_ok=True)
