"""`asyncrl scale` on a live supervisor with stand-ins for learner and generators."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.commands.down import processes_of
from asyncrl.run.directory import RunDirectory
from tests.support.command import ASYNCRL
from tests.support.waiting import HANG, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

GENERATOR = """
import pathlib, signal, sys, time
here = pathlib.Path(sys.argv[1])
if (here / "broken").exists(): sys.exit(7)
def leave(*_):
    with (here / "gave-back").open("a") as file: file.write(sys.argv[2] + " ")
    sys.exit(143)
signal.signal(signal.SIGTERM, leave)
(here / f"{sys.argv[2]}.up").touch()
HANG
""".replace("HANG", HANG)
SUPERVISOR = """
import os
import sys
from pathlib import Path
from asyncrl.run.directory import RunDirectory
from asyncrl.hosting.environment import PARENT_VARIABLE, RUN_VARIABLE
from asyncrl.commands.scale import Scaled
from asyncrl.errors import RunError
from asyncrl.cli.foreground import stop_on_signals
from asyncrl.hosting.children import ProcessSpec
from asyncrl.hosting.supervisor import Supervisor
from asyncrl.run.lock import RunLock

directory = RunDirectory(Path(sys.argv[1]))
def spec(name, code, **more):
    argv = [sys.executable, "-c", code, str(directory.path), name]
    env = os.environ | {PARENT_VARIABLE: str(os.getpid()), RUN_VARIABLE: str(directory.path.resolve())}
    return ProcessSpec(name=name, argv=argv, env=env, log_path=directory.logs / f"{name}.out", **more)
def make(index, count, running):
    if (directory.path / "full").exists():
        raise RunError(f"g{index} would need room that {', '.join(sorted(running))} have")
    return spec(f"g{index}", sys.argv[3])
lock = RunLock(directory.supervisor_lock)
learner = spec("learner", "HANG", ends_run=True)
with Supervisor([learner], max_restarts=0, on_change=directory.write_processes) as supervisor, stop_on_signals(supervisor):
    with Scaled(supervisor, make, directory.scale, directory.scaled) as scaled:
        scaled.begin(int(sys.argv[2]))
        supervisor.run(scaled.tend)
""".replace("HANG", HANG)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    directory = RunDirectory(tmp_path / "scaled")
    directory.create(fresh=False)
    directory.config.write_text("run: {name: scaled}\n")
    yield directory
    for process in processes_of(directory.path):
        process.kill()


def start(run: RunDirectory, count: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(run.path), str(count), GENERATOR], env=os.environ
    )


def children(run: RunDirectory) -> set[str]:
    return set(json.loads(run.processes.read_text())["children"]) if run.processes.exists() else set()


def scale(run: RunDirectory, change: str) -> tuple[int, str]:
    done = subprocess.run(
        [*ASYNCRL, "scale", change, str(run.path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr


def test_generators_are_started_and_drained_while_the_run_goes_on(run):
    supervisor = start(run, 2)
    try:
        wait_until(lambda: children(run) == {"learner", "g0", "g1"} and run.scale.exists())
        assert scale(run, "generators=+2") == (
            0,
            "generators: 2 -> 4; started: g2, g3 (the model is loaded first)\n",
        )
        assert children(run) == {"learner", "g0", "g1", "g2", "g3"}
        wait_until(lambda: all((run.path / f"g{index}.up").exists() for index in range(4)))
        status, said = scale(run, "generators=-3")
        assert status == 0 and "left: g1, g2, g3 (their tickets are given back)" in said
        assert children(run) == {"learner", "g0"}
        assert set((run.path / "gave-back").read_text().split()) == {"g1", "g2", "g3"}
        assert scale(run, "generators=2")[0] == 0 and children(run) == {"learner", "g0", "g1"}
        for change, expected in (
            ("generators=-2", "would make 0 of 2; allowed is 1 to"),
            ("learners=2", "allowed is generators=+2"),
        ):
            status, said = scale(run, change)
            assert status == 2 and expected in said
        assert children(run) == {"learner", "g0", "g1"} and supervisor.poll() is None
        (run.path / "full").touch()
        status, said = scale(run, "generators=+2")
        assert status == 2 and "generators=+2: g2 would need room that g0, g1, learner have" in said
        assert children(run) == {"learner", "g0", "g1"}, "none of the two was started"
        (run.path / "full").unlink()
        (run.path / "broken").touch()
        run.scale.write_text('{"generators": 4}')
        wait_until(lambda: run.scale.read_text() == '{"generators": 2}')
        assert children(run) == {"learner", "g0", "g1"} and supervisor.poll() is None, (
            "extra ones that cannot start end nothing"
        )
    finally:
        supervisor.terminate()
        supervisor.wait(timeout=60)
    assert not run.scale.exists() and processes_of(run.path) == []
    status, said = scale(run, "generators=3")
    assert status == 2 and "starts no generators here now" in said


def test_a_run_without_generators_of_its_own_is_not_scaled(run):
    supervisor = start(run, 0)
    try:
        wait_until(lambda: children(run) == {"learner"})
        status, said = scale(run, "generators=+1")
        assert status == 2 and "asyncrl generator --count" in said and children(run) == {"learner"}
    finally:
        supervisor.terminate()
        supervisor.wait(timeout=60)


def test_the_number_outlives_the_supervisor_until_the_config_has_another(run):
    for count, change, running in (
        (1, "+2", 3),
        (1, None, 3),
        (2, None, 2),
        (1, None, 1),
        (2, "-1", 1),
        (2, None, 1),
    ):
        (run.path / "gave-back").unlink(missing_ok=True)
        supervisor = start(run, count)
        try:
            wait_until(run.scale.exists)
            if change:
                assert scale(run, f"generators={change}")[0] == 0
            wanted = {"learner", *(f"g{index}" for index in range(running))}
            wait_until(lambda wanted=wanted: children(run) == wanted)
            assert change or not (run.path / "gave-back").exists(), "none was started to be drained"
        finally:
            supervisor.terminate()
            supervisor.wait(timeout=60)
