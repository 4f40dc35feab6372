from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.control.updates import (
    MOST_REFUSALS,
    CloseSender,
    Deliver,
    GiveUp,
    Phase,
    Prepare,
    UpdateSchedule,
)
from asyncrl.weights.base import UpdateOrder, UpdateReport, receivable

DEADLINE_S, PREPARATION_S = 10.0, 60.0


def make(transport="slot", *, one_host=True):
    return UpdateSchedule(
        transport=transport, deadline_s=DEADLINE_S, preparation_s=PREPARATION_S, one_host=one_host
    )


def order(version, transport="slot", history="0"):
    return UpdateOrder(
        version=version,
        transport=transport,
        deadline_s=DEADLINE_S,
        details={},
        probe_ids=(),
        probe_logprobs=(),
        initial_logprobs=(),
        history=history,
    )


def applied(version):
    return UpdateReport(
        version=version,
        applied=True,
        probe_max=0.25,
        probe_limit=0.5,
        transfer_gb_per_s=3.5,
        paused_s=0.125,
    )


def failed(version):
    return UpdateReport(version=version, applied=False, reason="test")


def joined(schedule, *holders, version=0, now_s=0.0):
    return [
        a
        for h in holders
        for a in schedule.join(h, version=version, transports=("slot", "disk"), now_s=now_s)
    ]


def run_one(schedule, holder, version, now_s):
    (deliver,) = schedule.prepared(holder, order(version), now_s)
    assert isinstance(deliver, Deliver)
    schedule.sent(holder, now_s)
    return schedule.reported(holder, applied(version), now_s)


def test_the_initial_model_needs_no_update_to_version_zero():
    schedule = make()
    assert schedule.announce(0, 0.0) == []
    assert joined(schedule, "a") == []
    assert schedule.announce(1, 1.0) == [Prepare("a", "slot")]


def test_weights_of_an_unknown_learner_are_replaced_whatever_their_number():
    schedule = make()
    schedule.announce(12, 0.0)
    assert joined(schedule, "a", version=12) == [Prepare("a", "slot")]


def test_a_report_on_an_earlier_learners_order_means_nothing_though_the_number_is_the_same():
    schedule = make()
    joined(schedule, "a")
    schedule.announce(3, 0.0)
    schedule.prepared("a", order(3, history="9 0 0 2 7"), 0.0)
    for report in (applied(3), replace(applied(3), lineage=7), replace(applied(2), lineage=9)):
        assert schedule.reported("a", report, 1.0) == [] and schedule.members["a"].phase is Phase.UPDATING
    schedule.reported("a", replace(applied(3), lineage=9), 1.0)
    assert schedule.members["a"].version == 3


def test_a_slow_generator_skips_versions_and_the_others_do_not_wait():
    schedule = make()
    joined(schedule, "slow", "fast")
    schedule.announce(1, 0.0)
    schedule.prepared("slow", order(1), 0.0)
    run_one(schedule, "fast", 1, 0.0)
    for version in (2, 3):
        assert schedule.announce(version, 1.0) == [Prepare("fast", "slot")]
        assert run_one(schedule, "fast", version, 1.0) == []
    assert schedule.reported("slow", applied(1), 2.0) == [Prepare("slow", "slot")]
    run_one(schedule, "slow", 3, 2.0)
    assert schedule.members["slow"].version == 3
    assert (schedule.updates, schedule.failed, schedule.measured["probe_max"]) == (5, 0, 0.25)
    assert (schedule.measured["transfer_gb_per_s"], schedule.measured["paused_s"]) == (3.5, 0.125)


def refused(version: int, difference: float = 0.12) -> UpdateReport:
    return UpdateReport(
        version=version,
        applied=False,
        reason=f"the probe differs by {difference}",
        probe_max=difference,
        probe_limit=0.05,
    )


def refuse(schedule: UpdateSchedule, holder: str, version: int, now_s: float, report: UpdateReport) -> None:
    schedule.tick(now_s)
    schedule.prepared(holder, order(version), now_s)
    schedule.reported(holder, report, now_s)


def test_what_every_generator_refuses_again_and_again_is_hopeless():
    schedule = make()
    joined(schedule, "a", "b")
    assert schedule.measured == {}, "no update was seen yet"
    schedule.announce(1, 0.0)
    for attempt in range(MOST_REFUSALS):
        assert schedule.hopeless is None
        schedule.tick(100.0 * attempt)
        for holder in ("a", "b"):
            schedule.prepared(holder, order(1), 100.0 * attempt)
        schedule.reported("a", refused(1), 100.0 * attempt)
        assert schedule.hopeless is None, "the other one may take it"
        schedule.reported("b", refused(1), 100.0 * attempt)
    assert schedule.hopeless is not None and schedule.hopeless.endswith("the probe differs by 0.12")
    assert schedule.measured["probe_max"] == 0.12 and "paused_s" not in schedule.measured
    refuse(schedule, "b", 1, 5000.0, applied(1))
    assert schedule.hopeless is None and (schedule.updates, schedule.measured["probe_max"]) == (1, 0.25)
    schedule.remove("a")
    schedule.remove("b")
    assert schedule.hopeless is None, "there is nobody"


def test_what_did_not_arrive_is_no_refusal():
    schedule = make()
    joined(schedule, "a")
    schedule.announce(1, 0.0)
    for attempt in range(5 * MOST_REFUSALS):
        refuse(schedule, "a", 1, 100.0 * attempt, failed(1))
    assert schedule.hopeless is None and schedule.failed == 5 * MOST_REFUSALS


def transports_of_failing_updates(schedule, attempts):
    actions, now_s, transports = schedule.announce(1, 0.0), 0.0, []
    while len(transports) < attempts:
        transports.append(actions[0].transport)
        schedule.prepared("a", order(1), now_s)
        assert schedule.reported("a", failed(1), now_s) == [GiveUp("a")]
        assert schedule.tick(now_s) == []  # backs off
        now_s += 31.0
        actions = schedule.tick(now_s)
    return transports, now_s


def test_after_two_failures_every_other_attempt_goes_by_disk_and_a_success_leads_back():
    schedule = make()
    joined(schedule, "a")
    transports, now_s = transports_of_failing_updates(schedule, 6)
    assert transports == ["slot", "slot", "disk", "slot", "disk", "slot"]
    run_one(schedule, "a", 1, now_s)
    assert schedule.announce(2, now_s + 1) == [Prepare("a", "slot")]


@pytest.mark.parametrize("transport", ["nccl", "tcp", "disk"])
def test_other_hosts_are_never_sent_to_files_that_are_only_here(transport):
    schedule = make(transport, one_host=False)
    schedule.join("a", version=0, transports=receivable(transport), now_s=0.0)
    assert transports_of_failing_updates(schedule, 5)[0] == [transport] * 5


def test_a_generator_that_cannot_read_files_is_not_sent_to_them():
    schedule = make("slot")
    schedule.join("a", version=0, transports=("slot",), now_s=0.0)
    assert set(transports_of_failing_updates(schedule, 4)[0]) == {"slot"}


@pytest.mark.parametrize(
    ("wanted", "offered", "one_host", "common"),
    [
        ("nccl", ("nccl", "tcp", "disk"), True, "nccl"),
        ("nccl", ("slot", "tcp", "disk"), True, "slot"),
        ("nccl", ("slot", "tcp", "disk"), False, "tcp"),
        ("nccl", ("disk",), True, "disk"),
        ("nccl", ("disk",), False, None),
        ("disk", ("tcp", "disk"), False, "disk"),
        ("slot", (), True, None),
    ],
)
def test_the_common_transport_is_the_best_that_both_have(wanted, offered, one_host, common):
    schedule = make(wanted, one_host=one_host)
    assert schedule.common_transport(offered) == common
    if common is not None:
        schedule.announce(1, 0.0)
        assert schedule.join("a", version=0, transports=offered, now_s=0.0) == [Prepare("a", common)]


def test_a_prepare_that_found_no_version_is_repeated_with_the_next_tick():
    schedule = make()
    joined(schedule, "a")
    assert schedule.announce(1, 0.0) == [Prepare("a", "slot")]
    schedule.postpone("a")
    assert schedule.tick(0.1) == [Prepare("a", "slot")]


def test_every_phase_has_its_deadline():
    schedule = make()
    joined(schedule, "a")
    schedule.announce(1, 0.0)
    assert schedule.tick(PREPARATION_S) == []
    assert schedule.tick(PREPARATION_S + 0.1) == [GiveUp("a")]
    assert schedule.tick(100.0) == [Prepare("a", "slot")]
    schedule.prepared("a", order(1), 100.0)
    schedule.sent("a", 109.0)
    assert schedule.tick(118.0) == []  # it has left, the generator applies it
    assert schedule.tick(119.1) == [GiveUp("a")]
    assert schedule.members["a"].version == -1
    assert schedule.failed == 2


def test_a_failure_without_an_update_under_way_costs_nothing():
    schedule = make()
    joined(schedule, "a")
    assert schedule.fail("a", 0.0) == schedule.fail("nobody", 0.0) == []
    assert schedule.announce(1, 0.0) == [Prepare("a", "slot")]
    assert schedule.failed == 0


def test_updates_that_fail_are_tried_ever_more_rarely():
    schedule, starts_s = make(), []
    joined(schedule, "a")
    assert schedule.announce(1, 0.0) == [Prepare("a", "slot")]
    schedule.fail("a", 0.0)
    for tenths in range(3_000):
        if schedule.tick(tenths / 10):
            starts_s.append(tenths / 10)
            assert schedule.fail("a", tenths / 10) == [GiveUp("a")]
    pauses_s = [round(later - earlier, 3) for earlier, later in pairwise(starts_s)]
    assert pauses_s == sorted(pauses_s)
    assert 10 <= len(starts_s) <= 20
    assert pauses_s[-1] >= 30.0


def test_a_day_of_failures_is_no_failure_of_the_schedule():
    schedule = make()
    joined(schedule, "a")
    schedule.announce(1, 0.0)
    for failures in range(1, 3_000):
        assert schedule.fail("a", 31.0 * failures - 0.5) == [GiveUp("a")]
        assert [action.holder for action in schedule.tick(31.0 * failures + 30.0)] == ["a"]


def test_late_and_foreign_reports_mean_nothing():
    schedule = make()
    joined(schedule, "a")
    assert schedule.reported("b", applied(1), 0.0) == []
    schedule.announce(5, 0.0)
    assert schedule.reported("a", applied(5), 0.0) == []  # has not been told yet
    schedule.prepared("a", order(5), 0.0)
    assert schedule.reported("a", applied(4), 0.0) == []
    assert schedule.members["a"].phase is Phase.UPDATING


HOLDERS = ("a", "b", "c")
steps = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "announce",
                "join",
                "remove",
                "prepared",
                "prepared",
                "sent",
                "applied",
                "applied",
                "failed",
                "died",
                "tick",
            ]
        ),
        st.sampled_from(HOLDERS),
        st.sampled_from([0.0, 0.1, 1.0, 11.0, 61.0]),
    ),
    max_size=80,
)


class World:
    """Executes actions as the control plane does, and checks them on the way."""

    def __init__(self):
        self.schedule, self.now_s, self.newest = make(), 0.0, 0
        self.senders = {}  # holder -> None | ("preparing", version) | ("transferring", version)
        self.applied = {}

    def obey(self, actions, about=None):
        for action in actions:
            assert action.holder in self.senders
            if about is not None:
                assert action.holder == about, "one generator's trouble costs another one an action"
            match action:
                case Prepare(holder):
                    assert self.senders[holder] is None, "two updates at once"
                    self.senders[holder] = ("preparing", self.newest)
                case Deliver(holder, sent):
                    assert self.senders[holder] == ("preparing", sent.version)
                    self.senders[holder] = ("transferring", sent.version)
                case GiveUp(holder):
                    self.senders[holder] = None
                case CloseSender(holder):
                    del self.senders[holder]

    def step(self, event, holder, wait_s):
        self.now_s += wait_s
        busy = self.senders.get(holder)
        match event:
            case "announce":
                self.newest += 1
                self.obey(self.schedule.announce(self.newest, self.now_s))
            case "join" if holder not in self.senders:
                self.senders[holder] = None
                self.applied[holder] = 0
                self.obey(joined(self.schedule, holder, now_s=self.now_s), holder)
            case "remove":
                self.obey(self.schedule.remove(holder), holder)
                assert holder not in self.senders
            case "prepared" if busy and busy[0] == "preparing":
                self.obey(self.schedule.prepared(holder, order(busy[1]), self.now_s), holder)
            case "sent" if busy and busy[0] == "transferring":
                self.schedule.sent(holder, self.now_s)
            case "applied" if busy and busy[0] == "transferring":
                assert busy[1] >= self.applied[holder], "a version went backwards"
                self.applied[holder] = busy[1]
                self.senders[holder] = None
                self.obey(self.schedule.reported(holder, applied(busy[1]), self.now_s), holder)
            case "failed" if busy and busy[0] == "transferring":
                self.obey(self.schedule.reported(holder, failed(busy[1]), self.now_s), holder)
            case "died":
                self.obey(self.schedule.fail(holder, self.now_s), holder)
            case "tick":
                self.obey(self.schedule.tick(self.now_s))


@settings(max_examples=300)
@given(steps)
def test_one_update_at_a_time_versions_only_grow_and_everybody_converges(events):
    world = World()
    for event in events:
        world.step(*event)
    for _ in range(4):  # from now on all goes well
        world.step("tick", "a", 31.0)
        for holder in list(world.senders):
            for event in ("prepared", "sent", "applied"):
                world.step(event, holder, 0.0)
    for holder in world.senders:
        assert world.applied[holder] == world.newest
        assert world.schedule.members[holder].phase is Phase.IDLE
    assert world.schedule.tick(world.now_s + 1000) == []


def test_a_version_taken_between_its_publication_and_its_announcement_is_not_sent_twice():
    schedule = make()
    joined(schedule, "a")
    schedule.announce(1, 0.0)
    assert run_one(schedule, "a", 2, 0.0) == []
    assert schedule.announce(2, 0.0) == []
