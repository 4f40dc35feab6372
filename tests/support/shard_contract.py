"""What lanes in shards must do together. A subclass provides the fixture `make_lanes`; see `MakeLanes`."""

import random
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import pytest

from asyncrl.algo.filters import GroupOutcome
from asyncrl.algo.staleness import lag_bound
from asyncrl.algo.trainable import GroupLimits
from asyncrl.buffer.base import BufferRules, PutOutcome
from asyncrl.buffer.intake import Intake
from asyncrl.buffer.judge import Gate, make_judge
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.shards import ShardedBuffer, ShardedIntake, join, ledgers_of, split
from asyncrl.lineage import INITIAL, History, Weights
from asyncrl.types import Group, Rollout, VersionSpan
from tests.support.buffer_contract import RULES, Lane, ids, places

SHARDS = (1, 4)


class MakeLanes(Protocol):
    """The empty shards of a new lane."""

    def __call__(self, shards: int, rules: BufferRules) -> list[Lane]: ...


class ShardContract:
    @pytest.fixture(params=SHARDS)
    def buffer(self, request, make_lanes: MakeLanes):
        shards = [lane.handle() for lane in make_lanes(request.param, RULES)]
        for shard in shards:
            shard.recover(Ledger(), version=0, limit=8 // request.param)
        return ShardedBuffer(shards)

    def test_all_ids_under_the_credit_are_leased_once_and_stored_where_they_belong(self, buffer):
        leased = sorted(ids(buffer.lease("a", 3)) + ids(buffer.lease("b", 99)))
        assert leased == list(range(1, 9)) and ids(buffer.lease("a", 9)) == []
        for ticket_id in leased:
            assert buffer.put("x", ticket_id, b"%d" % ticket_id) is PutOutcome.STORED
            assert buffer.put("x", ticket_id, b"again") is PutOutcome.DUPLICATE
        assert buffer.put("x", 9, b"never issued") is PutOutcome.UNKNOWN
        for shard in buffer.shards:
            shard.take(Ledger(), 8 // len(buffer.shards), window=1)
        for ticket_id in leased:
            shard, local_id = split(ticket_id, len(buffer.shards))
            assert buffer.shards[shard].frames([local_id]) == [b"%d" % ticket_id]
        assert places(buffer) == {"issued": 8, "leased": 0, "reissue": 0, "ready": 0, "taken": 8, "done": 0}
        assert (buffer.audit().payload_bytes, buffer.audit().counters["put"]) == (8, 8)

    def test_what_a_holder_asks_reaches_its_tickets_alone(self, buffer):
        mine = ids(buffer.lease("a", 5))
        rest = ids(buffer.lease("b", 9))
        buffer.renew("b", [*mine, *rest])
        buffer.give_back("a", [mine[0], rest[0]])
        assert not buffer.fail("a", mine[1], "why", b"tombstone")
        assert buffer.revoke("b") == 3
        assert places(buffer)["leased"] == 3
        again = sorted(ids(buffer.lease("c", 9)))
        assert again == sorted([*mine[:2], *rest])
        assert buffer.fail("c", mine[1], "why", b"tombstone"), "the second of two attempts"

    def test_the_shards_take_turns(self, buffer):
        shards = len(buffer.shards)
        firsts = [split(ids(buffer.lease("a", 1))[0], shards)[0] for _ in range(8)]
        assert firsts == list(range(shards)) * (8 // shards)

    def test_a_ticket_carries_the_history_that_its_shard_was_told(self, buffer):
        told = History(7)
        buffer.shards[0].recover(Ledger(), version=0, limit=8 // len(buffer.shards), history=told)
        for ticket in buffer.lease("a", 8).tickets:
            assert (ticket.history == told) == (split(ticket.id, len(buffer.shards))[0] == 0), (
                "a learner tells one after the other"
            )

    def test_the_end_of_the_run_reaches_everybody(self, buffer):
        assert not buffer.lease("a", 1).closed
        buffer.close()
        assert buffer.lease("a", 1).closed

    @pytest.mark.parametrize("shards", SHARDS)
    def test_a_group_that_is_kept_for_a_full_shard_holds_up_none_of_the_others(
        self, make_lanes: MakeLanes, shards
    ):
        """The only generator leases nothing while it keeps one, and a step needs a group of every shard."""
        run = Run(make_lanes(shards, BufferRules(groups=1, max_bytes=1)), max_lag=1, groups=1, window=1)
        kept: set[int] = set()
        for version in range(4):
            for _ in range(4 * shards):
                kept = kept or set(ids(run.buffer.lease("g", 2)))
                kept = {
                    i
                    for i in kept
                    if run.buffer.put("g", i, frame(i, *run.history.weights(version))) is PutOutcome.FULL
                }
                if (collected := run.intake.poll(version, wait_s=0.0)) is not None:
                    break
            assert collected is not None, "a deadlock"
            run.intake.open(version + 1)
            run.intake.commit(run.intake.settled, version + 1)
        assert run.buffer.audit().counters["full"] > 0

    def test_a_part_that_is_there_already_is_not_settled_before_the_step_is_whole(
        self, make_lanes: MakeLanes
    ):
        run = Run(make_lanes(4, BufferRules(groups=2)), max_lag=1, groups=2, window=1)
        for ticket in run.buffer.lease("g", 8).tickets:
            if split(ticket.id, 4)[0] != 2:
                run.buffer.put("g", ticket.id, frame(ticket.id, 0))
        assert run.intake.poll(0, wait_s=0.0) is None
        assert sum(one.ledger.consumed for one in run.intake.intakes) > 0
        assert ledgers_of(run.intake.settled, 4) == ledgers_of({}, 4), (
            "it would be taken again after a restart"
        )

    def test_a_shard_that_has_given_its_part_opens_no_credit_of_the_next_step(self, make_lanes: MakeLanes):
        run = Run(make_lanes(4, BufferRules(groups=2)), max_lag=1, groups=2, window=1)
        for ticket in run.buffer.lease("g", 99).tickets:
            if split(ticket.id, 4)[0] != 2:
                run.buffer.put("g", ticket.id, frame(ticket.id, 0))
        assert run.intake.poll(0, wait_s=0.0) is None
        assert ids(run.buffer.lease("g", 99)) == [], "(L + 1) B are under way, and no step is over"

    @pytest.mark.parametrize("shards", SHARDS)
    # Lanes in memory go through all of them in the fast tier, too: tests/unit is run whole.
    @pytest.mark.parametrize("before, after", [(4, 2), (2, 4), (8, 1), (1, 8)])
    def test_a_run_goes_on_with_another_batch(self, make_lanes: MakeLanes, shards, before, after):
        lanes, chance = make_lanes(shards, BufferRules(groups=before)), random.Random(before)
        run = Run(lanes, max_lag=3, groups=before, window=before)
        run.check(12, chance)
        run.resume(max_lag=3, groups=after, window=after)
        run.check(24, chance)
        for max_lag, window in [(0, after), (5, 3 * after), (1, 1)]:
            run.resume(max_lag=max_lag, groups=after, window=window)
            run.check(run.version + 6, chance)


def frame(ticket_id: int, version: int, lineage: int = 0, learner: int = 0) -> bytes:
    """One token by these weights; `learner` is the one that the ticket was leased from."""
    return b"%d %d %d %d" % (ticket_id, version, lineage, learner)


def decode(stored: bytes) -> Group:
    ticket_id, version, lineage, learner = map(int, stored.split())
    rollout = Rollout(
        prompt_ids=_ONE, response_ids=_ONE, action_mask=np.ones(1, np.bool_), behaviour_logprobs=np.zeros(1, np.float32),
        version_spans=(VersionSpan(version, 1, lineage),), finish_reason="stop", reward=ticket_id % 7,
    )  # fmt: skip
    return Group(
        ticket_id=ticket_id, rollouts=(rollout,), generator_id=str(learner), finished_version=version
    )


_ONE = np.ones(1, np.int32)
GATE = Gate(lane="train", decode=decode, limits=GroupLimits(vocabulary=2, rollouts=1, max_tokens=2))


def unlucky(outcome: GroupOutcome) -> str | None:
    return "unlucky" if outcome.rewards[0] == 3 else None


class Run:
    """A learner and its generators. Every seventh group is rejected, every fifth takes its time."""

    def __init__(self, lanes: list[Lane], *, max_lag: int, groups: int, window: int) -> None:
        """`groups` and `window` are those of one shard."""
        self.lanes, self.max_lag, self.groups, self.window = lanes, max_lag, groups, window
        self.version = 0
        self.learners = 0
        """That have started."""
        self.makers = [0]
        """Lineage of the learner that made each version of the weights."""
        self.saved: list[tuple[int, History, dict[str, Any]]] = [(0, INITIAL, {})]
        """The last two checkpoints."""
        self.trained: list[list[int]] = []
        self.held: dict[int, bytes] = {}
        """Groups that are being sampled, by ticket id."""
        self.start_learner()

    def resume(self, *, max_lag: int, groups: int, window: int) -> None:
        """With other settings."""
        self.max_lag, self.groups, self.window = max_lag, groups, window
        for lane in self.lanes:
            stored: Any = lane
            stored.rules = replace(stored.rules, groups=groups)
        self.start_learner()

    def start_learner(self) -> None:
        """From the newest checkpoint."""
        shards = len(self.lanes)
        self.learners += 1
        self.version, history, values = self.saved[-1]
        self.history = history.resumed(self.version, lineage=self.learners, longest_lag=self.bound)
        self.makers, self.trained = self.makers[: self.version + 1], self.trained[: self.version]
        self.judged = make_judge([unlucky], drop_older_than=self.bound, history=self.history)
        self.buffer = ShardedBuffer([lane.handle() for lane in self.lanes])
        ledgers = ledgers_of(values, shards)
        self.intake = ShardedIntake(
            tuple(
                Intake(
                    buffer=one, ledger=ledger, gate=replace(GATE, name_of=partial(join, shard, shards=shards)),
                    judge=self.judge, groups=self.groups, window=self.window,
                    max_lag=self.max_lag, max_refills=99, stall_s=600.0,
                    history=self.history,
                )
                for shard, (one, ledger) in enumerate(zip(self.buffer.shards, ledgers, strict=True))
            )
        )  # fmt: skip
        self.intake.recover(self.version)
        self.under_way = [one.buffer.audit().issued - one.ledger.consumed for one in self.intake.intakes]

    def judge(self, group: Group, version: int) -> str | None:
        """A ticket of this learner is in time. One of before may not be: it had other settings, or was lent
        credit by rejections in steps that are lost."""
        reason = self.judged(group, version)
        assert reason != "stale" or group.generator_id != str(self.learners), (
            "a ticket that this learner issued is too old"
        )
        return reason

    def generate(self, chance: random.Random) -> None:
        for ticket in self.buffer.lease("g", chance.randint(1, 5)).tickets:
            assert ticket.minimum_version <= self.version and ticket.history == self.history
            known = [
                Weights(version, self.makers[version]) for version in (ticket.minimum_version, self.version)
            ]
            weights = chance.choice([one for one in known if one in ticket.history])
            self.held.setdefault(ticket.id, frame(ticket.id, *weights, self.learners))
        for intake, before in zip(self.intake.intakes, self.under_way, strict=True):
            under_way = intake.buffer.audit().issued - intake.ledger.consumed
            assert under_way <= max(before, (self.max_lag + 1) * self.groups)
        for ticket_id in chance.sample(sorted(self.held), min(len(self.held), chance.randint(0, 4))):
            if ticket_id % 5 or chance.random() < 0.3:
                self.buffer.put("g", ticket_id, self.held.pop(ticket_id))

    def learn(self, chance: random.Random) -> None:
        collected = self.intake.poll(self.version, wait_s=0.0)
        if collected is None:
            return
        names = [
            group.ticket_id for group in (*collected.groups, *(group for group, _ in collected.rejected))
        ]
        assert len(collected.groups) == self.groups * len(self.lanes) and set(collected.taken_at) == set(
            names
        )
        ages = [self.version - group.finished_version for group in collected.groups]
        assert min(ages) >= 0 and max(ages) <= self.bound
        for group in collected.groups:
            (span,) = group.rollouts[0].version_spans
            assert span.lineage == self.makers[span.version], "trained on a group of weights that were lost"
        self.trained.append([group.ticket_id for group in collected.groups])
        self.makers.append(self.learners)
        self.version += 1
        self.intake.open(self.version)
        if chance.random() < 0.4:
            self.saved = [*self.saved[-1:], (self.version, self.history, self.intake.settled)]
            self.intake.commit(
                self.saved[0][2] or {"shards": [Ledger().to_dict() for _ in self.lanes]}, self.version
            )

    @property
    def bound(self) -> int:
        shards = len(self.lanes)
        return lag_bound(
            self.max_lag, window=self.window * shards, groups=self.groups * shards, shards=shards
        )

    def strike(self, chance: random.Random) -> None:
        """A learner, a generator or a node of the store is lost."""
        match chance.randrange(60):
            case 0:
                self.start_learner()
            case 1:
                self.held.clear()
                self.buffer.revoke("g")
            case 2:
                chance.choice(self.lanes).wipe()
            case 3 if len(self.saved) == 2:  # the newest checkpoint is torn
                del self.saved[-1]
                self.start_learner()

    def check(self, steps: int, chance: random.Random) -> None:
        """Until the end; every id is consumed once."""
        for _ in range(3000):
            if self.version >= steps:
                break
            self.generate(chance)
            self.learn(chance)
            self.strike(chance)
            for lane in self.buffer.shards:
                assert lane.audit().missing == 0
        assert self.version >= steps, "a deadlock"
        once = {ticket_id for step in self.trained for ticket_id in step}
        assert len(once) == sum(map(len, self.trained)) and len(self.trained) == steps
        settled = ledgers_of(self.intake.settled, len(self.lanes))
        assert [ledger.trained for ledger in settled] == [len(once) // len(self.lanes)] * len(self.lanes)
        assert sum(ledger.consumed for ledger in settled) == len(once) + sum(
            ledger.total_rejected for ledger in settled
        )
