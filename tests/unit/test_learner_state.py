"""What a checkpoint holds of the learner, and that checkpoints written before a field was added are read."""

import json

from asyncrl.buffer.ledger import Ledger
from asyncrl.launch.head import LearnerState


def test_the_state_survives_its_checkpoint():
    ledger = Ledger()
    ledger.consume([1, 2, 4])
    state = LearnerState(version=3, ledger=ledger, evaluation={"round": 1}, coefficients={"kl": 0.1, "measured_entropy": 1.5})
    again = LearnerState.from_dict(json.loads(json.dumps(state.to_dict())))
    assert again.to_dict() == state.to_dict()
    assert again.coefficients == {"kl": 0.1, "measured_entropy": 1.5}


def test_a_checkpoint_without_coefficients_begins_with_the_configs():
    values = LearnerState(version=3).to_dict()
    del values["coefficients"]
    assert LearnerState.from_dict(values).coefficients == {}
    assert LearnerState.from_dict({}).version == 0
