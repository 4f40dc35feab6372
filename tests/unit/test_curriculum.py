"""The curriculum: which rows an epoch skips, that every process agrees, and that a restart changes nothing."""

import functools
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.buffer.base import BufferRules
from asyncrl.buffer.intake import Intake
from asyncrl.buffer.judge import DISCARDED_LINEAGE, make_judge
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.memory import MemoryBuffer
from asyncrl.data.curriculum import ALWAYS, MIXED, MOST_ROWS, NEVER, Curricula, Curriculum, verdict
from asyncrl.data.sample_plan import Mixture, SamplePlan, Shares, rows_of
from asyncrl.errors import DataError
from asyncrl.launch.taking import Taking
from asyncrl.lineage import History
from asyncrl.types import Group, Rollout, VersionSpan
from asyncrl.wire.group_frames import encode_group
from tests.support.intakes import GATE


def group(ticket_id: int, rewards: Sequence[float], version: int = 0, lineage: int = 0) -> Group:
    rollout = Rollout(
        prompt_ids=np.array([1], dtype=np.int32),
        response_ids=np.array([3], dtype=np.int32),
        action_mask=np.array([True]),
        behaviour_logprobs=np.array([-0.5], dtype=np.float32),
        version_spans=(VersionSpan(version, 1, lineage),),
        finish_reason="stop",
    )
    rollouts = tuple(replace(rollout, reward=reward) for reward in rewards)
    return Group(ticket_id=ticket_id, rollouts=rollouts, generator_id="g", finished_version=version)


@pytest.mark.parametrize(
    ("rewards", "solved", "expected"),
    [
        ([1.0, 1.0], 1.0, ALWAYS),
        ([1.0, 1.2], 1.0, ALWAYS),
        ([0.7 + 0.2 + 0.1, 1.0], 1.0, ALWAYS),  # a sum of weights that is rounded
        ([0.0, 0.0], 1.0, NEVER),
        ([0.3, 0.3], 1.0, NEVER),
        ([0.3, 0.5], 1.0, MIXED),  # not solved, but there is something to learn
        ([0.0, 1.0], 1.0, MIXED),
        ([0.3, 0.5], 0.3, ALWAYS),
        ([-1.0, -1.0], -1.0, ALWAYS),
    ],
)
def test_the_verdict_of_a_group(rewards, solved, expected):
    assert verdict(group(1, rewards), solved) == expected


# -- the plan


def plan_with(
    size: int, skipped: Mapping[int, Sequence[int]], floor: float, *, shuffle: bool = True
) -> SamplePlan:
    plan = SamplePlan(size, seed=3, shuffle=shuffle, floor=floor)
    plan.skip({epoch: np.isin(np.arange(size), rows) for epoch, rows in skipped.items()})
    return plan


def rows_in(plan: SamplePlan, epoch: int) -> list[int]:
    return [plan.row(epoch * plan.size + position + 1) for position in range(plan.size)]


@given(st.data(), st.integers(2, 60), st.integers(1, 500_000), st.booleans(), st.integers(0, 3))
def test_an_epoch_spends_the_floor_on_skipped_rows_and_the_rest_evenly_on_the_others(
    data, size, millionths, shuffle, epoch
):
    skipped = data.draw(st.sets(st.integers(0, size - 1), min_size=1))
    plan = plan_with(size, {epoch: sorted(skipped)}, millionths / 1e6, shuffle=shuffle)
    counts = Counter(rows_in(plan, epoch))
    kept = set(range(size)) - skipped
    retries = sum(counts[row] for row in skipped)
    first = epoch * size
    share = (first + size) * millionths // 10**6 - first * millionths // 10**6
    assert retries == (share if kept else size)
    if kept:
        assert max(counts[row] for row in kept) - min(counts[row] for row in kept) <= 1
    assert max(counts[row] for row in skipped) - min(counts[row] for row in skipped) <= 1 + bool(kept)


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_skipped_row_has_its_turn_before_any_has_its_second(shuffle):
    """7 of 20 rows are skipped in every epoch; 1 of 10 tickets tries one: 14 tickets of a retry in 7 epochs."""
    skipped = range(3, 10)
    plan = plan_with(20, {epoch: [*skipped] for epoch in range(70)}, 0.1, shuffle=shuffle)
    retried = [row for epoch in range(70) for row in rows_in(plan, epoch) if row in skipped]
    assert len(retried) == 140
    assert all(sorted(retried[lap : lap + 7]) == [*skipped] for lap in range(0, 140, 7))


def test_other_epochs_are_what_they_are_without_a_curriculum():
    plan, plain = plan_with(30, {2: [1, 2, 3]}, 0.1), SamplePlan(30, seed=3, shuffle=True)
    assert [rows_in(plan, epoch) for epoch in (0, 1, 3)] == [rows_in(plain, epoch) for epoch in (0, 1, 3)]
    assert rows_in(plan, 2) != rows_in(plain, 2)
    plan.skip({})
    assert rows_in(plan, 2) == rows_in(plain, 2)


# -- learner and generators together, over the real buffer and intake

SIZE, GROUPS, LAG, WINDOW, REFILLS, FLOOR = 24, 4, 1, 8, 1, 0.2
REACH = (LAG + 1 + REFILLS + LAG + 1) * GROUPS


def outcome(row: int, epoch: int) -> list[float]:
    """Of three rows, one is always solved, one never, and one sometimes; what is never solved changes later."""
    if row % 3 == 0:
        return [1.0, 1.0]
    return [0.0, 0.0] if row % 3 == 1 and epoch < 9 else [0.0, 1.0]


def new_plan(size: int = SIZE) -> SamplePlan:
    return SamplePlan(size, seed=1, shuffle=True, floor=FLOOR)


ONE, TWO = (SIZE,), (SIZE, 15)
SHARES = {ONE: [Fraction(1)], TWO: [Fraction(7, 10), Fraction(3, 10)]}


def new_mixture(sizes: tuple[int, ...]) -> Mixture:
    return Mixture(Shares(SHARES[sizes]), [new_plan(size) for size in sizes])


@dataclass
class World:
    """One learner, which can be killed, and generators that are as far behind as the rules allow."""

    seed: int
    sizes: tuple[int, ...] = ONE  # rows of each source
    loses: bool = False  # whether a learner that is killed loses its weights, or makes the same again
    saved: dict[str, Any] = field(
        default_factory=lambda: {"version": 0, "history": "0", "ledger": Ledger().to_dict(), "curriculum": {}}
    )
    trained: dict[int, int] = field(default_factory=dict)  # ticket -> row that its generator sampled
    lineage: int = -1
    lost: int = 0  # groups

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.buffer = MemoryBuffer(BufferRules(groups=GROUPS))
        self.sampled: dict[int, int] = {}
        self.resume()

    def resume(self) -> None:
        saved = json.loads(json.dumps(self.saved))
        self.version, self.history = saved["version"], History.parse(saved["history"])
        self.lineage += 1
        if self.loses and self.lineage:
            self.history = self.history.resumed(self.version, lineage=self.lineage, longest_lag=LAG + WINDOW)
        judge = make_judge(
            (),
            drop_older_than=None,
            history=self.history,
            fault=lambda one: "zero_variance" if one.ticket_id % 11 == 0 else None,
        )
        intake = Intake(
            buffer=self.buffer.peer(),
            ledger=Ledger.from_dict(saved["ledger"]),
            gate=GATE,
            judge=judge,
            groups=GROUPS,
            window=WINDOW,
            max_lag=LAG,
            max_refills=REFILLS,
            stall_s=60.0,
            history=self.history,
        )
        self.curriculum = Curricula(
            new_mixture(self.sizes), solved=1.0, reach=REACH, window=WINDOW, state=saved["curriculum"]
        )
        lane: Any = self.buffer
        deaths = mock.Mock()
        self.taking = Taking(lane, intake, [], deaths=deaths, stall_s=60.0, curriculum=self.curriculum)
        self.orders: dict[int, Mapping[str, bytes]] = {}
        self.publish()

    def publish(self) -> None:
        self.orders[self.version] = self.taking.skipped()
        self.taking.open(self.version)

    def sample(self) -> None:
        """Sample some tickets, in any order, each with any order that is new enough."""
        tickets = list(self.buffer.lease("g", 100).tickets)
        self.draw.shuffle(tickets)
        for ticket in tickets:
            usable = [version for version in self.orders if version >= ticket.minimum_version]
            if not usable or self.draw.random() < 0.3:
                self.buffer.give_back("g", [ticket.id])
                continue
            mixture = new_mixture(self.sizes)
            mixture.skip(self.orders[self.draw.choice(usable)])
            row, (source, number) = mixture.row(ticket.id), mixture.turn(ticket.id)
            epoch = (number - 1) // mixture.plans[source].size
            assert row == self.curriculum.mixture.row(ticket.id), "the learner takes it for another row"
            assert self.sampled.setdefault(ticket.id, row) == row, "the row of a ticket has changed"
            made = group(ticket.id, outcome(row, epoch), *self.history.weights(self.version))
            self.buffer.put("g", ticket.id, encode_group(made))

    def step(self, *, save: bool, kills: bool) -> None:
        with mock.patch.object(self.curriculum, "record", wraps=self.curriculum.record) as record:
            while (collected := self.taking.poll(self.version, wait_s=0)) is None:
                self.sample()
                if kills and self.draw.random() < 0.1:
                    self.resume()
                    return
        for one in record.call_args.args[0]:
            assert self.sampled[one.ticket_id] == self.curriculum.mixture.row(one.ticket_id), "of another row"
        self.lost += sum(reason == DISCARDED_LINEAGE for _, reason in collected.rejected)
        groups = [*collected.groups, *(one for one, _ in collected.rejected)]
        self.trained |= {one.ticket_id: self.sampled[one.ticket_id] for one in groups}
        self.version += 1
        self.publish()
        if save:
            ledger, _, curriculum = self.taking.settled
            state = {"history": str(self.history), "ledger": ledger, "curriculum": curriculum}
            self.saved = json.loads(json.dumps({"version": self.version, **state}))
            self.taking.intake.commit(self.saved["ledger"], self.version)


def run(seed: int, *, sizes: tuple[int, ...] = ONE, steps: int = 60, kills: bool = False) -> World:
    world = World(seed, sizes)
    while world.version < steps:
        world.step(save=world.version % 5 == 4, kills=kills)
        if kills and world.draw.random() < 0.1:
            world.resume()
    return world


@functools.cache
def run_undisturbed(sizes: tuple[int, ...]) -> World:
    return run(0, sizes=sizes)


def rows_of_world(world: World) -> list[int]:
    return [row for _, row in sorted(world.trained.items())]


@pytest.mark.parametrize(("seed", "sizes"), [*((seed, ONE) for seed in range(1, 6)), (1, TWO), (2, TWO)])
def test_the_same_rows_come_in_the_same_order_whatever_is_killed_and_whoever_is_fast(seed, sizes):
    """Every ticket means one row for all generators, the learner, and the learners that follow it."""
    undisturbed, killed = run_undisturbed(sizes), run(seed, sizes=sizes, kills=True)
    audit, ledger = killed.buffer.audit(), Ledger.from_dict(killed.taking.intake.settled)
    if sizes == TWO:
        skipped = killed.taking.skipped()
        assert {key[0] for key in skipped} == {"0", "1"}, "each source has its curriculum"
    both = sorted(undisturbed.trained.keys() & killed.trained.keys())
    assert len(both) >= 60 * GROUPS - WINDOW
    assert [undisturbed.trained[one] for one in both] == [killed.trained[one] for one in both]
    assert audit.missing == 0 and ledger.consumed == audit.done + audit.taken
    assert sorted(killed.trained)[: ledger.watermark] == [*range(1, ledger.watermark + 1)]


@pytest.mark.parametrize(("seed", "sizes"), [(1, ONE), (2, ONE), (3, TWO)])
def test_learner_and_generators_agree_however_many_groups_a_learner_lost(seed, sizes):
    """Many are rejected in one step, which then issues tickets of epochs that are not decided yet."""
    world = World(seed, sizes, loses=True)
    for _ in range(8):
        for step in range(30):
            world.step(save=step == 5, kills=False)
        world.resume()
    assert world.lost > 8 * 15 * GROUPS
    assert any(world.orders[world.version].values()), "something is skipped"


def test_what_is_always_or_never_solved_is_sampled_at_the_floor_only():
    world = run(0, steps=150)
    rows = rows_of_world(world)
    early, late = rows[3 * SIZE : 9 * SIZE], rows[17 * SIZE :]
    assert world.curriculum.metrics() == {"curriculum/always": 8, "curriculum/never": 0}
    for part, kinds in ((early, {0, 1}), (late, {0})):
        share = sum(row % 3 in kinds for row in part) / len(part)
        assert share == pytest.approx(FLOOR, abs=0.02)
    # What was never solved was tried again, until it was solved, and is trained like the others since.
    counts = Counter(row % 3 for row in late)
    assert counts[1] == pytest.approx(counts[2], rel=0.05)


def test_nothing_is_skipped_before_there_are_results():
    curriculum = Curriculum(new_plan(), solved=1.0, reach=REACH, window=WINDOW, state={})
    assert curriculum.decide(consumed=0, unfinished=1, issued=4) == {}
    assert curriculum.metrics() == {"curriculum/always": 0, "curriculum/never": 0}


def test_the_newest_ticket_of_a_row_decides_in_whatever_order_groups_arrive():
    plan = SamplePlan(2, seed=0, shuffle=False)
    curriculum = Curriculum(plan, solved=1.0, reach=2, window=0, state={})
    for ticket, rewards in ((3, [0.0, 1.0]), (1, [1.0, 1.0]), (2, [0.0, 1.0]), (4, [0.0, 0.0])):
        curriculum.record(ticket, group(ticket, rewards))
    assert [*rows_of(curriculum.decide(consumed=5, unfinished=6, issued=6)["3"], 2)] == [False, True]
    assert curriculum.metrics() == {"curriculum/always": 0, "curriculum/never": 1}


def test_a_dead_group_is_no_result():
    curriculum = Curriculum(new_plan(), solved=1.0, reach=REACH, window=WINDOW, state={})
    curriculum.record(1, Group.dead(1, "reward failed", generator_id="g", version=0))
    assert curriculum.state()["results"] == []


def test_a_dataset_for_which_orders_have_no_room_is_refused():
    plan = SamplePlan(MOST_ROWS + 1, seed=0, shuffle=True)
    with pytest.raises(DataError, match=r"has 524289 rows.*at most 524288.*drop data.curriculum"):
        Curriculum(plan, solved=1.0, reach=1, window=1, state={})
