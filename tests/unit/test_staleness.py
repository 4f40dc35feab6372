import heapq
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algo.staleness import choose, credit_limit, lag_bound, minimum_version
from asyncrl.buffer.base import BufferRules
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.memory import MemoryBuffer


def slow_choose(ready, unfinished, next_id, count, window):
    """The definition: in ascending order, each id below the lowest issued id that is not chosen, plus W."""
    open_ids = sorted([*ready, *unfinished])
    chosen = []
    for candidate in sorted(ready):
        anchor = min((i for i in open_ids if i not in chosen), default=next_id + 1)
        if len(chosen) < count and candidate < anchor + window:
            chosen.append(candidate)
    return chosen if len(chosen) == count else None


@given(
    st.dictionaries(st.integers(1, 30), st.booleans(), max_size=20),
    st.integers(1, 8),
    st.integers(1, 12),
    st.integers(0, 3),
)
def test_choose_is_the_anchored_window(open_ids, count, window, slack):
    ready = sorted(i for i, finished in open_ids.items() if finished)
    unfinished = sorted(i for i, finished in open_ids.items() if not finished)
    next_id = max(open_ids, default=0) + slack
    anchor = min(unfinished, default=next_id + 1)
    assert choose(ready, anchor=anchor, count=count, window=window) == slow_choose(
        ready, unfinished, next_id, count, window
    )


VERSION, LAG, GROUPS = st.integers(0, 50), st.integers(0, 8), st.integers(1, 40)
TRAINED, REJECTED = st.integers(0, 900), st.integers(0, 100)


@given(VERSION, LAG, GROUPS, TRAINED, REJECTED, st.data())
def test_minimum_version_is_the_latest_step_the_group_can_be_trained_at_less_the_lag(
    version, max_lag, groups, trained, rejected, data
):
    limit = credit_limit(trained, max_lag=max_lag, groups=groups, rejected=rejected)
    ticket_id = data.draw(st.integers(1, limit))
    minimum = minimum_version(ticket_id, version=version, limit=limit, groups=groups)
    assert minimum == max(0, version + (ticket_id - 1 - trained - rejected) // groups - max_lag)
    assert minimum <= version, "an id within the credit can be started with the newest weights"


@given(VERSION, LAG, GROUPS, REJECTED)
def test_the_credit_is_exactly_what_the_lag_allows(version, max_lag, groups, rejected):
    limit = credit_limit(version * groups, max_lag=max_lag, groups=groups, rejected=rejected)
    beyond = limit + 1
    assert (beyond - 1 - rejected) // groups - max_lag == version + 1, (
        "one more id would need weights that do not exist"
    )
    assert limit - rejected - version * groups == (max_lag + 1) * groups


@given(st.integers(0, 8), st.integers(1, 100), st.integers(1, 20))
def test_lag_bound_rounds_the_overtaking_up_to_whole_steps(max_lag, window, groups):
    overtaken = lag_bound(max_lag, window=window, groups=groups) - max_lag
    assert (overtaken - 1) * groups < window - 1 <= overtaken * groups


class Simulation:
    """One learner, `workers` generators, one clock. A frame says with which weights its group was started."""

    def __init__(self, rng, *, max_lag, groups, window, workers, reject_share, crash_share):
        self.rng, self.max_lag, self.groups, self.window, self.workers = rng, max_lag, groups, window, workers
        self.reject_share, self.crash_share = reject_share, crash_share
        self.now_s = 0.0
        self.lane = MemoryBuffer(BufferRules(groups=groups, lease_s=1e9), clock=lambda: self.now_s)
        self.learner = self.lane
        self.version, self.ledger, self.accepted = 0, Ledger(), 0
        self.checkpoint = (0, self.ledger.to_dict(), 0)
        self.running = []
        self.lags, self.consumed = [], []
        self.learner.recover(self.ledger, version=0, limit=self.limit)

    @property
    def limit(self):
        rejected = self.ledger.total_rejected
        return credit_limit(self.ledger.trained, max_lag=self.max_lag, groups=self.groups, rejected=rejected)

    def start_groups(self):
        for worker in range(self.workers):
            if all(worker != busy for _, busy, *_ in self.running):
                for ticket in self.lane.lease(f"g{worker}", 1).tickets:
                    assert ticket.minimum_version <= self.version
                    latency_s = self.rng.lognormvariate(0, 1.5)
                    weights = self.rng.choice([ticket.minimum_version, self.version])
                    heapq.heappush(self.running, (self.now_s + latency_s, worker, ticket.id, weights))

    def finish_group(self):
        self.now_s, worker, ticket_id, weights = heapq.heappop(self.running)
        self.lane.put(f"g{worker}", ticket_id, b"%d" % weights)

    def train(self):
        """As many steps as can be made now."""
        while (
            take := self.learner.take(self.ledger, self.groups - self.accepted, window=self.window)
        ) is not None:
            frames = self.learner.frames(take.ids)
            self.ledger.consume(take.ids)
            for ticket_id, frame in zip(take.ids, frames, strict=True):
                if random.Random(ticket_id).random() < self.reject_share:
                    self.ledger.count_rejected("filter")
                else:
                    self.accepted += 1
                    self.lags.append(self.version - int(frame))
                self.consumed.append(ticket_id)
            if self.accepted == self.groups:
                self.finish_step()
            self.learner.set_version(self.version, limit=self.limit)
            self.start_groups()

    def finish_step(self):
        self.version, self.accepted = self.version + 1, 0
        self.ledger.trained += self.groups
        if self.rng.random() < 0.3:
            self.checkpoint = (self.version, self.ledger.to_dict(), len(self.consumed))
            self.learner.commit(self.ledger.takes, self.ledger.chain)

    def crash(self):
        self.version, values, consumed = self.checkpoint
        self.ledger, self.accepted = Ledger.from_dict(values), 0
        del self.consumed[consumed:]
        self.learner = self.lane.peer()
        self.learner.recover(self.ledger, version=self.version, limit=self.limit)

    def run(self, steps):
        for _ in range(200 * steps * self.groups):
            self.start_groups()
            self.train()
            assert self.lane.audit().missing == 0
            if self.version >= steps:
                return
            if self.rng.random() < self.crash_share:
                self.crash()
                continue
            assert self.running, "deadlock: the learner waits and nothing is being sampled"
            self.finish_group()
        raise AssertionError(f"only {self.version} of {steps} steps were made")


@given(
    seed=st.integers(0, 2**32),
    max_lag=st.integers(0, 4),
    groups=st.integers(1, 6),
    window=st.integers(1, 14),
    workers=st.integers(1, 12),
    reject_share=st.sampled_from([0.0, 0.3, 0.7]),
    crash_share=st.sampled_from([0.0, 0.05]),
)
def test_no_group_is_older_than_the_bound_and_nothing_waits_for_ever(
    seed, max_lag, groups, window, workers, reject_share, crash_share
):
    simulation = Simulation(
        random.Random(seed),
        max_lag=max_lag,
        groups=groups,
        window=window,
        workers=workers,
        reject_share=reject_share,
        crash_share=crash_share,
    )
    simulation.run(12)
    assert max(simulation.lags) <= lag_bound(max_lag, window=window, groups=groups)
    assert len(simulation.consumed) == len(set(simulation.consumed))
    if window == 1:
        assert simulation.consumed == sorted(simulation.consumed), "W = 1 is strict order"
    if max_lag == 0 and window == 1:
        assert max(simulation.lags) <= 0, "max_lag 0 is on-policy"


@pytest.mark.parametrize(
    ("max_lag", "window", "groups"), [(2, 1, 4), (2, 5, 4), (2, 6, 4), (0, 1, 3), (1, 9, 2)]
)
def test_the_bound_is_reached_so_it_is_not_too_wide(max_lag, window, groups):
    """The last group of a step, as slow as the window allows: younger ones overtake it until that is full."""
    lane = MemoryBuffer(BufferRules(groups=groups))
    ledger, version, slow, lag = Ledger(), 0, groups * (max_lag + 2), None
    started = {}
    lane.recover(ledger, version=0, limit=credit_limit(0, max_lag=max_lag, groups=groups, rejected=0))
    while lag is None:
        lane.set_version(
            version, limit=credit_limit(version * groups, max_lag=max_lag, groups=groups, rejected=0)
        )
        for ticket in lane.lease("g", 1000).tickets:
            started[ticket.id] = ticket.minimum_version
            if ticket.id != slow:
                lane.put("g", ticket.id, b"")
        take = lane.take(ledger, groups, window=window)
        if take is None:
            lane.put("g", slow, b"")
            continue
        ledger.consume(take.ids)
        lag = version - started[slow] if slow in take.ids else None
        version += 1
    assert lag == lag_bound(max_lag, window=window, groups=groups)
