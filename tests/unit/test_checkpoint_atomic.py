"""Whatever moment a save is cut off at, and whatever the disk forgets, a valid checkpoint is found."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.named_files import EXPORT
from asyncrl.errors import BufferFenced, CheckpointError, CheckpointsRefused, RunError
from asyncrl.run.checkpoint import CheckpointStore
from asyncrl.run.lock import RunLock
from asyncrl.run.manifest import FileOps
from tests.support.fake_trainer import KEY, FakeTrainer, save_whole
from tests.support.waiting import HANG


class Crash(Exception):
    """The process died here."""


class FailingDisk(FileOps):
    """Dies before or after operation `die_at`, and knows what a power loss would take back.

    A file that was not fsynced is torn in half; a rename whose directory was not fsynced is undone.
    """

    def __init__(self, die_at: int | None = None, *, before: bool = True) -> None:
        self.die_at, self.before, self.count = die_at, before, 0
        self.durable: set[Path] = set()
        self.renames: list[tuple[Path, Path]] = []

    def _step(self, operation: Callable[..., None], *arguments: Any) -> None:
        dies, self.count = self.count == self.die_at, self.count + 1
        if dies and self.before:
            raise Crash
        operation(*arguments)
        if dies:
            raise Crash

    def write(self, path: Path, data: bytes) -> None:
        self.durable.discard(path)
        self._step(super().write, path, data)

    def fsync(self, path: Path) -> None:
        self._step(super().fsync, path)
        self.durable.add(path)
        self.renames = [(source, target) for source, target in self.renames if target.parent != path]

    def rename(self, source: Path, target: Path) -> None:
        self._step(super().rename, source, target)
        self.durable |= {
            target / path.relative_to(source) for path in self.durable if path.is_relative_to(source)
        }
        self.renames.append((source, target))

    def remove(self, path: Path) -> None:
        self._step(super().remove, path)

    def lose_power(self, root: Path, *, renames_survive: bool) -> None:
        for path in [path for path in root.rglob("*") if path.is_file() and path not in self.durable]:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        for source, target in [] if renames_survive else reversed(self.renames):
            target.rename(source)


def store(root: Path, files: FileOps | None = None, keep: int = 2) -> CheckpointStore:
    return CheckpointStore(root, KEY, keep, files)


def found(root: Path) -> tuple[str, dict[str, Any]]:
    trainer = FakeTrainer()
    state = store(root).load(trainer)
    assert state is not None
    return trainer.value, state


def model_in(checkpoint: Path) -> str:
    return (checkpoint / EXPORT / "model.safetensors").read_text()


def save_three(root: Path, files: FileOps) -> list[int]:
    """Steps 1 to 3 with two kept, so that the third prunes; which saves returned."""
    checkpoints, done = store(root, files), []
    try:
        for step in (1, 2, 3):
            save_whole(checkpoints, step, FakeTrainer(f"value {step}"), {"version": step})
            done.append(step)
    except Crash:
        pass
    return done


def operations() -> int:
    disk = FailingDisk()
    import tempfile

    with tempfile.TemporaryDirectory() as root:
        assert save_three(Path(root), disk) == [1, 2, 3]
    return disk.count


OPERATIONS = operations()


@pytest.mark.parametrize("power", ["process died", "power loss, renames lost", "power loss, renames survive"])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("die_at", range(OPERATIONS + 1))
def test_after_a_crash_at_any_operation_the_newest_finished_checkpoint_is_found_whole(
    tmp_path: Path, die_at: int, before: bool, power: str
) -> None:
    disk = FailingDisk(die_at, before=before)
    done = save_three(tmp_path, disk)
    if power != "process died":
        disk.lose_power(tmp_path, renames_survive="survive" in power)
    if not done and store(tmp_path).latest() is None:
        return
    value, state = found(tmp_path)
    assert value == f"value {state['version']}"
    assert state["version"] >= max(done, default=1)
    # The newest may have no model, but none is torn, and the learner that goes on writes it.
    checkpoints = store(tmp_path)
    if exported := checkpoints.latest(exported=True):
        assert model_in(exported) == f"value {int(exported.name[-6:])}" * 100
    if export := checkpoints.exporter(state["version"], FakeTrainer(value)):
        export()
    newest = checkpoints.latest(exported=True)
    assert newest is not None and newest.name == f"step-{state['version']:06}"
    assert model_in(newest) == value * 100 and not list(newest.glob(".writing-hf"))
    # And the run goes on: the next save works over whatever the crash left.
    assert store(tmp_path).save(4, FakeTrainer("value 4"), {"version": 4}) <= 4
    assert found(tmp_path) == ("value 4", {"version": 4})
    assert not list(tmp_path.glob(".writing-*"))


def test_the_crash_points_include_every_kind_of_operation() -> None:
    assert OPERATIONS > 30


def damage_byte(directory: Path) -> None:
    data = bytearray((directory / "hf" / "model.safetensors").read_bytes())
    data[7] ^= 1
    (directory / "hf" / "model.safetensors").write_bytes(data)


def damage_state(directory: Path) -> None:
    (directory / "state.json").write_text(json.dumps({"version": 99}))


def damage_manifest(directory: Path) -> None:
    """What an attacker without the key can do: change a file and its hash."""
    import hashlib

    (directory / "weights").write_text("evil")
    manifest = json.loads((directory / "MANIFEST.json").read_text())
    manifest["files"]["weights"] = hashlib.sha256(b"evil").hexdigest()
    (directory / "MANIFEST.json").write_text(json.dumps(manifest))


def damage_extra(directory: Path) -> None:
    (directory / "more_model_states.pt").write_bytes(b"pickle")


def damage_link(directory: Path) -> None:
    (directory / "weights").rename(directory.parent / "elsewhere")
    (directory / "weights").symlink_to(directory.parent / "elsewhere")


def damage_missing(directory: Path) -> None:
    (directory / "weights").unlink()


def damage_torn(directory: Path) -> None:
    path = directory / "MANIFEST.json"
    path.write_bytes(path.read_bytes()[:20])


def damage_type(directory: Path) -> None:
    (directory / "MANIFEST.json").write_text("[]")


def damage_empty(directory: Path) -> None:
    for path in sorted(directory.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (damage_byte, "model.safetensors is not what was written"),
        (damage_state, "state.json is not what was written"),
        (damage_manifest, "signature"),
        (damage_extra, "more_model_states.pt"),
        (damage_link, "weights is not what was written"),
        (damage_missing, "weights missing"),
        (damage_torn, "no JSON"),
        (damage_type, "list"),
        (damage_empty, "cannot be read"),
    ],
)
def test_a_damaged_newest_checkpoint_is_passed_over_with_its_reason_before_it_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], reason: str
) -> None:
    save_three(tmp_path, FileOps())
    damage(tmp_path / "step-000003")
    with pytest.raises(CheckpointError, match=reason):
        store(tmp_path).verify(tmp_path / "step-000003")
    assert store(tmp_path).latest() == tmp_path / "step-000002"
    assert reason in caplog.text
    assert found(tmp_path) == ("value 2", {"version": 2})
    # Set aside: it neither counts as kept nor stands in the way of the same step.
    assert store(tmp_path).save(3, FakeTrainer("again"), {"version": 3}) == 2
    assert found(tmp_path) == ("again", {"version": 3})


def test_a_checkpoint_of_another_run_or_under_another_name_is_refused(tmp_path: Path) -> None:
    save_three(tmp_path, FileOps())
    another = CheckpointStore(tmp_path, b"another key", 2)
    assert another.latest() is None
    for use in (another.require_signature, lambda: another.load(FakeTrainer())):
        with pytest.raises(
            CheckpointsRefused, match=r"(?s)step-000003: the signature.*step-000002: the signature.*--fresh"
        ):
            use()
    store(tmp_path).require_signature()
    (tmp_path / "step-000002").rename(tmp_path / "step-000009")
    with pytest.raises(CheckpointError, match="signed as step 2"):
        store(tmp_path).verify(tmp_path / "step-000009")
    assert store(tmp_path).latest() == tmp_path / "step-000003"


def test_pruning_keeps_the_newest_and_reports_the_oldest_kept(tmp_path: Path) -> None:
    checkpoints = store(tmp_path, keep=2)
    oldest = [
        save_whole(checkpoints, step, FakeTrainer(str(step)), {"version": step})
        for step in (5, 10, 999_999, 1_000_000)
    ]
    assert oldest == [5, 5, 10, 999_999]
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-1000000", "step-999999"]
    assert checkpoints.latest() == tmp_path / "step-1000000"
    assert checkpoints.state(999_999) == {"version": 999_999}
    assert (tmp_path / "step-1000000" / EXPORT / "model.safetensors").exists()
    with pytest.raises(CheckpointError, match=r"step-000005.*cannot be read"):
        checkpoints.verify(tmp_path / "step-000005")


def test_a_state_is_never_read_that_was_not_written(tmp_path: Path) -> None:
    """After each save the learner reads the state of the oldest one kept, whose file may be damaged."""
    checkpoints = CheckpointStore(tmp_path, KEY, keep=2)
    checkpoints.save(1, FakeTrainer("a"), {"takes": 12})
    path = tmp_path / "step-000001" / "state.json"
    written = path.read_bytes()
    for damaged in (b"", written[:-1], written.replace(b"12", b"13"), b"[]", b"\xff"):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"state.json is not what was written"):
            checkpoints.state(1)
    assert checkpoints.save(2, FakeTrainer("b"), {"takes": 14}) == 1
    path.unlink()
    with pytest.raises(CheckpointError, match=r"state.json: cannot be read"):
        checkpoints.state(1)


def test_a_step_that_is_there_and_valid_is_not_written_again(tmp_path: Path) -> None:
    store(tmp_path).save(1, FakeTrainer("first"), {"version": 1})
    store(tmp_path).save(1, FakeTrainer("second"), {"version": 1})
    assert found(tmp_path) == ("first", {"version": 1})


def test_there_is_nothing_to_load_at_first(tmp_path: Path) -> None:
    assert store(tmp_path / "none").load(FakeTrainer()) is None


def test_a_full_disk_is_a_checkpoint_error_that_keeps_the_older_one(tmp_path: Path) -> None:
    class Full(FileOps):
        def write(self, path: Path, data: bytes) -> None:
            raise OSError(28, "No space left on device")

    store(tmp_path).save(1, FakeTrainer("value 1"), {"version": 1})
    with pytest.raises(CheckpointError, match="No space left"):
        store(tmp_path, Full()).save(2, FakeTrainer("value 2"), {"version": 2})
    assert found(tmp_path) == ("value 1", {"version": 1})


def test_a_second_learner_is_told_who_holds_the_run(tmp_path: Path) -> None:
    path = tmp_path / "run" / "lock"
    with RunLock(path), pytest.raises(RunError, match=f"pid {os.getpid()} on host"):
        RunLock(path)
    RunLock(path).release()


def test_the_lock_of_a_killed_learner_is_free(tmp_path: Path) -> None:
    program = (
        "import sys, time, pathlib; from asyncrl.run.lock import RunLock; lock = "
        "RunLock(pathlib.Path(sys.argv[1]));print('held', flush=True); " + HANG
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "lock")], stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            with pytest.raises(RunError, match=f"pid {holder.pid} "):
                RunLock(tmp_path / "lock")
        finally:
            holder.kill()
    RunLock(tmp_path / "lock").release()


def test_a_learner_that_has_lost_the_run_saves_nothing(tmp_path):
    checkpoints = CheckpointStore(tmp_path, KEY, 2)
    checkpoints.save(1, FakeTrainer("a"), {"version": 1}, lambda: None)

    def fenced() -> None:
        assert (tmp_path / ".writing-step-000002" / "MANIFEST.json").exists(), "it is asked last of all"
        raise BufferFenced("another learner has the run")

    with pytest.raises(BufferFenced):
        checkpoints.save(2, FakeTrainer("b"), {"version": 2}, fenced)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-000001"]
    assert checkpoints.load(FakeTrainer("c")) == {"version": 1}
