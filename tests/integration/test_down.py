"""Whom `asyncrl down` finds, and whom it waits for."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from asyncrl.buffer.server import Choice, StoreServer
from asyncrl.cli import watching
from asyncrl.commands import down
from asyncrl.commands.down import processes_of
from asyncrl.config.schema import Config
from asyncrl.config.store import StoreConfig
from asyncrl.hosting.children import family
from asyncrl.hosting.environment import RUN_VARIABLE, child_environment
from asyncrl.hosting.processes import _holds_lock
from asyncrl.run.directory import RunDirectory
from tests.support.waiting import HANG, wait_until

pytestmark = pytest.mark.integration


def run_in(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create(fresh=True)
    directory.config.write_text("run: {name: run}\n")
    return directory


@contextmanager
def held(directory: RunDirectory, busy: str = HANG, before: str = "") -> Iterator["subprocess.Popen[bytes]"]:
    """A supervisor, as far as others see, that runs `busy` when this begins, and `before` earlier."""
    environment = os.environ | {RUN_VARIABLE: str(directory.path.resolve())}
    code = (
        "import os, pathlib, signal, sys, threading, time; from asyncrl.run.lock import RunLock; lock = "
        "RunLock(pathlib.Path(sys.argv[1]));"
    )
    argv = [sys.executable, "-c", f"{code} {before}print(flush=True)\n{busy}", str(directory.supervisor_lock)]
    with subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE) as supervisor:
        try:
            assert supervisor.stdout is not None and supervisor.stdout.readline() == b"\n"
            yield supervisor
        finally:
            supervisor.kill()


def test_a_supervisor_that_has_ended_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = run_in(tmp_path)
    with held(directory) as supervisor:
        found = directory.supervisor()
        assert found is not None and found.pid == supervisor.pid
        begun_s = time.monotonic()
        watching.down(directory.path)
        assert psutil.Process(supervisor.pid).status() == psutil.STATUS_ZOMBIE
        assert time.monotonic() - begun_s < 30.0  # it would wait for a minute
    assert capsys.readouterr().out.endswith("stopped, no process is left\n")
    watching.down(directory.path)
    assert capsys.readouterr().out.endswith("was not up, no process is left\n")


def test_a_supervisor_is_seen_while_it_opens_and_closes_files(tmp_path: Path) -> None:
    directory = run_in(tmp_path)
    names = {str(directory.supervisor_lock.resolve())}
    with held(
        directory, "while True:\n for fd in [os.open('/dev/null', 0) for _ in range(50)]: os.close(fd)"
    ) as supervisor:
        assert all(_holds_lock(Path(f"/proc/{supervisor.pid}"), names) for _ in range(500))


def test_a_run_that_was_being_started_is_stopped_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, wait = run_in(tmp_path), down._wait
    directory.write_processes({})
    with ExitStack() as stack:
        late: list[subprocess.Popen[bytes]] = []

        def slow(processes: Sequence[psutil.Process], is_over: Callable[[], bool]) -> list[psutil.Process]:
            if not late:
                late.append(stack.enter_context(held(directory)))
            return wait(processes, is_over)

        monkeypatch.setattr(down, "_wait", slow)
        watching.down(directory.path)
        assert late[0].wait(timeout=60) == -signal.SIGTERM, "it was asked, not killed"


SAVES = """
import signal, threading
asked = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: asked.set())
open(f"{sys.argv[1]}.ready", "w").close()
asked.wait()
from asyncrl.files import replace_text
replace_text(pathlib.Path(sys.argv[1]).with_name("stopping.json"), '{"within_s": 60, "text": "finishing step 8"}')
threading.Event().wait(2.0)
pathlib.Path(sys.argv[1]).with_name("checkpoints").joinpath("step-000008/hf").mkdir(parents=True)
"""


def test_a_supervisor_gets_the_time_that_it_announces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(down, "PATIENCE_S", 1.0)
    directory = run_in(tmp_path)
    with held(directory, SAVES) as supervisor:
        wait_until((directory.path / "supervisor.lock.ready").exists)
        watching.down(directory.path)
        assert supervisor.wait(60) == 0, "it was not killed"
    said = capsys.readouterr().out.splitlines()
    assert said[0].endswith(": finishing step 8")
    assert said[1].endswith(
        f"stopped, no process is left; step 8 is saved in {directory.checkpoints}/step-000008"
    )


def test_ctrl_c_in_down_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor that ends on SIGINT only, as one whose learner is saving."""
    directory = run_in(tmp_path)
    patience = down._Patience

    def impatient(*arguments: object) -> down._Patience:
        signal.raise_signal(signal.SIGINT)
        return patience(*arguments)  # type: ignore[arg-type]

    before = "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_DFL); "
    with held(directory, before=before) as supervisor:
        monkeypatch.setattr(down, "_Patience", impatient)
        down.end_run(directory)
        assert supervisor.wait(60) == -signal.SIGINT


def test_a_process_that_writes_its_own_title_still_belongs_to_the_run(tmp_path: Path) -> None:
    """As the processes of vLLM do; a title over the environment would hide the run's mark."""
    reward = {"functions": [{"function": "m:f"}]}
    config = Config.model_validate(
        {"run": {"name": "r"}, "model": {"path": "m"}, "data": {"train": "d"}, "reward": reward}
    )
    code = "import setproctitle; setproctitle.setproctitle('VLLM::EngineCore'); print(flush=True); " + HANG
    environment = child_environment(config, tmp_path, threads=1, gpus=[])
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"\n"
            assert psutil.Process(process.pid).cmdline()[0] == "VLLM::EngineCore"
            assert [found.pid for found in processes_of(tmp_path)] == [process.pid]
        finally:
            process.kill()


@pytest.mark.parametrize("choice", ["bundled", "auto"])
def test_the_store_belongs_to_the_run(
    choice: Choice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_VARIABLE, str(tmp_path.resolve()))
    with StoreServer(StoreConfig(), tmp_path / "store", server=choice) as server:
        assert [found.pid for found in processes_of(tmp_path)] == [server.pid]


FAMILY = """
import subprocess, sys, time
from pathlib import Path
from asyncrl.run.directory import RunDirectory
from asyncrl.hosting.children import family
from asyncrl.cli.foreground import stop_on_signals
from asyncrl.hosting.children import ProcessSpec
from asyncrl.hosting.supervisor import Supervisor
from asyncrl.run.lock import RunLock

directory = RunDirectory(Path(sys.argv[1]))
leave = f"env -i setsid sh -c 'sleep 600 & echo $! >> {left}; exec sleep 601' & sleep 0.5; exit 0"
code = f"import subprocess; subprocess.run(['sh', '-c', {leave!r}]); HANG"
spec = ProcessSpec(name="g0", argv=[sys.executable, "-c", code], env={"PATH": sys.argv[3]}, log_path=directory.logs / "g0.out")
with RunLock(directory.supervisor_lock), family() as members, Supervisor([spec], max_restarts=0) as supervisor:
    with stop_on_signals(supervisor):
        supervisor.run(members.tend)
""".replace("{left}", "{sys.argv[2]}").replace("HANG", HANG)


def test_who_sheds_his_environment_and_his_session_still_belongs_to_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, left = RunDirectory(tmp_path / "run"), tmp_path / "left"
    directory.create(fresh=True)
    directory.config.write_text("run: {name: run}\n")
    argv = [sys.executable, "-c", FAMILY, str(directory.path), str(left), os.environ["PATH"]]
    with subprocess.Popen(argv) as supervisor:
        try:
            wait_until(
                lambda: supervisor.poll() is not None or (left.exists() and left.read_text().endswith("\n"))
            )
            escaped = psutil.Process(int(left.read_text()))
            wait_until(lambda: escaped.parent().ppid() == supervisor.pid)  # type: ignore[union-attr]
            assert processes_of(directory.path) == [], "the mark is gone"
            watching.down(directory.path)
            assert supervisor.wait(60) == 0
        finally:
            supervisor.kill()
    assert not escaped.is_running() or escaped.status() == psutil.STATUS_ZOMBIE
    assert "no process is left" in capsys.readouterr().out


def test_adopted_processes_that_end_are_taken_leave_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.hosting.children.LOOK_S", 0.0)
    monkeypatch.setattr("asyncrl.hosting.children.UNCLAIMED_S", 0.2)
    with family() as members:
        done = subprocess.run(["sh", "-c", "sleep 0.2 & echo $!"], capture_output=True, text=True, check=True)
        pid = int(done.stdout)
        ours = subprocess.Popen(["sleep", "600"])
        wait_until(lambda: members.tend() or not psutil.pid_exists(pid))
        assert ours.poll() is None, "who lives is let alone"
    assert ours.wait(120) in (-9, 0)
