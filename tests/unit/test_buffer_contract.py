import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.buffer_contract import RULES, BufferContract
from tests.support.buffer_walk import WALK_RULES, Walk
from tests.support.memory_lane import MemoryLane


class TestMemoryBuffer(BufferContract):
    @pytest.fixture
    def lane(self):
        return MemoryLane(RULES)


@given(st.data())
def test_nothing_is_lost_or_repeated_whatever_happens(data):
    Walk([MemoryLane(WALK_RULES)], data.draw).run(60)
