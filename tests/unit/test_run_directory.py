"""What a run directory must hold before a run begins again in it, and who is known to look after it."""

import errno
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest

from asyncrl.commands.down import end_run
from asyncrl.control.scoring import endpoint_of
from asyncrl.control.sockets import listen
from asyncrl.errors import RunError
from asyncrl.files import socket_path
from asyncrl.results.recorded import evaluated_steps
from asyncrl.run.directory import RunDirectory, needing
from asyncrl.run.keys import RunKeys
from asyncrl.run.lock import RunLock, is_locked

HOLD = (
    "import pathlib, sys; from asyncrl.run.lock import RunLock; lock = RunLock(pathlib.Path(sys.argv[1]));"
    "print(flush=True); sys.stdin.read()"
)


def begun(path: Path) -> RunDirectory:
    directory = RunDirectory(path / "run")
    directory.create(fresh=False)
    directory.config.write_text("run: {name: run}\n")
    return directory


@pytest.mark.parametrize("left", ["step-000003", "rejected-step-000003", "NEWEST"])
def test_no_key_is_drawn_beside_what_was_saved(tmp_path: Path, left: str) -> None:
    directory = begun(tmp_path)
    (directory.checkpoints / ".writing-step-000001").mkdir()
    directory.draw_secret()
    before = directory.keys()
    (directory.checkpoints / left).mkdir()
    directory.secret_path.unlink()
    with pytest.raises(RunError, match=rf"(?s)run\.key is missing.*{left}.*restore it.*--fresh"):
        directory.draw_secret()
    assert not directory.secret_path.exists()
    directory.create(fresh=True)
    directory.draw_secret()
    assert directory.keys() != before


def test_copies_of_checkpoints_and_evaluations_are_none(tmp_path: Path) -> None:
    directory = begun(tmp_path)
    kept = {10: directory.checkpoints / "step-000010", 1000000: directory.checkpoints / "step-1000000"}
    kept[7] = directory.trl_checkpoints / "checkpoint-7"
    copies = ("step-10", "step-000010-copy", "step-000010.bak", "step-000010-000011", "step-", "step-new")
    for path in (*kept.values(), *(directory.checkpoints / name for name in copies)):
        path.mkdir(parents=True)
    for path in (kept[7], directory.trl_checkpoints / "checkpoint-7-copy"):
        path.mkdir(exist_ok=True)
        (path / "MANIFEST.json").touch()
    assert directory.saved_steps() == kept
    directory.evaluations.mkdir()
    for name in ("step-000010.jsonl", "step-000010.bak.jsonl", "step-000010-copy.jsonl"):
        (directory.evaluations / name).touch()
    assert evaluated_steps(directory) == [10]
    (directory.evaluations / "step-000004.jsonl").touch()
    assert evaluated_steps(directory) == [4, 10]
    # An evaluation of steps that `--from` has set aside is not the newest, whatever the times of files are.
    records = [{"step": step, name: 1.0} for step in (4, 10, 4) for name in ("time/step", "eval/prompts")]
    (directory.metrics / "learner.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in records))
    assert evaluated_steps(directory) == [10, 4]


def test_a_key_that_is_given_stands_for_one_that_is_drawn_and_is_never_exchanged(tmp_path: Path) -> None:
    directory, given = begun(tmp_path), RunKeys(bytes(32))
    directory.draw_secret(given)
    (directory.checkpoints / "step-000001").mkdir()
    directory.draw_secret(given)
    assert directory.keys() == given and directory.secret_path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(RunError, match=r"run\.key is not the run\.key that ASYNCRL_SECRET_FILE names"):
        directory.draw_secret(RunKeys(bytes(range(32))))
    directory.secret_path.unlink()
    directory.draw_secret(given)
    assert directory.keys() == given, "what is given is the copy that a lost key is restored from"


@pytest.mark.parametrize("damage", ["", "ab" * 31, "zz" * 32, "ab" * 64, "\0" * 64, "\xff" * 64])
def test_a_damaged_key_is_named_with_the_way_out_and_not_replaced(tmp_path: Path, damage: str) -> None:
    directory = begun(tmp_path)
    directory.draw_secret()
    directory.secret_path.write_text(damage, encoding="latin-1")
    directory.draw_secret()
    with pytest.raises(
        RunError, match=r"run\.key holds .* restore it from a copy, or begin again with --fresh"
    ):
        directory.keys()


def test_a_key_that_cannot_be_read_is_not_one_that_is_missing(tmp_path: Path) -> None:
    directory = begun(tmp_path)
    directory.secret_path.mkdir(mode=0o700)
    directory.draw_secret()
    with pytest.raises(RunError, match=r"run\.key holds a secret and cannot be read \(Is a directory\)"):
        directory.keys()


def test_a_run_without_its_checkpoints_does_not_begin_again(tmp_path: Path) -> None:
    directory = begun(tmp_path)
    directory.checkpoints.rmdir()
    with pytest.raises(RunError, match=r"lost its directory checkpoints/.*--fresh"):
        directory.create(fresh=False)
    directory.create(fresh=True)
    assert directory.checkpoints.is_dir() and not directory.config.exists()


def test_a_run_that_has_saved_and_lost_every_checkpoint_does_not_begin_again(tmp_path: Path) -> None:
    directory = begun(tmp_path)
    directory.status.write_text('{"step": 6}')
    directory.create(fresh=False)  # it died before its first checkpoint
    directory.mark_saved()
    (directory.checkpoints / ".writing-step-000001").mkdir()
    with pytest.raises(
        RunError, match=r"has saved checkpoints and has lost what was in checkpoints/; restore it .*--fresh"
    ):
        directory.create(fresh=False)
    (directory.checkpoints / "step-000006").mkdir()
    directory.create(fresh=False)


def test_fresh_deletes_runs_only(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    directory = RunDirectory(tmp_path)
    with pytest.raises(RunError, match="no run directory"):
        directory.require_run()
    RunDirectory(tmp_path / "new").require_run()


def test_fresh_that_was_interrupted_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = begun(tmp_path)
    with RunLock(directory.supervisor_lock), monkeypatch.context() as patched:
        patched.setattr(Path, "iterdir", lambda path: [directory.config, directory.checkpoints])
        patched.setattr(shutil, "rmtree", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            directory.create(fresh=True)
    directory.require_run()
    with RunLock(directory.supervisor_lock):
        directory.create(fresh=True)  # and the start fails before it writes the config
    assert not directory.config.exists()
    directory.require_run()


@pytest.mark.parametrize(
    "config",
    [
        "model: {path: runs/run/checkpoints/step-000001/hf}",
        "data: {train: [{path: 'runs/**/pairs.jsonl'}]}",
        "reward: {functions: [{function: 'link/own.py:score'}]}",
    ],
)
def test_fresh_deletes_nothing_that_its_config_names(config: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    directory = begun(Path("runs"))
    Path("link").symlink_to(directory.path)
    (directory.checkpoints / "step-000001" / "hf").mkdir(parents=True)
    (directory.path / "own.py").touch()
    directory.pairs.touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RunError, match=r"(model|data|reward)\.[\w.]+: found .*, which --fresh would delete"):
        directory.create(fresh=True, config=config)
    assert sorted(tmp_path.rglob("*")) == before
    texts = f"sampling: {{stop: ['**']}}\ndata: {{template: 'runs/**/x:**', system: {'x ' * 9999}}}"
    directory.create(fresh=True, config=f"run: {{root: runs, name: run}}\n{texts}")
    assert sorted(directory.path.iterdir()) == sorted(
        (directory.logs, directory.metrics, directory.checkpoints)
    )


@pytest.mark.parametrize("root", ["[lr1e-6]", "2026-01-31T12:00"])
@pytest.mark.parametrize("config", ["data: {train: '%s'}", "reward: {functions: [{function: '%s:score'}]}"])
def test_fresh_deletes_no_file_that_is_named_below_a_directory_with_signs(
    root: str, config: str, tmp_path: Path
) -> None:
    directory = begun(tmp_path / root)
    (own := directory.path / "own.py").touch()
    with pytest.raises(RunError, match="which --fresh would delete"):
        directory.create(fresh=True, config=config % own)
    assert own.exists()


def test_a_socket_with_a_long_path_lies_in_its_directory(tmp_path: Path, monkeypatch) -> None:
    (directory := tmp_path / ("x" * 120)).mkdir()
    path = socket_path(directory / "a.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        assert (directory / "a.sock").is_socket() and socket_path(directory / "a.sock") == path
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # another process has another TMPDIR
        assert socket_path(directory / "a.sock").is_socket()
    assert (tmp_path / f"asyncrl-{os.getuid()}").stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(PermissionError, match=r"belongs to another user: .*asyncrl-12345"):
        socket_path(directory / "a.sock")


def test_what_the_disk_refuses_is_a_message(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    directory = RunDirectory(tmp_path / "file" / "run")
    with (
        pytest.raises(RunError, match=r"file/run: Not a directory; .*run\.root=DIRECTORY"),
        needing(directory.path),
    ):
        directory.create(fresh=False)


@pytest.mark.parametrize("damage", ["none", "emptied", "deleted"])
def test_the_supervisor_is_whoever_holds_the_lock_whatever_the_file_says(tmp_path: Path, damage: str) -> None:
    directory = begun(tmp_path)
    with pytest.raises(RunError, match="no run that was started here"):
        directory.supervisor()
    directory.write_processes({})
    argv = [sys.executable, "-c", HOLD, str(directory.supervisor_lock)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == b"\n"
            if damage == "emptied":
                os.truncate(directory.supervisor_lock, 0)
            if damage == "deleted":
                directory.supervisor_lock.unlink()
            found = directory.supervisor()
            assert found is not None and found.pid == holder.pid
            if damage != "deleted":
                assert is_locked(directory.supervisor_lock)
                with pytest.raises(RunError, match="this run is held by"):
                    RunLock(directory.supervisor_lock)
        finally:
            holder.kill()
    assert directory.supervisor() is None


def test_who_starts_the_hosts_from_elsewhere_is_not_passed_over_by_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would start the learner's supervisor again."""
    directory = begun(tmp_path)
    monkeypatch.setattr("asyncrl.hosting.processes._holds_lock", lambda process, names: False)
    directory.supervisor_lock.touch()
    with RunLock(directory.driver_lock):
        said = rf"is looked after by pid {os.getpid()} on host .*give the command there"
        with pytest.raises(RunError, match=said):
            end_run(directory)
    assert end_run(directory) is None


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    directory = RunDirectory(tmp_path)
    directory.supervisor_lock.touch()
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(RunError, match=f"{directory.supervisor_lock} cannot be locked: .*No locks available"):
        _ = directory.is_up


def test_looking_does_not_keep_a_supervisor_from_starting(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    RunLock(lock).release()
    looking = "import pathlib, sys\nfrom asyncrl.run.lock import is_locked\nprint(flush=True)\n"
    looking += "while True: is_locked(pathlib.Path(sys.argv[1]))"
    with subprocess.Popen([sys.executable, "-c", looking, str(lock)], stdout=subprocess.PIPE) as watcher:
        try:
            assert watcher.stdout is not None and watcher.stdout.readline() == b"\n"
            for _ in range(20):
                RunLock(lock).release()
        finally:
            watcher.kill()


def test_a_scorer_of_a_run_deep_in_the_file_system_listens(tmp_path: Path) -> None:
    directory = tmp_path / ("n" * 120)
    directory.mkdir()
    _, close = listen(endpoint_of(directory, "judge", 0), None)
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(endpoint_of(directory, "judge", 0).removeprefix("ipc://"))
    close(0)
    assert endpoint_of(directory, "judge", 0) != endpoint_of(directory, "judge", 1)
