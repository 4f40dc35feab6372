"""The memory buffer as a lane that tests can age, wipe and roll back."""

import copy

from asyncrl.buffer.memory import MemoryBuffer, _Store


class MemoryLane:
    def __init__(self, rules):
        self.now_s = 0.0
        self.rules = rules
        self.first = MemoryBuffer(rules, clock=lambda: self.now_s)

    def handle(self):
        self.first._rules = self.rules
        return self.first.peer()

    def expire(self):
        self.now_s += self.rules.lease_s + 1

    def wipe(self):
        self.roll_back(MemoryLane(self.rules).snapshot())

    def snapshot(self):
        names = [name for name in _Store.__slots__ if name not in ("lock", "owner")]
        values = copy.deepcopy({name: getattr(self.first._store, name) for name in names})
        return values | {"owner": self.first._store.owner, "now_s": self.now_s}

    def roll_back(self, snapshot):
        values = copy.deepcopy(
            {name: value for name, value in snapshot.items() if name not in ("owner", "now_s")}
        )
        for lease in values["leases"].values():
            lease.ends_s += self.now_s - snapshot["now_s"]  # time goes on, leases last as long as they had to
        for name, value in values.items():
            setattr(self.first._store, name, value)
        self.first._store.owner = snapshot["owner"]

    def owner_is_newest(self, learners):
        return any(self.first._store.owner is learner for learner in learners)
