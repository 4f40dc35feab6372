"""Every file of a run damaged: it goes on from what is left or refuses with the way out, and never begins
again by itself."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from asyncrl.cli import foreground
from asyncrl.config.load import load_config
from asyncrl.errors import AsyncRLError, CheckpointError, CheckpointsRefused
from asyncrl.launch.roles import NOT_FIXED_BY_A_RESTART
from asyncrl.run.checkpoint import CheckpointStore
from asyncrl.run.directory import RunDirectory
from reliability.crash.small_run import GROUPS, NAME, Weights, config_in
from tests.support.waiting import wait_until

pytestmark = pytest.mark.integration

BEFORE, AFTER = 3, 5


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[len(data) // 2] ^= 0x11
        path.write_bytes(data)


def missing(path: Path) -> None:
    path.unlink()


def replaced(path: Path) -> None:
    """By a directory."""
    path.unlink()
    path.mkdir()
    (path / "something").touch()


def unreadable(path: Path) -> None:
    """By a link to itself: nobody can open it, not even root, and nobody says that it is not there."""
    path.unlink()
    path.symlink_to(path.name)


Damage = Callable[[Path], None]
DAMAGES: list[Damage] = [truncated, emptied, flipped, missing, replaced, unreadable]


def start(root: Path, steps: int) -> "subprocess.Popen[str]":
    argv = [
        sys.executable,
        "-m",
        "reliability.crash.small_run",
        "up",
        str(config_in(root, root, max_restarts=2)),
        str(steps),
    ]
    return subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=Path(__file__).parents[2]
    )


def run(root: Path, steps: int) -> tuple[int, str]:
    with start(root, steps) as process:
        try:
            said, _ = process.communicate(timeout=300)
        finally:
            process.kill()
    return process.returncode, said


def trained(root: Path, step: int) -> list[int]:
    found = root / "runs" / NAME / "checkpoints" / f"step-{step:06}" / "hf" / "model.safetensors"
    return list(json.loads(found.read_text()))


def whole(steps: int) -> list[int]:
    return list(range(1, GROUPS * steps + 1))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps, with all files that a run leaves."""
    root = tmp_path_factory.mktemp("base")
    status, said = run(root, BEFORE)
    assert status == 0 and trained(root, BEFORE) == whole(BEFORE), said
    directory = RunDirectory(root / "runs" / NAME)
    for scaled in (directory.scale, directory.scaled):
        scaled.write_text('{"generators": 1, "of": 7}')
    directory.write_join_key(directory.keys().join)
    directory.weights.mkdir()
    (directory.weights / "rendezvous").write_text("left by a learner that was killed")
    return root


@pytest.fixture
def root(base: Path, tmp_path: Path) -> Iterator[Path]:
    shutil.copytree(base, tmp_path / "root")
    yield tmp_path / "root"


NEEDED: dict[str, list[Damage]] = {
    "run.key": DAMAGES,
    "config.yaml": [replaced],
    "store.url": [replaced],
    "supervisor.lock": [replaced, unreadable],
    "learner.lock": [replaced, unreadable],
}
"""What a person has to mend, by damage."""


def files_of(root: Path) -> dict[str, Path]:
    directory = root / "runs" / NAME
    return {str(path.relative_to(directory)): path for path in sorted(directory.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("damage", [truncated, missing, emptied, flipped, replaced, unreadable])
def test_a_run_goes_on_when_everything_is_damaged_that_nothing_rests_on(root: Path, damage: Damage) -> None:
    damaged = []
    for name, path in files_of(root).items():
        if damage not in NEEDED.get(name, []) and not name.startswith("checkpoints/step-"):
            damage(path)
            damaged.append(name)
    assert {
        "processes.json",
        "status.json",
        "scale.json",
        "join.key",
        "metrics/learner.jsonl",
        "starts.jsonl",
    } < set(damaged)
    assert {"logs/learner.jsonl", "logs/learner.out", "checkpoints/NEWEST"} < set(damaged)
    assert sum(name.startswith("store/appendonlydir/") for name in damaged) == 3
    status, said = run(root, AFTER)
    assert status == 0 and "Traceback" not in said, said
    assert trained(root, AFTER) == whole(AFTER)
    assert sum((root / "runs" / NAME / f"checkpoints/step-{step:06}").is_dir() for step in (4, 5)) == 2


@pytest.mark.parametrize(
    ("name", "damage"), [(name, damage) for name, damages in NEEDED.items() for damage in damages]
)
def test_what_a_run_cannot_do_without_is_named_with_the_way_out(
    root: Path, name: str, damage: Damage
) -> None:
    path = root / "runs" / NAME / name
    damage(path)
    if name == "learner.lock":
        status, said = run(root, AFTER)
        assert status == 2
    else:
        with pytest.raises(AsyncRLError) as refusal:
            foreground.run_here(
                load_config(config_in(root, root, max_restarts=2), [f"learner.steps={AFTER}"]),
                fresh=False,
                generators=True,
                plain=True,
            )
        said = str(refusal.value)
    assert (
        name in said
        and any(word in said for word in ("restore", "move it", "must be a file"))
        and "Traceback" not in said
    )
    assert trained(root, BEFORE) == whole(BEFORE)
    assert not list((root / "runs" / NAME / "checkpoints").glob("rejected-*")), "a refusal changes nothing"


STEP_FILES = ["MANIFEST.json", "state.json", "trainer.json", "hf/model.safetensors"]


def store_of(root: Path) -> CheckpointStore:
    directory = RunDirectory(root / "runs" / NAME)
    return CheckpointStore(directory.checkpoints, directory.checkpoint_key(), 2)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", STEP_FILES)
def test_a_damaged_checkpoint_is_passed_over_for_an_older_one_and_without_one_the_run_does_not_begin_again(
    root: Path, caplog: pytest.LogCaptureFixture, name: str, damage: Damage
) -> None:
    checkpoints, whole_copy = root / "runs" / NAME / "checkpoints", root / "copy"
    shutil.copytree(checkpoints, whole_copy, symlinks=True)
    damage(checkpoints / "step-000003" / name)
    weights = Weights()
    state = store_of(root).load(weights)
    assert state is not None and state["version"] == 2 and weights.ids == whole(2)
    assert "checkpoint passed over" in caplog.text and (checkpoints / "rejected-step-000003").is_dir()

    damage(checkpoints / "step-000002" / name)
    for _ in range(2):  # it does not forget
        with pytest.raises(CheckpointsRefused) as refusal:
            store_of(root).load(Weights())
    said = str(refusal.value)
    assert (
        "step-000002" in said and "rejected-step-000003" in said and "--fresh" in said and "restore" in said
    )
    assert isinstance(refusal.value, NOT_FIXED_BY_A_RESTART), (
        "the learner ends with status 2, and is not started again"
    )

    shutil.rmtree(checkpoints / "step-000002")
    shutil.copytree(whole_copy / "step-000002", checkpoints / "step-000002")
    weights = Weights()
    assert store_of(root).load(weights) is not None and weights.ids == whole(2)


@pytest.mark.parametrize("place", range(0, 400, 7))
def test_no_bit_of_a_manifest_can_be_flipped(base: Path, tmp_path: Path, place: int) -> None:
    directory = tmp_path / "step-000003"
    shutil.copytree(base / "runs" / NAME / "checkpoints" / "step-000003", directory)
    data = bytearray((directory / "MANIFEST.json").read_bytes())
    for bit in range(8):
        changed = data.copy()
        changed[place % len(data)] ^= 1 << bit
        (directory / "MANIFEST.json").write_bytes(changed)
        try:
            store_of(base).verify(directory)
        except CheckpointError:
            continue
        assert json.loads(changed) == json.loads(data), "white space"


def test_directories_that_are_gone_are_missed(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = root / "runs" / NAME / "checkpoints"
    shutil.rmtree(checkpoints / "step-000003")
    assert store_of(root).load(Weights()) is not None
    assert "step 3 was saved and is gone" in caplog.text
    shutil.rmtree(checkpoints / "step-000002")
    with pytest.raises(CheckpointsRefused, match=r"step-000003: it was saved here, and is gone"):
        store_of(root).load(Weights())
    with pytest.raises(AsyncRLError, match=r"step-000003: it was saved here, and is gone"):
        foreground.run_here(
            load_config(config_in(root, root, max_restarts=2)), fresh=False, generators=True, plain=True
        )


def test_a_run_without_a_checkpoint_that_verifies_ends_with_every_reason_and_goes_on_when_one_is_restored(
    root: Path,
) -> None:
    checkpoints = root / "runs" / NAME / "checkpoints"
    kept = (checkpoints / "step-000002" / "hf" / "model.safetensors").read_bytes()
    for step in (2, 3):
        truncated(checkpoints / f"step-{step:06}" / "hf" / "model.safetensors")
    status, said = run(root, AFTER)
    assert status == 2 and "Traceback" not in said, said
    assert all(
        f"step-00000{step}: hf/model.safetensors is not what was written" in said for step in (2, 3)
    ), said
    assert "--fresh deletes what was trained" in said
    (checkpoints / "step-000002" / "hf" / "model.safetensors").write_bytes(kept)
    status, said = run(root, AFTER)
    assert status == 0 and trained(root, AFTER) == whole(AFTER), said


def test_a_full_disk_and_a_death_at_once_cost_what_is_for_people(root: Path) -> None:
    directory = RunDirectory(root / "runs" / NAME)
    (directory.path / "slowly").touch()

    def wait(condition: Callable[[], bool]) -> None:
        wait_until(lambda: process.poll() is not None or condition())
        assert process.poll() is None, process.communicate()[0][-3000:]

    with start(root, 2000) as process:
        try:
            wait(lambda: (process.pid, 2) == (holder_pid(directory), len(directory.children())))
            old = directory.children()["g0"]
            # Files take no more, as on a full disk.
            psutil.Process(process.pid).rlimit(psutil.RLIMIT_FSIZE, (64, -1))
            replaced(directory.processes)  # the one that was short enough
            os.kill(old, signal.SIGKILL)
            wait(
                lambda: any(
                    pid != old and "(600)" in " ".join(words)
                    for pid, words in command_lines(process.pid).items()
                )
            )
            assert directory.children() == {}, "nobody could write it"
            shutil.rmtree(directory.processes)
            psutil.Process(process.pid).rlimit(psutil.RLIMIT_FSIZE, (-1, -1))
            wait(lambda: directory.children().get("g0", old) != old)
            log = directory.logs / "supervisor.jsonl"
            wait(lambda: "g0 died (killed by SIGKILL)" in log.read_text())
            process.send_signal(signal.SIGTERM)
            said, _ = process.communicate(timeout=120)
        finally:
            process.kill()
    assert "Traceback" not in said and process.returncode == 128 + signal.SIGTERM, said
    assert "the record of processes failed and will be tried again; the run goes on" in said


def holder_pid(directory: RunDirectory) -> int | None:
    found = directory.supervisor()
    return found.pid if found else None


def command_lines(pid: int) -> dict[int, list[str]]:
    """Those of the children, by pid; a child may be reaped in between."""
    found = {}
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            found[child.pid] = child.cmdline()
    return found
