import pytest
from buffer_contract import RULES, BufferContract

from asyncrl.buffer.memory import MemoryBuffer, _Store


class MemoryLane:
    def __init__(self, rules=RULES):
        self.now_s = 0.0
        self.rules = rules
        self.first = MemoryBuffer(rules, clock=lambda: self.now_s)

    def handle(self):
        return self.first.peer()

    def expire(self):
        self.now_s += self.rules.lease_s + 1

    def wipe(self):
        empty = _Store()
        for name in _Store.__slots__:
            setattr(self.first._store, name, getattr(empty, name))


class TestMemoryBuffer(BufferContract):
    @pytest.fixture
    def lane(self):
        return MemoryLane()
