"""A disk that is full or broken costs a learner its checkpoint of that step, not its life."""

import errno
import shutil
from pathlib import Path
from unittest import mock

import pytest

from asyncrl.errors import BufferFenced, CheckpointError
from asyncrl.launch import saving
from asyncrl.run.checkpoint import CheckpointStore
from asyncrl.run.manifest import FileOps
from asyncrl.trainer.collectives import Writes
from tests.support.failed_saves import run_on
from tests.support.fake_trainer import KEY, FakeTrainer, save_whole


class SickDisk(FileOps):
    """Fails `failures` operations of the given kind."""

    def __init__(
        self, failures: int = 0, *, kind: str = "fsync", code: int = errno.EIO, free: int = 1 << 40
    ) -> None:
        self.failures, self.kind, self.code, self.free = failures, kind, code, free

    def _perhaps(self, kind: str) -> None:
        if kind == self.kind and self.failures > 0:
            self.failures -= 1
            raise OSError(self.code, "the disk is sick")

    def write(self, path: Path, data: bytes) -> None:
        self._perhaps("write")
        super().write(path, data)

    def fsync(self, path: Path) -> None:
        self._perhaps("fsync")
        super().fsync(path)

    def rename(self, source: Path, target: Path) -> None:
        self._perhaps("rename")
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self._perhaps("remove")
        super().remove(path)

    def free_bytes(self, directory: Path) -> int:
        return self.free


@pytest.mark.parametrize("kind", ["write", "fsync", "rename"])
def test_a_save_that_fails_is_tried_again_after_the_next_step_and_nothing_is_committed_before(
    tmp_path: Path, kind: str
) -> None:
    disk = SickDisk(kind=kind)
    run, around = run_on(tmp_path, disk)
    for version in range(1, 8):
        disk.failures = 1 if version in (4, 5) else 0
        run.checkpoint(version, last=False)
        run.exports.finish()
        assert not list(tmp_path.glob(".writing-*"))
    # At 2, 4, 5 and 6; the store forgets what the checkpoint of step 2 holds, which is still kept after step
    # 6.
    assert around.events == [("commit", 1), ("failed", 1), ("failed", 2), ("commit", 1)]
    assert CheckpointStore(tmp_path, KEY, 2).latest() == tmp_path / "step-000006"


def test_the_last_checkpoint_is_waited_for_and_then_missed_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(saving.time, "sleep", waited.append)
    disk = SickDisk(3)
    run, around = run_on(tmp_path, disk)
    run.checkpoint(7, last=True)
    run.exports.finish()
    assert around.events == [("failed", 1), ("failed", 2), ("failed", 3), ("commit", 4)] and len(waited) == 3
    disk.failures = 1000
    with pytest.raises(CheckpointError, match="sick"):
        run.checkpoint(8, last=True)
    assert 3 <= len(waited) <= 3 + saving.LAST_ATTEMPTS
    assert CheckpointStore(tmp_path, KEY, 2).latest() == tmp_path / "step-000007"


def test_an_old_checkpoint_that_cannot_be_removed_costs_room_and_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = SickDisk(1000, kind="remove", code=errno.EACCES)
    run, around = run_on(tmp_path, disk)
    (tmp_path / ".writing-step-000001").mkdir()  # of a learner that was killed
    for version in range(1, 11):
        run.checkpoint(version, last=False)
        run.exports.finish()
    assert around.events == [("commit", attempt) for attempt in (1, 1, 2, 3, 4)], "each save, and none failed"
    assert run.checkpoints.steps() == {2, 4, 6, 8, 10}
    for name in (".writing-step-000001", "step-000002", "step-000004", "step-000006"):
        assert caplog.text.count(f"{tmp_path / name} could not be removed") == 1
    disk.failures = 0
    run.checkpoint(12, last=False)
    run.exports.finish()
    assert run.checkpoints.steps() == {10, 12} and not list(tmp_path.glob(".writing-*"))


def test_a_state_that_only_rank_0_reads_cannot_make_it_save_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, _ = run_on(tmp_path, FileOps())
    before.checkpoint(2, last=True)
    before.exports.finish()
    run, around = run_on(tmp_path, FileOps())
    (tmp_path / "step-000002" / "state.json").write_text("{}")
    run.checkpoint(4, last=False)
    run.exports.finish()
    assert around.events == [] and "keeps its groups until the next save" in caplog.text
    run.checkpoint(5, last=False)
    run.exports.finish()
    assert not (tmp_path / "step-000005").exists()
    run.checkpoint(6, last=True)
    run.exports.finish()
    assert around.events == [("commit", 1)]


def test_the_ledger_of_an_own_save_is_not_read_again(tmp_path: Path) -> None:
    """With a value for each of millions of rows a state takes seconds to read."""
    run, around = run_on(tmp_path, FileOps())
    with mock.patch.object(CheckpointStore, "state", side_effect=CheckpointError("it was read")):
        for version in range(1, 11):
            run.checkpoint(version, last=False)
            run.exports.finish()
    assert around.events == [("commit", attempt) for attempt in (1, 1, 2, 3, 4)]
    assert len(run._ledgers) == 2, "as many as are kept"


def test_a_disk_without_room_is_said_before_anything_is_written(tmp_path: Path) -> None:
    disk = SickDisk()
    store = CheckpointStore(tmp_path, KEY, 2, disk)
    save_whole(store, 1, FakeTrainer("x" * 100_000), {"version": 1})
    disk.free = 1 << 20
    trainer = mock.Mock(wraps=FakeTrainer("y"), rank=0)
    with pytest.raises(
        CheckpointError, match=r"newest checkpoint has 9\.6 MiB, the disk has 1\.0 MiB left.*make room"
    ):
        store.save(2, trainer, {"version": 2})
    trainer.save.assert_not_called()
    shutil.rmtree(tmp_path / "step-000001")
    store.save(2, trainer, {"version": 2})


def test_after_a_failed_write_the_others_are_left_out() -> None:
    writes, done = Writes(), []

    def fail() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for write in (lambda: done.append(1), fail, lambda: done.append(2)):
        writes.attempt(write)
    assert done == [1] and "No space left" in writes.failure


def test_on_several_hosts_a_checkpoint_becomes_valid_only_while_the_run_is_this_learners(
    tmp_path: Path,
) -> None:
    run, around = run_on(tmp_path, FileOps())
    run.is_shared, around.open = True, mock.Mock()  # type: ignore[attr-defined]
    run.checkpoint(2, last=False)
    run.exports.finish()
    around.open.assert_called_once_with(2)  # type: ignore[attr-defined]
    around.open.side_effect = BufferFenced("another learner has the run")  # type: ignore[attr-defined]
    with pytest.raises(BufferFenced):
        run.checkpoint(4, last=False)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-000002"]
