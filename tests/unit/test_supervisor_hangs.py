"""Children that live and do not get on: killed, counted, replaced, and named."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from asyncrl.errors import RunError
from asyncrl.hosting import supervisor as module
from asyncrl.hosting.progress import Limits, Watch
from asyncrl.hosting.supervisor import ProcessSpec, Supervisor

HEAD = (
    "import os, pathlib, subprocess, sys, time\nfrom asyncrl.hosting.progress import Pace, attach, beat, "
    "begin\nattach()\n"
)
WORKS = "begin('work')\nwhile True:\n    beat()\n    time.sleep(0.05)\n"
HANGS = "begin('wait for a lock')\ntime.sleep(600)\n"
PATIENCE_S = 120.0


def spec(code: str, tmp_path: Path, *, name: str = "g0", **more: object) -> ProcessSpec:
    argv = [sys.executable, "-c", HEAD + code]
    return ProcessSpec(
        name=name, argv=argv, env=dict(os.environ), log_path=tmp_path / f"{name}.log", grace_s=2.0, **more
    )


def run_until(supervisor: Supervisor, condition, tick_s: float = 0.02) -> None:
    """Supervise until `condition`."""
    ends_s = time.monotonic() + PATIENCE_S

    def tick() -> None:
        if condition():
            supervisor.request_stop("as expected")
        assert time.monotonic() < ends_s, "it did not come to this"

    supervisor.run(tick, tick_s=tick_s)
    supervisor._stop_reason = None


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def limits(hang_s: float) -> Limits:
    return Limits(hang_s=hang_s, slow_s=600.0)


def test_a_process_that_hangs_is_killed_with_its_family_and_started_again(tmp_path, caplog):
    child, again = tmp_path / "child", tmp_path / "again"
    hangs = f"""
if pathlib.Path({str(child)!r}).exists():
    pathlib.Path({str(again)!r}).touch()
    {WORKS.replace(chr(10), chr(10) + "    ")}
pathlib.Path({str(child)!r}).write_text(str(subprocess.Popen(["sleep", "600"]).pid))
"""
    with Supervisor([spec(hangs + HANGS, tmp_path)], max_restarts=1, limits=limits(1.0)) as supervisor:
        run_until(supervisor, again.exists)
        assert supervisor.deaths() == {"g0": 1}
        run_until(supervisor, lambda: is_gone(int(child.read_text())))
    assert "g0 hangs and is killed: g0 made no progress for" in caplog.text
    assert re.search(
        r"g0 died \(g0 made no progress for . s in `wait for a lock`\); restart 1 of 1", caplog.text
    )


def test_a_process_that_is_stopped_is_replaced(tmp_path):
    with Supervisor([spec(WORKS, tmp_path)], max_restarts=5, limits=limits(3.0)) as supervisor:
        run_until(supervisor, lambda: "g0" in supervisor.pids() and working(supervisor, "g0"))
        first = supervisor.pids()["g0"]
        os.kill(first, signal.SIGSTOP)
        run_until(supervisor, lambda: supervisor.pids().get("g0", first) != first)
        assert is_gone(first)


def working(supervisor: Supervisor, name: str) -> bool:
    family = supervisor._children[name].family
    return family is not None and family.watch.board.signs()[name].doing == "work"


def test_hangs_count_as_deaths(tmp_path):
    with (
        Supervisor([spec(HANGS, tmp_path)], max_restarts=1, limits=limits(0.5)) as supervisor,
        pytest.raises(
            RunError, match=r"(?s)died 2 times .*last: g0 made no progress for . s in `wait for a lock`"
        ),
    ):
        run_until(supervisor, lambda: False)


def test_one_of_several_workers_is_enough(tmp_path):
    """As of the ranks of a learner: one that hangs costs all."""
    code = f"""
if os.fork() == 0:
    os.environ["ASYNCRL_PROGRESS"] = os.environ["ASYNCRL_PROGRESS"].replace(":0", ":1")
    attach()
    {HANGS.replace(chr(10), chr(10) + "    ")}
{WORKS}"""
    specs = [spec(code, tmp_path, workers=("rank 0", "rank 1"))]
    with (
        Supervisor(specs, max_restarts=0, limits=limits(2.0)) as supervisor,
        pytest.raises(RunError, match=r"rank 1 made no progress for . s in `wait for a lock`"),
    ):
        run_until(supervisor, lambda: False)


def test_a_slow_part_has_a_bound_of_its_own(tmp_path):
    code = f"begin('load', Pace.SLOW)\ntime.sleep(2.5)\n{WORKS}"
    with Supervisor([spec(code, tmp_path)], max_restarts=0, limits=limits(2.0)) as supervisor:
        run_until(supervisor, lambda: "g0" in supervisor.pids() and working(supervisor, "g0"))


def test_a_process_that_never_starts_is_replaced(tmp_path):
    """Stopped before it has said a word."""
    started = tmp_path / "started"
    code = f"pathlib.Path({str(started)!r}).touch()\n{WORKS}"
    argv = [
        sys.executable,
        "-c",
        f"import os, signal, pathlib\nif not pathlib.Path({str(started)!r}).exists():\n",
    ]
    argv[2] += (
        f"    pathlib.Path({str(started)!r}).touch()\n    os.kill(os.getpid(), signal.SIGSTOP)\n"
        + HEAD
        + code
    )
    one = ProcessSpec(name="g0", argv=argv, env=dict(os.environ), log_path=tmp_path / "g0.log")
    with Supervisor([one], max_restarts=5, limits=Limits(hang_s=600.0, slow_s=3.0)) as supervisor:
        run_until(supervisor, lambda: "g0" in supervisor.pids() and working(supervisor, "g0"))
        assert supervisor.deaths() == {"g0": 1}


STANDS_BY = """
if "--standby" in sys.argv:
    begin("stand by", Pace.QUICK)
    pathlib.Path({standbys!r}).open("a").write(f"{{os.getpid()}}\\n")
    import select
    while not select.select([sys.stdin], [], [], 0.05)[0]:
        beat()
    begin("start", Pace.SLOW)
"""


def standby_of(tmp_path: Path) -> tuple[ProcessSpec, Path]:
    standbys = tmp_path / "standbys"
    standbys.touch()
    plain = spec(STANDS_BY.format(standbys=str(standbys)) + WORKS, tmp_path, name="learner")
    return spec(
        STANDS_BY.format(standbys=str(standbys)) + WORKS,
        tmp_path,
        name="learner",
        standby_argv=[*plain.argv, "--standby"],
        ends_run=True,
    ), standbys


def pids_in(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().splitlines()]


def test_a_standby_that_hangs_is_replaced_and_costs_no_restart(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_STANDBY_AFTER_S", 0.0)
    one, standbys = standby_of(tmp_path)
    with Supervisor([one], max_restarts=0, limits=limits(3.0)) as supervisor:
        run_until(supervisor, lambda: len(pids_in(standbys)) == 1)
        os.kill(pids_in(standbys)[0], signal.SIGSTOP)
        run_until(supervisor, lambda: len(pids_in(standbys)) == 2)
        assert is_gone(pids_in(standbys)[0])
        assert supervisor.deaths() == {"learner": 0}


def test_a_standby_that_hangs_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_STANDBY_AFTER_S", 0.0)
    one, standbys = standby_of(tmp_path)
    with Supervisor([one], max_restarts=5, limits=limits(600.0)) as supervisor:
        run_until(supervisor, lambda: len(pids_in(standbys)) == 1 and working(supervisor, "learner"))
        standby = supervisor._children["learner"].standby.watch
        monkeypatch.setattr(supervisor, "_keep_standby", lambda child: None)
        monkeypatch.setattr(Watch, "look", lambda self, now_s: "it hangs" if self is standby else None)
        learner = supervisor.pids()["learner"]
        os.kill(learner, signal.SIGKILL)
        run_until(supervisor, lambda: supervisor.pids().get("learner", learner) != learner)
        assert supervisor.pids()["learner"] not in pids_in(standbys)


def test_what_the_kernel_holds_ends_the_run_with_its_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_KILL_S", 0.5)
    with Supervisor([spec(HANGS, tmp_path)], max_restarts=5, limits=limits(0.5)) as supervisor:
        kill = module._Family.kill
        monkeypatch.setattr(module._Family, "kill", lambda self: None)
        with pytest.raises(RunError, match="cannot be killed: the kernel holds process"):
            run_until(supervisor, lambda: False)
        monkeypatch.setattr(module._Family, "kill", kill)


def test_stopping_ends_stopped_processes_within_one_grace(tmp_path):
    specs = [spec(WORKS, tmp_path, name=f"g{index}") for index in range(3)]
    with Supervisor(specs, max_restarts=0, limits=limits(600.0)) as supervisor:
        run_until(
            supervisor,
            lambda: all(
                name in supervisor.pids() and working(supervisor, name) for name in ("g0", "g1", "g2")
            ),
        )
        pids = list(supervisor.pids().values())
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
    assert all(is_gone(pid) for pid in pids)


def test_a_process_that_goes_at_once_is_no_hang(tmp_path):
    with Supervisor([spec("", tmp_path, ends_run=True)], max_restarts=0, limits=limits(0.0)) as supervisor:
        run_until(supervisor, lambda: False)
        assert supervisor.is_over
