"""What a checkpoint holds of the learner, and that checkpoints written before a field was added are read."""

import json
from typing import Any

import pytest

from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.shards import ledgers_of
from asyncrl.errors import ConfigError
from asyncrl.lineage import History, Weights
from asyncrl.run.saved import LearnerState


def test_the_state_survives_its_checkpoint():
    state = LearnerState(
        version=3,
        ledger=ledgers(1)[0].to_dict(),
        history=History(7, (Weights(0), Weights(2, 5))),
        evaluation={"round": 1},
        fixed={"run.seed": 3, "model.revision": None},
        coefficients={"kl": 0.1, "measured_entropy": 1.5},
        curriculum={"decided": 2, "skipped": {"1": "gA=="}},
        tracker={"7": [1 / 3, 1.9]},
    )
    again = LearnerState.from_dict(json.loads(json.dumps(state.to_dict())))
    assert again == state
    assert again.coefficients == {"kl": 0.1, "measured_entropy": 1.5}


def ledgers(shards: int) -> tuple[Ledger, ...]:
    made = ledgers_of({}, shards)
    for shard, ledger in enumerate(made):
        ledger.consume((1, 2, 4 + shard))
    return made


def saved(shards: int) -> dict[str, Any]:
    return {"shards": [ledger.to_dict() for ledger in ledgers(shards)]}


def test_several_shards_are_written_side_by_side():
    four = LearnerState(version=3, ledger=saved(4))
    assert Ledger.from_dict(four.to_dict()["ledger"]["shards"][2]).above == {6}
    assert LearnerState.from_dict(json.loads(json.dumps(four.to_dict()))) == four


def test_a_checkpoint_of_another_number_of_shards_is_refused():
    assert ledgers_of(LearnerState().ledger, 4) == (Ledger(),) * 4
    one, four = ledgers(1)[0].to_dict(), saved(4)
    assert ledgers_of(one, 1) == ledgers(1) and ledgers_of(four, 4) == ledgers(4)
    with pytest.raises(ConfigError, match=r"store.shards: 4, the config says 2.*set store.shards: 4"):
        ledgers_of(four, 2)
    with pytest.raises(ConfigError, match=r"store.shards: 4, the config says 1.*set store.shards: 4"):
        ledgers_of(four, 1)
    with pytest.raises(ConfigError, match=r"store.shards: 1, the config says 4.*set store.shards: 1"):
        ledgers_of(one, 4)


@pytest.mark.parametrize("later", ["curriculum", "tracker", "stop"])
def test_a_checkpoint_of_a_release_before_a_field_is_read(later):
    values = LearnerState(version=3).to_dict()
    del values[later]
    assert LearnerState.from_dict(values) == LearnerState(version=3)


def test_an_empty_state_is_the_beginning():
    assert LearnerState.from_dict({}) == LearnerState()
