"""Whatever somebody with the generators' rights wrote into the store, and more: an honest run goes on, each
id in its place.

Learner and generator of that run are the users that a run makes.
"""

import random

import numpy as np
import pytest

from asyncrl.algo.trainable import GroupLimits
from asyncrl.buffer.base import BufferRules, PutOutcome
from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.intake import Intake
from asyncrl.buffer.judge import Gate
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.redis import PLACES, RedisBuffer
from asyncrl.buffer.server import StoreServer
from asyncrl.buffer.users import GENERATOR, LEARNER, StoreUser, generator_rules, learner_rules, with_user
from asyncrl.config.store import StoreConfig
from asyncrl.types import Group, Rollout, VersionSpan
from asyncrl.wire.group_frames import decode_group, encode_group
from tests.support.hostile import damage
from tests.support.redis_lane import RedisLane

pytestmark = pytest.mark.integration
B = 4
RULES = BufferRules(groups=B, lease_s=1000.0, max_bytes=1 << 20)


ADMIN = "admin"
RIGHTS = {ADMIN: "~* &* +@all", LEARNER: learner_rules("run-*"), GENERATOR: generator_rules("run-*")}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    users = [StoreUser(name, name, rules) for name, rules in RIGHTS.items()]
    with StoreServer(StoreConfig(fsync="no"), tmp_path_factory.mktemp("store"), users=users) as running:
        yield running


@pytest.fixture
def connections(server):
    made = {name: StoreConnection(with_user(server.url, name), password=name, retry_s=5.0) for name in RIGHTS}
    yield made
    for connection in made.values():
        connection.close()


def frame(ticket_id: int) -> bytes:
    one = np.ones(1, np.int32)
    rollout = Rollout(
        prompt_ids=one, response_ids=one, action_mask=np.ones(1, np.bool_), behaviour_logprobs=np.zeros(1, np.float32),
        version_spans=(VersionSpan(0, 1),), finish_reason="stop",
    )  # fmt: skip
    return encode_group(Group(ticket_id=ticket_id, rollouts=(rollout,), generator_id="g", finished_version=0))


class DamagedLane(RedisLane):
    """Seen by the admin; a handle is a role's."""

    def __init__(self, connections: dict[str, StoreConnection]) -> None:
        super().__init__(connections[ADMIN], RULES)
        self.connections = connections

    def handle(self, user: str = LEARNER) -> RedisBuffer:
        return RedisBuffer(self.connections[user], self.run, self.rules)


class HonestRun:
    """A learner and a generator."""

    def __init__(self, lane: "DamagedLane") -> None:
        self.learner, self.generator, self.version = lane.handle(), lane.handle(GENERATOR), 0
        limits = GroupLimits(vocabulary=9, rollouts=1, max_tokens=9)
        self.intake = Intake(
            buffer=self.learner, ledger=Ledger(), gate=Gate(lane="train", decode=decode_group, limits=limits),
            judge=lambda group, version: None, groups=B, window=B, max_lag=1, max_refills=99, stall_s=600.0,
        )  # fmt: skip
        self.intake.recover(0)
        self.trained: list[int] = []
        self.held: list[int] = []

    def generate(self) -> None:
        self.held += [ticket.id for ticket in self.generator.lease("g", 3).tickets]
        kept, outcomes = self.held, {}
        for ticket_id in kept:
            outcomes[ticket_id] = self.generator.put("g", ticket_id, frame(ticket_id))
        self.held = [i for i in kept if outcomes[i] is PutOutcome.FULL]
        self.generator.renew("g", self.held)

    def train(self) -> bool:
        if (collected := self.intake.poll(self.version, wait_s=0.0)) is None:
            return False
        self.trained += [group.ticket_id for group in collected.groups]
        self.version += 1
        self.intake.open(self.version)
        if self.version % 3 == 0:
            self.intake.commit(self.intake.ledger.to_dict(), self.version)
        return True

    def go_on(self, steps: int, *, rounds: int = 60) -> bool:
        """Whether it gets there."""
        until = self.version + steps
        for _ in range(rounds):
            if self.version == until:
                return True
            self.generate()
            self.train()
        return False


@pytest.mark.parametrize("seed", range(8))
def test_an_honest_run_goes_on_whatever_a_generators_user_wrote(connections, seed):
    rng, admin = random.Random(seed), connections[ADMIN].client
    for _ in range(12):
        lane = DamagedLane(connections)
        run = HonestRun(lane)
        run.go_on(rng.choice([0, 1, 2, 4]))
        run.generate()
        said = damage(admin, lane.key, rng)
        recoveries = 0
        for steps in (1, 3, 2):
            went_on = run.go_on(steps)
            if not went_on or run.learner.audit().missing:  # what a watch of the audit does
                recoveries += 1
                run.intake.recover(run.version)
                assert run.learner.audit().missing == 0, said
        assert recoveries <= 1 and went_on, (said, run.learner.audit())
        ledger = run.intake.ledger
        assert len(set(run.trained)) == len(run.trained), said
        assert ledger.consumed == ledger.trained + ledger.total_rejected
        assert ledger.total_rejected <= 6, said
        admin.delete(*map(lane.key, PLACES))


@pytest.mark.parametrize(
    "command",
    [
        ("HSET", "totals", "issued", "9007199254740992"),
        ("HSET", "totals", "issued", "abc"),
        ("HSET", "totals", "issued", "0"),
        ("HSET", "totals", "bytes", "9007199254740992"),
        ("HSET", "counters", "put", "x"),
        ("HSET", "attempts", "5", "x"),
        ("HSET", "deaths", "5", "99999"),
        ("ZADD", "reissue", "0", "foo"),
        ("ZADD", "ready", "0", "foo"),
        ("ZADD", "ready", "1", "1"),
        ("ZADD", "deadlines", "0", "foo"),
        ("HSET", "holders", "foo", "g"),
        ("HSET", "frames", "12", "forged"),
        ("HDEL", "frames", "9", "10", "11"),
        ("ZREM", "leased", "12", "13"),
        ("HDEL", "holders", "12", "13"),
        ("ZREM", "reissue", "14"),
    ],
)
def test_what_a_generators_user_can_still_do_stops_no_process_and_is_healed(connections, command):
    name, place, *values = command
    lane = DamagedLane(connections)
    run = HonestRun(lane)
    assert run.go_on(2)
    run.generate()
    run.held += [ticket.id for ticket in run.generator.lease("g", 3).tickets]
    run.generator.give_back("g", run.held[2:])
    assert connections[GENERATOR].client.execute_command(name, lane.key(place), *values) is not None
    another = lane.handle()
    another.recover(run.intake.ledger, version=run.version, limit=run.intake._limit(run.version))
    run.learner, run.intake.buffer = another, another
    assert run.go_on(4)
    assert another.audit().missing == 0
