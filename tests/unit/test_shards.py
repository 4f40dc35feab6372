"""Ids are dealt to shards, every shard is a lane of its own, and together they keep the bound."""

import random
from fractions import Fraction
from math import ceil

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from redis.crc import key_slot

from asyncrl.algo.staleness import lag_bound
from asyncrl.buffer.base import BufferRules
from asyncrl.buffer.shards import join, shard_names, split
from tests.support.memory_lane import MemoryLane
from tests.support.shard_contract import Run, ShardContract


@given(st.integers(1, 1 << 40), st.integers(1, 100))
def test_every_id_has_one_place_and_ids_of_a_shard_are_dense(ticket_id, shards):
    shard, local_id = split(ticket_id, shards)
    assert 0 <= shard < shards and join(shard, local_id, shards) == ticket_id
    assert split(ticket_id + shards, shards) == (shard, local_id + 1)
    assert shards > 1 or local_id == ticket_id


@given(st.from_regex(r"[a-z0-9_.-]{1,30}", fullmatch=True))
def test_four_shards_lie_in_the_four_quarters_of_the_slots(run):
    assert shard_names("train", 1) == ["train"]
    assert {key_slot(f"{{{run}:{name}}}:meta".encode()) // 4096 for name in shard_names("train", 4)} == {
        0,
        1,
        2,
        3,
    }


@given(st.integers(0, 9), st.integers(1, 16), st.integers(1, 64), st.integers(1, 64))
def test_the_bound_is_that_of_a_shard(max_lag, shards, window, groups):
    found = lag_bound(max_lag, window=window * shards, groups=groups * shards, shards=shards)
    assert (
        found
        == lag_bound(max_lag, window=window, groups=groups)
        == max_lag + ceil(Fraction(window - 1, groups))
    )
    assert found <= lag_bound(max_lag, window=window * shards, groups=groups * shards)


def make_lanes(shards, rules):
    return [MemoryLane(rules) for _ in range(shards)]


class TestMemoryShards(ShardContract):
    @pytest.fixture
    def make_lanes(self):
        return make_lanes


@given(
    seed=st.integers(0, 1 << 32),
    shards=st.sampled_from([1, 4]),
    max_lag=st.integers(0, 3),
    groups=st.integers(1, 3),
    window=st.integers(1, 7),
)
# Rejections in steps that are lost had lent credit.
@example(seed=433, shards=4, max_lag=0, groups=3, window=3)
def test_steps_are_whole_no_group_comes_twice_and_none_is_older_than_the_bound(
    seed, shards, max_lag, groups, window
):
    """With rejections, stragglers, a learner that returns to its checkpoint, a store that loses a shard."""
    lanes = make_lanes(shards, BufferRules(groups=groups))
    Run(lanes, max_lag=max_lag, groups=groups, window=window).check(12, random.Random(seed))
