"""Twenty disks that fill up while a learner saves, each a tmpfs: `python -m reliability.crash.full_disk`
(needs root).

Each run: three good saves, a stranger's file takes the rest of the disk but a random part, saves fail in the
space check, in the trainer's files or in ours, the stranger's file goes, the next step saves.
"""

import json
import logging
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from asyncrl.errors import CheckpointError
from asyncrl.run.checkpoint import CheckpointStore
from asyncrl.run.manifest import FileOps
from tests.support.failed_saves import run_on
from tests.support.fake_trainer import KEY, FakeTrainer

RUNS = 20
DISK_BYTES = 2_000_000


class TrustingDisk(FileOps):
    """Says that there is room: the write has to find out."""

    def free_bytes(self, directory: Path) -> int:
        return 1 << 60


def one(root: Path, rng: random.Random, *, trusting: bool) -> dict[str, float]:
    """One disk. Returns counts and seconds."""
    run, head = run_on(root / "checkpoints", TrustingDisk() if trusting else FileOps(), every=1)
    trainer: Any = FullDiskTrainer("w" * 3_000)
    run.trainer = trainer
    for version in (1, 2, 3):
        run.checkpoint(version, last=False)
        run.exports.finish()
    ballast = root / "ballast"
    ballast.write_bytes(b"x" * (FileOps().free_bytes(root) - rng.randrange(0, 280_000)))
    for version in (4, 5, 6):
        run.checkpoint(version, last=False)
        assert CheckpointStore(root / "checkpoints", KEY, 2).latest() == root / "checkpoints" / "step-000003"
    ballast.unlink()
    free_at_s = time.perf_counter()
    run.checkpoint(7, last=False)
    resumed_s = time.perf_counter() - free_at_s
    run.exports.finish()
    assert CheckpointStore(root / "checkpoints", KEY, 2).latest() == root / "checkpoints" / "step-000007"
    failed = [count for kind, count in head.events if kind == "failed"]
    assert failed == [1, 2, 3], head.events
    return {"failed_saves": len(failed), "resumed_s": resumed_s}


class FullDiskTrainer(FakeTrainer):
    """Reports a failed write as the real one does."""

    def save(self, directory: Path) -> None:
        try:
            super().save(directory)
            (directory / "optimizer").write_text(self.value * 100)
        except OSError as error:
            raise CheckpointError(f"{directory} could not be written (rank 0: {error})") from error


def main() -> None:
    """Entry point."""
    logging.disable(logging.ERROR)
    rng, results = random.Random(1), []
    for number in range(RUNS):
        with tempfile.TemporaryDirectory() as root:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", root], check=True)
            try:
                results.append(one(Path(root), rng, trusting=number % 2 == 0))
            finally:
                subprocess.run(["umount", root], check=True)
    summary = {
        "runs": len(results),
        "failed_saves": sum(result["failed_saves"] for result in results),
        "checkpoints_lost": 0,
        "resumed_max_s": round(max(result["resumed_s"] for result in results), 4),
    }
    sys.stdout.write(json.dumps(summary) + "\n")


if __name__ == "__main__":
    main()
