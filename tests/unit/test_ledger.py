import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.buffer.ledger import EMPTY_CHAIN, Ledger, next_chain
from asyncrl.errors import CheckpointError

permutations = st.integers(0, 30).flatmap(lambda n: st.permutations(range(1, n + 1)))


@given(permutations, st.data())
def test_any_order_of_ids_ends_in_the_same_set_and_dense_ids_need_no_memory(order, data):
    ledger, rest = Ledger(), list(order)
    takes = 0
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        ledger.consume(tuple(rest[:size]))
        rest, takes = rest[size:], takes + 1
        seen = order[: len(order) - len(rest)]
        assert set(range(1, ledger.watermark + 1)) | ledger.above == set(seen)
        assert ledger.watermark + 1 not in ledger.above
        assert ledger.consumed == len(seen)
    assert (ledger.watermark, ledger.above, ledger.takes) == (len(order), set(), takes)


@pytest.mark.parametrize("ids", [(2,), (5,), (7, 7), (9, 2)])
def test_an_id_enters_once_or_nothing_enters(ids):
    ledger = Ledger()
    ledger.consume((1, 2, 3, 5))
    before = ledger.to_dict()
    with pytest.raises(CheckpointError, match="repeats"):
        ledger.consume(ids)
    assert ledger.to_dict() == before


def test_the_chain_is_sha1_of_the_previous_one_and_the_ids():
    first = hashlib.sha1(b"0" * 40 + b" 3 1").hexdigest()
    assert next_chain(EMPTY_CHAIN, (3, 1)) == first
    assert next_chain(first, ()) == hashlib.sha1(first.encode() + b" ").hexdigest()
    assert next_chain(EMPTY_CHAIN, (31,)) != first, "3 1 and 31 are different histories"


def test_a_ledger_survives_json_and_shares_nothing_with_its_copy():
    ledger = Ledger()
    ledger.consume((2, 4, 1))
    ledger.count_rejected("zero_variance", 2)
    values = ledger.to_dict()
    copy = Ledger.from_dict(json.loads(json.dumps(values)))
    assert copy == ledger == Ledger.from_dict(values)
    again = Ledger.from_dict(values)
    again.consume((3,))
    again.count_rejected("zero_variance")
    assert ledger.to_dict() == values == copy.to_dict()
    assert ledger.total_rejected == 2
