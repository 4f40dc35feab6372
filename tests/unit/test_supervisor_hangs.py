"""Processes that live and make no progress: killed, counted, replaced and named, in virtual time."""

import re

import pytest

from asyncrl.errors import RunError
from asyncrl.hosting.progress import Limits, Pace
from tests.support.virtual_host import (
    SIGKILL,
    VirtualHost,
    deaths,
    one,
    run_for,
    run_until,
    supervised,
    works,
)

LIMITS = Limits(hang_s=300.0, slow_s=1800.0)
SLACK_S = 1.5  # a second between two signs, and two ticks


def hangs(me):
    me.begin("wait for a lock")
    yield 1e5


def hangs_once(me):
    yield from hangs(me) if len(me.host.processes) == 1 else works(me)


def test_a_process_that_hangs_is_killed_with_its_family_and_started_again(tmp_path, caplog):
    host = VirtualHost(g0=hangs_once)
    with supervised(host, one(tmp_path, "g0"), max_restarts=1, limits=LIMITS) as supervisor:
        run_until(supervisor, lambda: len(host.processes) == 2)
        first = host.processes[0]
        assert first.status == SIGKILL and not first.has_child
        assert first.ended_s == pytest.approx(300.0, abs=SLACK_S)
        run_for(supervisor, 10_000.0)
        assert deaths(supervisor) == {"g0": 0} and len(host.processes) == 2, "one that works is left alone"
    assert "g0 hangs and is killed: g0 made no progress for" in caplog.text
    assert re.search(
        r"g0 died \(g0 made no progress for 300 s in `wait for a lock`\); restart 1 of 1", caplog.text
    )


def test_a_process_that_is_stopped_is_replaced(tmp_path):
    host = VirtualHost(g0=works)
    with supervised(host, one(tmp_path, "g0"), max_restarts=5, limits=LIMITS) as supervisor:
        run_for(supervisor, 50.0)
        host.processes[0].stop()
        run_until(supervisor, lambda: len(host.processes) == 2)
        assert deaths(supervisor) == {"g0": 1}
    assert host.processes[0].ended_s == pytest.approx(350.0, abs=SLACK_S)


def test_hangs_count_as_deaths(tmp_path):
    host = VirtualHost(g0=hangs)
    with (
        pytest.raises(
            RunError, match=r"(?s)died 2 times .*last: g0 made no progress for 300 s in `wait for a lock`"
        ),
        supervised(host, one(tmp_path, "g0"), max_restarts=1, limits=LIMITS) as supervisor,
    ):
        supervisor.run()


def test_one_of_several_workers_is_enough(tmp_path):
    """As of the ranks of a learner: one that hangs costs all."""

    def ranks(me):
        me.begin("wait for a lock", worker="rank 1")
        me.begin("work", worker="rank 0")
        while True:
            me.beat("rank 0")
            yield 1.0

    host = VirtualHost(learner=ranks)
    with (
        pytest.raises(RunError, match=r"last: rank 1 made no progress for 300 s in `wait for a lock`\)"),
        supervised(host, one(tmp_path, workers=("rank 0", "rank 1")), limits=LIMITS) as supervisor,
    ):
        supervisor.run()


def test_a_slow_part_has_a_bound_of_its_own(tmp_path):
    def loads(load_s):
        def program(me):
            me.begin("load", Pace.SLOW)
            yield load_s
            yield from works(me)

        return program

    host = VirtualHost(patient=loads(1790.0), late=loads(1810.0))
    with supervised(host, one(tmp_path, "patient"), limits=LIMITS) as supervisor:
        run_for(supervisor, 5000.0)
    with (
        pytest.raises(RunError, match="late made no progress for 1800 s in `load`"),
        supervised(host, one(tmp_path, "late"), limits=LIMITS) as supervisor,
    ):
        supervisor.run()


def test_a_process_that_never_starts_is_replaced(tmp_path):
    """It was stopped before its first sign."""

    def program(me):
        if len(me.host.processes) == 1:
            yield 1e5
        yield from works(me)

    host = VirtualHost(g0=program)
    limits = Limits(hang_s=6000.0, slow_s=30.0)
    with supervised(host, one(tmp_path, "g0"), max_restarts=5, limits=limits) as supervisor:
        run_until(supervisor, lambda: len(host.processes) == 2)
        run_for(supervisor, 100.0)
        assert deaths(supervisor) == {"g0": 1}
    assert host.processes[0].ended_s == pytest.approx(30.0, abs=SLACK_S)


def test_silence_while_the_supervisor_itself_was_stopped_does_not_count(tmp_path):
    host = VirtualHost(g0=hangs)
    with supervised(host, one(tmp_path, "g0"), max_restarts=5, limits=LIMITS) as supervisor:
        for _ in range(20):
            run_for(supervisor, 10.0)
            host.sleep(3600.0)
        assert deaths(supervisor) == {"g0": 0} and len(host.processes) == 1
        run_until(supervisor, lambda: len(host.processes) == 2, within_s=120.0)


def test_a_standby_that_hangs_is_replaced_and_costs_no_restart(tmp_path):
    host = VirtualHost(learner=works)
    spec = one(tmp_path, has_standby=True, ends_run=True)
    with supervised(host, spec, limits=LIMITS) as supervisor:
        run_until(supervisor, lambda: host.of("learner", stands_by=True))
        (first,) = host.of("learner", stands_by=True)
        run_for(supervisor, 1000.0)
        first.stop()
        stopped_s = host.now_s()
        run_until(supervisor, lambda: len(host.of("learner", stands_by=True)) == 2)
        assert first.status == SIGKILL
        assert first.ended_s - stopped_s == pytest.approx(30.0, abs=SLACK_S), "it only waits: the quick pace"
        assert deaths(supervisor) == {"learner": 0} and len(host.of("learner")) == 1


def test_what_the_kernel_holds_ends_the_run_with_its_reason(tmp_path):
    host = VirtualHost(g0=hangs)
    with supervised(host, one(tmp_path, "g0"), max_restarts=5, limits=LIMITS) as supervisor:
        run_for(supervisor, 1.0)
        (held,) = host.processes
        held.is_held = True
        with pytest.raises(RunError, match=f"cannot be killed: the kernel holds process {held.pid}"):
            supervisor.run()
        assert host.now_s() == pytest.approx(300.0 + 60.0, abs=SLACK_S)
        held.is_held = False


def test_stopping_ends_stopped_processes_within_one_grace(tmp_path):
    names = ("g0", "g1", "g2")
    host = VirtualHost(**dict.fromkeys(names, works))
    with supervised(host, *(one(tmp_path, name) for name in names), limits=LIMITS) as supervisor:
        run_for(supervisor, 5.0)
        for process in host.processes:
            process.stop()
        began_s = host.now_s()
    assert [process.status for process in host.processes] == [SIGKILL] * 3
    assert host.now_s() - began_s == pytest.approx(15.0, abs=SLACK_S)


def test_a_process_that_goes_at_once_is_no_hang(tmp_path):
    def goes(me):
        return 0
        yield

    host = VirtualHost(g0=goes)
    limits = Limits(hang_s=0.0, slow_s=600.0)
    with supervised(host, one(tmp_path, "g0", ends_run=True), limits=limits) as supervisor:
        supervisor.run()
        assert supervisor.is_over
