from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.control.updates import (
    LONGEST_DETOUR,
    MOST_FAILURES,
    MOST_REFUSALS,
    Begin,
    Release,
    UpdateSchedule,
)
from asyncrl.weights.base import TRANSPORTS, UpdateOrder, UpdateReport

DEADLINE_S = 10.0


def make(transport="slot", *, one_host=True):
    return UpdateSchedule(transport=transport, deadline_s=DEADLINE_S, one_host=one_host)


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


def joined(schedule, *holders, now_s=0.0):
    return [a for h in holders for a in schedule.join(h, transports=("slot", "disk"), now_s=now_s)]


def run_one(schedule, holder, version, now_s):
    """The actions after its release, which comes first: the next update may pin another version."""
    member = schedule.members[holder]
    schedule.ordered(holder, order(version, member.next_transport), now_s)
    first, *others = schedule.reported(holder, applied(version), now_s)
    assert first == Release(holder)
    return others


def test_the_initial_model_is_ordered_too_because_it_has_not_passed_the_probe():
    schedule = make()
    assert joined(schedule, "a") == []
    assert schedule.announce(0, 0.0) == [Begin("a", "slot")]
    assert run_one(schedule, "a", 0, 0.5) == []
    assert schedule.announce(1, 1.0) == [Begin("a", "slot")]


def test_weights_of_an_unknown_learner_are_replaced_whatever_their_number():
    schedule = make()
    schedule.announce(12, 0.0)
    assert joined(schedule, "a") == [Begin("a", "slot")]


def test_a_report_on_an_earlier_learners_order_means_nothing_though_the_number_is_the_same():
    schedule = make()
    joined(schedule, "a")
    schedule.announce(3, 0.0)
    schedule.ordered("a", order(3, history="9 0 0 2 7"), 0.0)
    for report in (applied(3), replace(applied(3), lineage=7), replace(applied(2), lineage=9)):
        assert schedule.reported("a", report, 1.0) == [] and schedule.members["a"].order is not None
    schedule.reported("a", replace(applied(3), lineage=9), 1.0)
    assert schedule.members["a"].version == 3


def test_a_slow_generator_skips_versions_and_the_others_do_not_wait():
    schedule = make()
    joined(schedule, "slow", "fast")
    schedule.announce(1, 0.0)
    schedule.ordered("slow", order(1), 0.0)
    run_one(schedule, "fast", 1, 0.0)
    for version in (2, 3):
        assert schedule.announce(version, 1.0) == [Begin("fast", "slot")]
        assert run_one(schedule, "fast", version, 1.0) == []
    assert schedule.reported("slow", applied(1), 2.0) == [Release("slow"), Begin("slow", "slot")]
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
    schedule.ordered(holder, order(version), now_s)
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
            schedule.ordered(holder, order(1), 100.0 * attempt)
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
    run_one(schedule, "a", 1, 0.0)
    schedule.announce(2, 1.0)
    for attempt in range(1, 2 * MOST_FAILURES):
        refuse(schedule, "a", 2, 100.0 * attempt, failed(2))
    assert schedule.hopeless is None and schedule.failed == 2 * MOST_FAILURES - 1


def test_weights_of_which_no_generator_has_ever_taken_any_are_hopeless():
    schedule = make()
    joined(schedule, "a", "b")
    schedule.announce(1, 0.0)
    for attempt in range(MOST_FAILURES):
        assert schedule.hopeless is None
        for holder in ("a", "b"):
            refuse(schedule, holder, 1, 100.0 * attempt, failed(1))
    expected = f"every generator refused {MOST_FAILURES} updates in a row, so none can sample: test"
    assert schedule.hopeless == expected


def test_all_updates_that_came_to_nothing_are_counted_if_the_probe_refused_one_of_them():
    schedule = make()
    joined(schedule, "a")
    schedule.announce(1, 0.0)
    for attempt in range(MOST_FAILURES):
        refuse(schedule, "a", 1, 100.0 * attempt, failed(1) if attempt else refused(1))
    assert f"refused {MOST_FAILURES} updates in a row" in schedule.hopeless


def transports_of_failing_updates(schedule, attempts):
    actions, now_s, transports = schedule.announce(1, 0.0), 0.0, []
    while len(transports) < attempts:
        transports.append(actions[0].transport)
        schedule.ordered("a", order(1), now_s)
        assert schedule.reported("a", failed(1), now_s) == [Release("a")]
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
    assert schedule.announce(2, now_s + 1) == [Begin("a", "slot")]


def detours(works):
    """Versions that arrive in a row over each transport, while `works(version)` says whether the slot does."""
    schedule, now_s, found = make(), 0.0, []
    joined(schedule, "a")
    for version in range(1, 6 * LONGEST_DETOUR):
        actions = schedule.announce(version, now_s)
        while True:
            (begin,) = actions
            if begin.transport == "disk" or works(version):
                break
            schedule.ordered("a", order(version, begin.transport), now_s)
            schedule.reported("a", failed(version), now_s)
            now_s += 31.0
            actions = schedule.tick(now_s)
        run_one(schedule, "a", version, now_s)
        found.append((begin.transport, schedule.failed))
    return found


def test_a_transport_that_never_works_is_tried_ever_more_rarely():
    found = detours(lambda version: False)
    assert {transport for transport, _ in found} == {"disk"}
    new = [
        number for number, (before, after) in enumerate(pairwise([(0, 0), *found])) if after[1] > before[1]
    ]
    assert [later - earlier for earlier, later in pairwise(new)][:8] == [1, 2, 4, 8, 16, 32, 64, 64]
    assert found[-1][1] == 2 * len(new)


def test_a_transport_that_works_again_is_kept():
    found = [transport for transport, _ in detours(lambda version: version > 9)]
    again = found.index("slot")
    assert 10 <= again + 1 <= 18 and set(found[again:]) == {"slot"}


@pytest.mark.parametrize("transport", ["nccl", "tcp", "disk"])
def test_other_hosts_are_sent_by_tcp_and_never_to_files_that_are_only_here(transport):
    schedule = make(transport, one_host=False)
    schedule.join("a", transports=TRANSPORTS, now_s=0.0)
    transports, now_s = transports_of_failing_updates(schedule, 5)
    assert transports == [transport, transport, "tcp", transport, "tcp"]
    run_one(schedule, "a", 1, now_s)
    assert schedule.announce(2, now_s + 1) == [Begin("a", transport)]


@pytest.mark.parametrize(("transport", "one_host"), [("slot", True), ("nccl", False)])
def test_a_generator_is_not_sent_what_it_does_not_offer(transport, one_host):
    schedule = make(transport, one_host=one_host)
    schedule.join("a", transports=(transport,), now_s=0.0)
    assert set(transports_of_failing_updates(schedule, 4)[0]) == {transport}


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
        assert schedule.join("a", transports=offered, now_s=0.0) == [Begin("a", common)]


def test_while_the_publisher_has_no_version_every_tick_asks_again_and_it_is_no_failure():
    schedule = make()
    joined(schedule, "a")
    assert schedule.announce(1, 0.0) == [Begin("a", "slot")]
    for now_s in (0.1, 0.2, 1000.0):  # a copy has no deadline
        assert schedule.tick(now_s) == [Begin("a", "slot")]
    assert schedule.failed == 0 and schedule.members["a"].version == -1
    assert run_one(schedule, "a", 1, 1000.0) == []


def test_an_update_has_its_deadline_from_the_order_to_the_report():
    schedule = make()
    joined(schedule, "a")
    schedule.announce(1, 0.0)
    schedule.ordered("a", order(1), 100.0)
    assert schedule.tick(100.0 + DEADLINE_S) == []
    assert schedule.announce(2, 100.0 + DEADLINE_S) == []  # one update at a time
    assert schedule.tick(100.1 + DEADLINE_S) == [Release("a")]
    assert schedule.failed == 1
    assert schedule.reported("a", applied(1), 110.2) == []  # late: its slot may hold another version
    assert schedule.members["a"].version == -1 and schedule.updates == 0
    assert schedule.tick(200.0) == [Begin("a", "slot")]


def test_an_order_that_cannot_be_made_leaves_the_weights_as_they_are():
    schedule = make()
    joined(schedule, "a", "b")
    schedule.announce(1, 0.0)
    for holder in "ab":
        run_one(schedule, holder, 1, 0.0)
    schedule.announce(2, 1.0)
    assert schedule.fail("a", 1.0) == [Release("a")]
    assert schedule.members["a"].version == 1
    schedule.ordered("b", order(2), 1.0)
    assert schedule.fail("b", 1.0) == [Release("b")]  # the order may have arrived
    assert schedule.members["b"].version == -1
    assert schedule.failed == 2
    assert schedule.tick(1.0) == schedule.announce(3, 1.0) == []  # both back off
    assert schedule.tick(40.0) == [Begin("a", "slot"), Begin("b", "slot")]


def test_whoever_is_gone_reads_nothing_and_is_brought_nothing():
    schedule = make()
    joined(schedule, "idle", "reads")
    schedule.announce(1, 0.0)
    schedule.ordered("reads", order(1), 0.0)
    for holder in ("idle", "reads"):
        assert schedule.remove(holder) == [Release(holder)]
        assert schedule.remove(holder) == []
    assert schedule.reported("reads", applied(1), 1.0) == schedule.tick(1000.0) == []
    assert schedule.announce(2, 1000.0) == [] and (schedule.updates, schedule.failed) == (0, 0)


def test_updates_that_fail_are_tried_ever_more_rarely():
    schedule, starts_s = make(), []
    joined(schedule, "a")
    assert schedule.announce(1, 0.0) == [Begin("a", "slot")]
    schedule.fail("a", 0.0)
    for tenths in range(3_000):
        if schedule.tick(tenths / 10):
            starts_s.append(tenths / 10)
            assert schedule.fail("a", tenths / 10) == [Release("a")]
    pauses_s = [round(later - earlier, 3) for earlier, later in pairwise(starts_s)]
    assert pauses_s == sorted(pauses_s)
    assert 10 <= len(starts_s) <= 20
    assert pauses_s[-1] >= 30.0


def test_a_day_of_failures_is_no_failure_of_the_schedule():
    schedule = make()
    joined(schedule, "a")
    schedule.announce(1, 0.0)
    for failures in range(1, 3_000):
        assert schedule.fail("a", 31.0 * failures - 0.5) == [Release("a")]
        assert [action.holder for action in schedule.tick(31.0 * failures + 30.0)] == ["a"]


def test_late_and_foreign_reports_mean_nothing():
    schedule = make()
    joined(schedule, "a")
    assert schedule.reported("b", applied(1), 0.0) == []
    schedule.announce(5, 0.0)
    assert schedule.reported("a", applied(5), 0.0) == []  # has not been told yet
    schedule.ordered("a", order(5), 0.0)
    assert schedule.reported("a", applied(4), 0.0) == []
    assert schedule.members["a"].order is not None


HOLDERS = ("a", "b", "c")
EVENTS = ("publish", "announce", "join", "remove", "applied", "applied", "failed", "tick")
steps = st.lists(
    st.tuples(
        st.sampled_from(EVENTS),
        st.sampled_from(HOLDERS),
        st.sampled_from([0.0, 0.1, 1.0, 11.0, 61.0]),
        # Whether the publisher has something to order, and the order can be sent.
        st.sampled_from(["yes", "yes", "no version", "no order", "not sent"]),
    ),
    max_size=80,
)


class World:
    """Executes actions as the control plane does, and checks them on the way."""

    def __init__(self):
        self.schedule, self.now_s, self.published, self.announced = make(), 0.0, 0, 0
        self.luck = "yes"
        self.reading = {}  # holder -> the version that it has pinned, or None
        self.applied = {}

    def obey(self, actions, about=None):
        for action in actions:
            holder = action.holder
            assert holder in self.applied
            assert about in (None, holder), "one generator's trouble costs another one an action"
            match action:
                case Begin():
                    assert self.reading[holder] is None, "two updates at once"
                    self.order(holder)
                case Release():
                    self.reading[holder] = None

    def order(self, holder):
        match self.luck:
            case "no order":
                self.obey(self.schedule.fail(holder, self.now_s), holder)
            case "yes" | "not sent":
                self.reading[holder] = self.published
                self.schedule.ordered(holder, order(self.published), self.now_s)
                if self.luck == "not sent":
                    self.obey(self.schedule.fail(holder, self.now_s), holder)

    def step(self, event, holder, wait_s, luck):
        self.now_s += wait_s
        self.luck = luck
        version = self.reading.get(holder)
        match event:
            case "publish":
                self.published += 1
            case "announce":
                self.announced = self.published
                self.obey(self.schedule.announce(self.announced, self.now_s))
            case "join" if holder not in self.applied:
                self.applied[holder], self.reading[holder] = 0, None
                self.obey(joined(self.schedule, holder, now_s=self.now_s), holder)
            case "remove":
                self.obey(self.schedule.remove(holder), holder)
                assert self.reading.pop(holder, None) is None, "a version stays pinned"
                self.applied.pop(holder, None)
            case "applied" if version is not None:
                assert version >= self.applied[holder], "a version went backwards"
                self.applied[holder] = version
                self.obey(self.schedule.reported(holder, applied(version), self.now_s), holder)
            case "failed" if version is not None:
                self.obey(self.schedule.reported(holder, failed(version), self.now_s), holder)
            case "tick":
                self.obey(self.schedule.tick(self.now_s))
        for one, member in self.schedule.members.items():
            assert (member.order is None) == (self.reading[one] is None), "pinned without an update, or not"


@given(steps)
def test_one_update_at_a_time_versions_only_grow_and_everybody_converges(events):
    world = World()
    for event in events:
        world.step(*event)
    world.step("announce", "a", 31.0, "yes")  # from now on all goes well
    for _ in range(4):
        world.step("tick", "a", 31.0, "yes")
        for holder in list(world.applied):
            world.step("applied", holder, 0.0, "yes")
    for holder, version in world.applied.items():
        assert version == world.published
        assert world.reading[holder] is None
    assert world.schedule.tick(world.now_s + 1000) == []


def test_a_version_taken_between_its_publication_and_its_announcement_is_not_sent_twice():
    schedule = make()
    joined(schedule, "a")
    schedule.announce(1, 0.0)
    assert run_one(schedule, "a", 2, 0.0) == []
    assert schedule.announce(2, 0.0) == []
