"""A lane of a real store, for the contract that all buffers keep."""

import itertools

from asyncrl.buffer.redis import PLACES, RedisBuffer
from asyncrl.buffer.run_record import StoredRun, key_id
from tests.support.buffer_contract import RULES

run_numbers = itertools.count(1)


class Weighed(RedisBuffer):
    """Every audit also weighs the frames: none is left that is not counted."""

    def audit(self):
        audit = super().audit()
        assert sum(map(len, self._connection.client.hvals(self._frames_key))) == audit.payload_bytes
        return audit


class RedisLane:
    kind = Weighed

    def __init__(self, connection, rules=RULES, *, run=None, lane="train"):
        self.connection, self.rules, self.lane = connection, rules, lane
        self.run = run or f"run-{next(run_numbers)}"

    def handle(self):
        return self.kind(self.connection, self.run, self.rules, lane=self.lane)

    def key(self, place):
        return f"{{{self.run}:{self.lane}}}:{place}"

    def expire(self):
        client, deadlines = self.connection.client, self.key("deadlines")
        if leased := client.zrange(deadlines, 0, -1):
            client.zadd(deadlines, dict.fromkeys(leased, 1))

    def wipe(self):
        self.connection.client.delete(*map(self.key, PLACES))

    def owner_is_newest(self, learners):
        owner = self.connection.client.hget(self.key("meta"), "owner")
        return owner in [learner._owner.encode() for learner in learners if isinstance(learner, RedisBuffer)]

    def snapshot(self):
        return {place: self.connection.client.dump(self.key(place)) for place in PLACES}

    def roll_back(self, snapshot):
        self.wipe()
        for place, value in snapshot.items():
            if value is not None:
                self.connection.client.restore(self.key(place), 0, value)


RUN = StoredRun(name="first", config_json='{"a": 1}', config_hash="abc", release="0.1", key_id=key_id(b"key"))
