"""The store's functions and their clients under 500 seeds of faults; see `python -m reliability.simulation`
for more."""

import pytest

from reliability.simulation.campaign import Tally, campaign
from reliability.simulation.faults import Faults
from reliability.simulation.outcomes import EVERY_OUTCOME
from reliability.simulation.world import SHARDS

pytestmark = pytest.mark.timeout(900)
SEEDS = 500


@pytest.fixture(scope="module")
def total() -> Tally:
    total = Tally()
    for part in campaign(1, SEEDS):
        total.add(part)
    return total


def test_no_seed_loses_or_repeats_a_group(total: Tally) -> None:
    assert total.seeds == SEEDS and not total.failures, total.told()


def test_runs_had_one_shard_and_several(total: Tally) -> None:
    assert min(total.shards[shards] for shards in SHARDS) > SEEDS / 3, total.shards


def test_every_kind_of_fault_has_struck(total: Tally) -> None:
    assert set(Faults.NAMES) - total.faults.keys() == set()


def test_every_function_has_had_every_kind_of_result(total: Tally) -> None:
    assert total.outcomes.keys() == EVERY_OUTCOME
