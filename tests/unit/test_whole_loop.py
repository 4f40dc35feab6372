"""Learner loop and generator loop together, in one process: `examples/one_process.py`."""

import asyncio

from asyncrl.buffer.ledger import Ledger
from tests.support.example import load_example


def test_the_policy_learns_from_stale_tokens_within_the_bound(capsys):
    example = load_example()
    run = asyncio.run(example.train())
    assert sum(run.rewards[:5]) / 5 < 0.3 < 0.9 < sum(run.rewards[-5:]) / 5
    assert max(run.lags) == example.MAX_LAG, "the generator was never that far ahead, or further"
    assert run.control.refused == [], "the generator's probe differs from the learner's"
    audit, ledger = run.intake.buffer.audit(), Ledger.from_dict(run.intake.settled)
    assert (ledger.trained, ledger.total_rejected) == (example.STEPS * example.BATCH.groups, 0)
    assert audit.missing == 0 and audit.done == ledger.trained
    assert len(capsys.readouterr().out.splitlines()) == example.STEPS
