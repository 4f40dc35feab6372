"""Deaths, back-off, standbys, drains and giving up, in virtual time (real processes: test_children.py)."""

import math
import re
from dataclasses import replace
from itertools import pairwise

import pytest

from asyncrl.errors import RunError
from asyncrl.hosting.supervisor import FAULT_FOUND, SAME_FAULTS, USER_ERROR
from tests.support.virtual_host import (
    SIGKILL,
    Terminated,
    VirtualHost,
    deaths,
    one,
    run_for,
    run_until,
    supervised,
    works,
)

TICK_S = 0.2
SLACK_S = 2 * TICK_S + 0.01  # a tick sees the death, another one the time of the restart


def dies(status, *, after_s=0.0, text="noise"):
    """Return a program that lives for `after_s`; `text` gets the number of the life."""

    def program(me):
        me.say(text.format(life=len(me.host.of(me.spec.name))))
        yield after_s
        return status

    return program


def flaky(me):
    """Die in the first life, and finish in the second."""
    yield 1.0
    return 7 if len(me.host.processes) == 1 else 0


def polite(me):
    me.say("up")
    try:
        yield 1e5
    except Terminated:
        me.say("thanks")
    return 143


def stubborn(me):
    while True:
        try:
            yield 1.0
        except Terminated:
            me.say("no")


def pauses_s(host, name="learner"):
    """Return the pause before each restart."""
    return [later.began_s - earlier.ended_s for earlier, later in pairwise(host.of(name))]


def test_a_process_that_dies_is_started_again_and_the_run_ends_with_the_learner(tmp_path):
    host = VirtualHost(learner=flaky)
    with supervised(host, one(tmp_path, ends_run=True), max_restarts=2) as supervisor:
        supervisor.run()
        assert deaths(supervisor) == {"learner": 1}
    assert [process.status for process in host.processes] == [7, 0]


def test_a_crash_loop_ends_the_run_with_the_last_lines_of_the_log(tmp_path):
    host = VirtualHost(learner=dies(7, text="the disk is on fire"))
    with (
        pytest.raises(RunError, match=r"(?s)died 2 times.*exit status 7.*disk is on fire"),
        supervised(host, one(tmp_path, ends_run=True), max_restarts=1) as supervisor,
    ):
        supervisor.run()


def test_the_pause_before_a_restart_doubles_up_to_a_bound(tmp_path):
    host = VirtualHost(learner=dies(7))
    with (
        pytest.raises(RunError, match="died 8 times"),
        supervised(host, one(tmp_path), max_restarts=7) as supervisor,
    ):
        supervisor.run()
    for pause_s, expected_s in zip(pauses_s(host), (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0), strict=True):
        assert expected_s <= pause_s <= expected_s + SLACK_S


def test_deaths_of_more_than_ten_minutes_ago_do_not_count(tmp_path):
    host = VirtualHost(rare=dies(7, after_s=601.0), often=dies(7, after_s=590.0))
    with supervised(host, one(tmp_path, "rare"), max_restarts=1) as supervisor:
        run_until(supervisor, lambda: len(host.of("rare")) == 20, within_s=20_000.0)
        assert deaths(supervisor) == {"rare": 1}
    assert all(pause_s <= 0.5 + SLACK_S for pause_s in pauses_s(host, "rare")), (
        "the back-off forgets them too"
    )
    with (
        pytest.raises(RunError, match="often died 2 times within ten minutes"),
        supervised(host, one(tmp_path, "often"), max_restarts=1) as supervisor,
    ):
        supervisor.run()


def test_a_users_mistake_is_not_repeated(tmp_path):
    host = VirtualHost(learner=dies(USER_ERROR, text="RunError: no such model"))
    with (
        pytest.raises(RunError, match=r"^no such model"),
        supervised(host, one(tmp_path, ends_run=True), max_restarts=5) as supervisor,
    ):
        supervisor.run()
    assert deaths(supervisor) == {"learner": 0} and len(host.processes) == 1


def test_a_process_that_the_host_cannot_start_is_tried_again_and_costs_no_restart(tmp_path, caplog):
    host = VirtualHost(learner=works)
    host.refuses = lambda spec, stands_by: len(host.refused_s) < 3
    with supervised(host, one(tmp_path, ends_run=True)) as supervisor:
        run_until(supervisor, lambda: supervisor.pids())
        assert deaths(supervisor) == {"learner": 0}
    assert host.refused_s == pytest.approx([0.0, 15.0, 30.0], abs=SLACK_S)
    assert host.processes[0].began_s == pytest.approx(45.0, abs=SLACK_S)
    assert caplog.text.count("learner cannot be started and is tried again in 15 s: no process id") == 3


def lives_for(life_s, *, then):
    """Return a program that dies after `life_s`. Its standby waits, and finishes the run when it is called."""

    def program(me):
        if not me.stands_by:
            yield life_s
            return then
        while not me.is_called:
            me.beat()
            yield 1.0
        return 0

    return program


def test_a_standby_takes_the_place_of_the_one_that_died(tmp_path):
    host = VirtualHost(learner=lives_for(100.0, then=7))
    with supervised(host, one(tmp_path, ends_run=True, has_standby=True), max_restarts=1) as supervisor:
        run_until(supervisor, lambda: host.of("learner", stands_by=True))
        (standby,) = host.of("learner", stands_by=True)
        assert standby.began_s == pytest.approx(60.0, abs=SLACK_S), "the machine is busy until then"
        run_until(supervisor, lambda: standby.is_called)
        assert supervisor.pids() == {"learner": standby.pid}
        supervisor.run()
        assert deaths(supervisor) == {"learner": 1}
    assert len(host.of("learner")) == 1, "no other took the place"


def test_a_standby_ends_with_the_run_and_is_not_called(tmp_path):
    host = VirtualHost(learner=lives_for(1e5, then=0))
    with supervised(host, one(tmp_path, ends_run=True, has_standby=True), max_restarts=1) as supervisor:
        run_for(supervisor, 3600.0)
    (standby,) = host.of("learner", stands_by=True)
    assert standby.status == SIGKILL and not standby.is_called


def test_a_standby_that_cannot_be_started_harms_nobody(tmp_path, caplog):
    host = VirtualHost(learner=works)
    host.refuses = lambda spec, stands_by: stands_by
    with supervised(host, one(tmp_path, ends_run=True, has_standby=True), max_restarts=1) as supervisor:
        run_for(supervisor, 200.0)
        assert deaths(supervisor) == {"learner": 0}
    assert host.refused_s == pytest.approx([60.0, 120.0, 180.0], abs=3 * SLACK_S)
    assert "a standby of learner cannot be started and is tried again" in caplog.text


def test_a_standby_that_cannot_live_harms_nobody(tmp_path):
    """Two standbys die, and one is just dead when the learner dies: it starts without a standby."""

    def program(me):
        if me.stands_by:
            return 1
        yield 121.0 if len(me.host.of("learner")) == 1 else 1.0
        return 7 if len(me.host.of("learner")) == 1 else 0

    host = VirtualHost(learner=program)
    with supervised(host, one(tmp_path, ends_run=True, has_standby=True), max_restarts=5) as supervisor:
        supervisor.run()
        assert deaths(supervisor) == {"learner": 1}
    assert len(host.of("learner")) == 2
    assert [standby.began_s for standby in host.of("learner", stands_by=True)] == pytest.approx(
        [60.0, 120.0], abs=3 * SLACK_S
    )


def test_a_standby_that_dies_when_it_is_called_costs_one_restart_more(tmp_path):
    def program(me):
        while me.stands_by and not me.is_called:
            me.beat()
            yield 1.0
        yield 100.0
        return 7 if len(me.host.processes) < 3 else 0

    host = VirtualHost(learner=program)
    with supervised(host, one(tmp_path, ends_run=True, has_standby=True), max_restarts=5) as supervisor:
        run_until(supervisor, lambda: deaths(supervisor) == {"learner": 2})
        supervisor.run()
    assert [process.stands_by for process in host.processes] == [False, True, True]


def test_stopping_ends_those_that_leave_and_those_that_do_not(tmp_path):
    host = VirtualHost(polite=polite, stubborn=stubborn)
    specs = one(tmp_path, "polite", grace_s=1.0), one(tmp_path, "stubborn", grace_s=30.0)
    with supervised(host, *specs) as supervisor:
        run_for(supervisor, 10.0)
        stopped_s = host.now_s()
    (left,), (killed,) = host.of("polite"), host.of("stubborn")
    assert (left.status, killed.status) == (143, SIGKILL)
    assert left.ended_s == stopped_s and killed.ended_s - stopped_s == pytest.approx(30.0, abs=SLACK_S)
    assert killed.spec.log_path.read_text() == "no\n" and supervisor.pids() == {}


def test_those_that_leave_by_themselves_get_time_and_no_signal(tmp_path):
    host = VirtualHost(g0=dies(0, after_s=12.0), g1=stubborn)
    with supervised(host, one(tmp_path, "g0", grace_s=5.0), one(tmp_path, "g1", grace_s=5.0)) as supervisor:
        run_for(supervisor, 2.0)
        supervisor.stop(leave_s=20.0)
        assert host.of("g0")[0].status == 0
        assert host.of("g1")[0].ended_s == pytest.approx(27.0, abs=2 * SLACK_S)


def test_a_process_that_works_between_its_deaths_is_started_again_immediately(tmp_path):
    """The pause slows down a process that cannot start. It counts from the last start, so it delays no other."""
    host = VirtualHost(learner=dies(7, after_s=30.0))
    with (
        pytest.raises(RunError, match="died 9 times"),
        supervised(host, one(tmp_path, ends_run=True), max_restarts=8) as supervisor,
    ):
        supervisor.run()
    assert pauses_s(host) == pytest.approx([0.0] * 8, abs=SLACK_S)


def saves(me):
    """Train until it is asked to leave; then finish the step and save, in 100 s."""
    me.begin("train")
    try:
        yield 1e5
    except Terminated:
        me.begin("last checkpoint")
    yield 100.0
    me.say("saved")
    return 143


def test_the_learner_gets_the_time_that_saving_takes_and_the_others_do_not(tmp_path):
    host = VirtualHost(learner=saves, g0=stubborn)
    ticks_s = []
    with supervised(host, one(tmp_path, ends_run=True), one(tmp_path, "g0", grace_s=5.0)) as supervisor:
        run_for(supervisor, 2.0)
        asked_s = host.now_s()
        assert supervisor.doing == "train"
        supervisor.stop(save_s=120.0, on_tick=lambda: ticks_s.append(host.now_s()))
        (learner,), (generator,) = host.of("learner"), host.of("g0")
    assert (learner.status, learner.spec.log_path.read_text()) == (143, "saved\n")
    assert learner.ended_s == pytest.approx(asked_s + 100.0)
    assert generator.ended_s == pytest.approx(asked_s + 5.0, abs=SLACK_S)
    assert host.now_s() < asked_s + 101.0, "no time is waited that is not needed"
    assert max(later - earlier for earlier, later in pairwise(ticks_s)) < 1.0, "the screen goes on"


def test_of_several_ranks_the_first_says_what_a_run_does(tmp_path):
    names = ("the process that starts the ranks", "rank 0", "rank 1")

    def ranks(me):
        for name, doing in zip(names, ("wait for the ranks", "export", "end"), strict=True):
            me.begin(doing, worker=name)
        yield 1e5

    with supervised(VirtualHost(learner=ranks), one(tmp_path, ends_run=True, workers=names)) as supervisor:
        run_for(supervisor, 2.0)
        assert supervisor.doing == "export"


def test_a_learner_that_takes_longer_than_its_limit_is_killed_and_so_is_one_on_request(tmp_path):
    for save_s, request_s, end_s in (60.0, None, 60.0), (120.0, 10.0, 10.0), (0.0, None, 15.0):
        host = VirtualHost(learner=saves)
        with supervised(host, one(tmp_path, ends_run=True)) as supervisor:
            run_for(supervisor, 2.0)
            asked_s = host.now_s()

            def tick(supervisor=supervisor, host=host, at_s=asked_s + (request_s or 1e5)):
                if host.now_s() >= at_s:
                    supervisor.end_now()

            supervisor.stop(save_s=save_s, on_tick=tick)
            assert host.of("learner")[0].status == SIGKILL and supervisor.doing is None
            assert host.now_s() == pytest.approx(asked_s + end_s, abs=SLACK_S)


def test_stopping_names_what_the_kernel_holds_and_goes_on(tmp_path, caplog):
    host = VirtualHost(g0=works, g1=works)
    with supervised(host, one(tmp_path, "g0"), one(tmp_path, "g1")) as supervisor:
        run_for(supervisor, 5.0)
        held = host.of("g0")[0]
        held.is_held, began_s = True, host.now_s()
        supervisor.stop()
        assert host.now_s() - began_s < 30.0
        assert f"process {held.pid} cannot be killed: the kernel holds it" in caplog.text
        held.is_held = False
        held.kill()


def test_a_learner_that_finishes_ends_the_others(tmp_path):
    host = VirtualHost(learner=dies(0), g0=works)
    changes: list[dict[str, int]] = []
    specs = one(tmp_path, ends_run=True), one(tmp_path, "g0")
    with supervised(host, *specs, on_change=lambda pids: changes.append(dict(pids))) as supervisor:
        supervisor.run()
        assert list(supervisor.pids()) == ["g0"]
    assert supervisor.pids() == {}
    assert changes[-1] == {}


def test_a_generator_that_was_dismissed_is_started_again_unless_the_run_is_over(tmp_path):
    host = VirtualHost(learner=works, g0=dies(0, after_s=5.0))
    with supervised(host, one(tmp_path, ends_run=True), one(tmp_path, "g0")) as supervisor:
        run_until(supervisor, lambda: len(host.of("g0")) == 3)
        assert deaths(supervisor) == {"learner": 0, "g0": 0}
    assert pauses_s(host, "g0") == pytest.approx([10.0, 10.0], abs=2 * SLACK_S)


def test_without_a_learner_the_run_ends_with_the_last_generator(tmp_path):
    host = VirtualHost(g0=dies(0, after_s=5.0), g1=dies(0, after_s=50.0))
    with supervised(host, one(tmp_path, "g0"), one(tmp_path, "g1")) as supervisor:
        supervisor.run()
    assert len(host.processes) == 2 and 50.0 <= host.now_s() < 52.0


def test_a_process_that_serves_the_generators_ends_with_the_last_one(tmp_path):
    host = VirtualHost(rm=works, g0=dies(0, after_s=5.0))
    with supervised(host, replace(one(tmp_path, "rm"), serves=True), one(tmp_path, "g0")) as supervisor:
        supervisor.run()
    assert len(host.processes) == 2 and 5.0 <= host.now_s() < 7.0


def test_processes_come_and_go_while_the_run_goes_on(tmp_path):
    host = VirtualHost(learner=works, g0=polite, g1=stubborn)
    with supervised(host, one(tmp_path, ends_run=True)) as supervisor:
        supervisor.add(one(tmp_path, "g0"))
        supervisor.add(one(tmp_path, "g1", grace_s=40.0))
        with pytest.raises(RunError, match="already"):
            supervisor.add(one(tmp_path, "g1"))
        run_for(supervisor, 5.0)
        supervisor.drain("g0")
        supervisor.drain("g1")
        drained_s = host.now_s()
        assert supervisor.names == {"learner": True, "g0": False, "g1": False}
        run_until(supervisor, lambda: "g0" not in supervisor.names and "g1" not in supervisor.names)
        (left,), (killed,) = host.of("g0"), host.of("g1")
        assert left.spec.log_path.read_text() == "up\nthanks\n"
        assert killed.status == SIGKILL, "a process that does not leave is killed"
        assert killed.ended_s - drained_s == pytest.approx(40.0, abs=SLACK_S)
        assert supervisor.pids().keys() == {"learner"} and deaths(supervisor) == {"learner": 0}, (
            "nobody died or came back"
        )
        supervisor.add(one(tmp_path, "g0"))
        run_until(supervisor, lambda: len(host.of("g0")) == 2)


def test_a_process_that_waits_for_its_restart_can_be_drained(tmp_path):
    host = VirtualHost(learner=works, g0=dies(7))
    with supervised(host, one(tmp_path, ends_run=True), one(tmp_path, "g0"), max_restarts=9) as supervisor:
        run_until(supervisor, lambda: deaths(supervisor)["g0"] == 5 and "g0" not in supervisor.pids())
        supervisor.drain("g0")
        run_until(supervisor, lambda: "g0" not in supervisor.names, within_s=1.0)
        run_for(supervisor, 60.0)
    assert len(host.of("g0")) == 5


@pytest.mark.parametrize("status", [7, USER_ERROR])
def test_a_process_that_was_added_and_cannot_run_is_left_out(tmp_path, status):
    host = VirtualHost(learner=works, g0=dies(status))
    with supervised(host, one(tmp_path, ends_run=True)) as supervisor:
        supervisor.add(one(tmp_path, "g0", is_extra=True))
        run_until(supervisor, lambda: "g0" not in supervisor.names)
        run_for(supervisor, 60.0)
        assert supervisor.pids().keys() == {"learner"} and len(host.of("g0")) == 1


FAULT = "noise\nasyncrl.errors.CheckpointError: step 7 holds "


def test_the_same_fault_again_and_again_ends_the_run_early_and_with_its_words(tmp_path, caplog):
    host = VirtualHost(learner=dies(FAULT_FOUND, text=FAULT + "{life} tensors"))
    with (
        pytest.raises(RunError) as caught,
        supervised(host, one(tmp_path), max_restarts=50) as supervisor,
    ):
        supervisor.run()
    assert re.match(
        r"learner died 3 times in a row of the same fault, and would again: CheckpointError: step 7 holds 3 tensors; "
        r"correct that",
        str(caught.value),
    )
    deaths = [record.getMessage() for record in caplog.records if "died" in record.getMessage()]
    assert len(deaths) == SAME_FAULTS - 1, "a number that differs each time is the same fault"
    assert re.search(
        r"learner died \(exit status 3\); its last message: CheckpointError: step 7 holds .*; restart 1 of 50 in",
        deaths[0],
    )


def test_faults_that_differ_or_are_none_of_these_use_up_the_restarts(tmp_path):
    def differ(me):
        me.say(FAULT + "abcdefgh"[len(me.host.of("learner"))])
        yield 0.0
        return FAULT_FOUND

    for program in (differ, dies(1, text=FAULT + "nothing")):
        host = VirtualHost(learner=program)
        with (
            pytest.raises(RunError, match="died 4 times"),
            supervised(host, one(tmp_path), max_restarts=3) as supervisor,
        ):
            supervisor.run()


def test_the_same_fault_counts_within_ten_minutes_only(tmp_path):
    host = VirtualHost(learner=dies(FAULT_FOUND, after_s=400.0, text=FAULT + "nothing"))
    with supervised(host, one(tmp_path), max_restarts=50) as supervisor:
        run_until(supervisor, lambda: len(host.processes) == 10, within_s=10_000.0)
        assert deaths(supervisor) == {"learner": 2}
    assert math.isfinite(host.processes[-1].ended_s)
