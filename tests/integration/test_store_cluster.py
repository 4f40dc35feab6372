"""Shards on the nodes of a real cluster, which refuses functions, transactions and reads across two slots."""

import itertools
import random
from collections.abc import Iterator

import pytest
from redis.exceptions import ResponseError

from asyncrl.buffer.base import BufferRules
from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.redis import PLACES, RedisBuffer
from asyncrl.buffer.run_record import RunRecord, StoredRun, key_id
from asyncrl.buffer.shards import shard_names
from asyncrl.buffer.users import GENERATOR, LEARNER, generator_rules, learner_rules, with_user
from asyncrl.errors import StoreRefused
from tests.support.buffer_contract import fill, take
from tests.support.cluster import PRIMARIES, SLOTS, Node, cluster
from tests.support.redis_lane import RedisLane
from tests.support.shard_contract import Run, ShardContract
from tests.support.store_servers import SERVERS

pytestmark = pytest.mark.integration
run_numbers = itertools.count(1)


@pytest.fixture(scope="module", params=SERVERS)
def nodes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    with cluster(tmp_path_factory.mktemp("cluster"), request.param) as nodes:
        yield nodes


class ClusterLane(RedisLane):
    """A shard; whoever opens it knows the cluster's first node alone."""

    def __init__(self, nodes, rules, *, run, lane):
        super().__init__(None, rules, run=run, lane=lane)
        self.first = nodes[0]
        slot = int(self.first.cluster("KEYSLOT", self.key("meta")))
        self.node = next(
            node for number, node in enumerate(nodes) if slot < SLOTS * (number + 1) // PRIMARIES
        )

    def handle(self):
        return RedisBuffer(
            StoreConnection(self.first.url, retry_s=60.0), self.run, self.rules, lane=self.lane
        )

    def wipe(self):
        self.node.client.delete(*map(self.key, PLACES))


@pytest.fixture
def make_lanes(nodes):
    def make_lanes(shards, rules):
        run = f"run-{next(run_numbers)}"
        return [ClusterLane(nodes, rules, run=run, lane=name) for name in shard_names("train", shards)]

    return make_lanes


class TestClusterShards(ShardContract):
    """The contract, each shard on its node."""

    @pytest.fixture
    def make_lanes(self, make_lanes):
        return make_lanes


def test_the_cluster_refuses_what_touches_two_slots(nodes):
    with pytest.raises(ResponseError, match="same slot"):
        nodes[0].client.exists("{a}:meta", "{b}:meta")


def test_a_fresh_learner_deletes_the_shards_of_an_earlier_run_from_every_node(nodes, make_lanes):
    lanes = make_lanes(4, BufferRules(groups=2))
    assert len({lane.node.port for lane in lanes}) == PRIMARIES
    for lane in lanes:
        lane.handle().recover(Ledger(), version=0, limit=8)
        fill(lane.handle(), 4)
    connection = StoreConnection(nodes[0].url, retry_s=20.0)
    run = StoredRun(name=lanes[0].run, config_json="{}", config_hash="h", release="r", key_id=key_id(b"key"))
    RunRecord(connection, b"key").claim(run, fresh=True)
    assert RunRecord(connection, b"key").read() == run
    assert [lane.handle().audit().issued for lane in lanes] == [0] * 4
    RunRecord(connection, b"key").claim(run, fresh=False)
    nodes[0].client.flushall()
    for node in nodes[1:PRIMARIES]:
        node.client.flushall()


def test_every_node_must_keep_what_it_is_given(nodes):
    connection = StoreConnection(nodes[0].url, retry_s=20.0)
    connection.check()
    nodes[1].client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(
            StoreRefused, match=rf"127.0.0.1:{nodes[1].port} has maxmemory-policy allkeys-lru"
        ):
            connection.check()
    finally:
        nodes[1].client.config_set("maxmemory-policy", "noeviction")


def test_the_users_of_a_run_find_its_shards_on_every_node(nodes):
    """With the rights of a single server on each node, and `cluster|slots` for the learner."""
    users = {LEARNER: f"{learner_rules('by-role')} +cluster|slots", GENERATOR: generator_rules("by-role")}
    for node, (user, rules) in itertools.product(nodes, users.items()):
        node.client.execute_command("ACL", "SETUSER", user, "on", f">{user}", *rules.split())
    learner, generator = (
        StoreConnection(with_user(nodes[0].url, user), password=user, retry_s=20.0) for user in users
    )
    run = StoredRun(name="by-role", config_json="{}", config_hash="h", release="r", key_id=key_id(b"key"))
    RunRecord(learner, b"key").claim(run, fresh=True)
    assert RunRecord(generator, b"key").read() == run
    for name in shard_names("train", 4):
        buffer, sampler = (
            RedisBuffer(one, run.name, BufferRules(groups=2), lane=name) for one in (learner, generator)
        )
        ledger = Ledger()
        buffer.recover(ledger, version=0, limit=8)
        fill(sampler, 4)
        take(buffer, ledger, 2)
        with pytest.raises(StoreRefused, match=r"can't access|ACL failure"):
            sampler.close()
    nodes[0].client.flushall()
    for node in nodes[1:PRIMARIES]:
        node.client.flushall()


def test_a_run_on_three_nodes_goes_on_when_a_replica_takes_the_place_of_one(nodes, make_lanes):
    lanes = make_lanes(4, BufferRules(groups=2))
    run, chance = Run(lanes, max_lag=1, groups=2, window=3), random.Random(1)
    run.check(6, chance)
    *_, primary, replica = nodes
    primary.process.kill()
    primary.process.wait(timeout=60)
    replica.cluster("FAILOVER", "TAKEOVER")
    for lane in lanes:
        if lane.node is primary:
            lane.node = replica
    run.check(12, chance)
