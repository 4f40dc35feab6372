"""An engine of two workers: each has its part of every version, and a failure of one is the update's."""

import numpy as np
import psutil
import pytest

from asyncrl.errors import TransferError
from tests.support.vllm_engines import (
    STORIES,
    apply,
    load,
    logprobs_of,
    needs_stories,
    running_engine,
    scrambled,
    slot_order,
)

pytestmark = [pytest.mark.integration, needs_stories]

PROBE = (1, *range(300, 331))


def workers():
    """The engine's two processes that have a part of the model."""
    found = [
        process
        for process in psutil.Process().children(recursive=True)
        if "VLLM::Worker" in " ".join(process.cmdline())
    ]
    assert len(found) == 2
    return found


def test_both_workers_load_their_part_of_every_version():
    model = load(STORIES)

    def assert_engine_has(expected):
        assert np.abs(runner.run(engine.score(PROBE)) - logprobs_of(expected, PROBE)).max() < 1e-3

    with running_engine(STORIES, tensor_parallel=2) as (runner, engine):
        assert_engine_has(model)
        for version in (1, 2):
            new = scrambled(model, version)
            _slot, order = slot_order(version, new)
            runner.run(apply(engine, order))
            assert_engine_has(new)
        slot, order = slot_order(3, scrambled(model, 3))
        slot.begin()  # both workers refuse it
        runner.run(engine.begin_update())
        with pytest.raises(TransferError, match="wrote the next version"):
            runner.run(engine.receive(order))
        # A path that one worker can open: of a thread of its own.
        slot, order = slot_order(3, scrambled(model, 3))
        worker = workers()[0]
        path = f"/proc/self/task/{worker.pid}/root{order.details['slot']['path']}"
        order.details["slot"]["path"] = path
        with pytest.raises(TransferError, match="cannot be opened") as refused:
            runner.run(engine.receive(order))
        assert "another worker of this engine cannot read the weights" in str(refused.value)
        new = scrambled(model, 4)
        _slot, order = slot_order(4, new)
        runner.run(apply(engine, order))
        assert_engine_has(new)
