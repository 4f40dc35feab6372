"""The store's functions and their clients under 500 seeds of faults, the first 40 of them in `make test`.
`python -m reliability.simulation` runs more."""

import pytest

from reliability.simulation.campaign import Tally, campaign
from reliability.simulation.faults import Faults
from reliability.simulation.outcomes import EVERY_OUTCOME
from reliability.simulation.world import SHARDS

pytestmark = pytest.mark.timeout(900)
FEW, SEEDS = 40, 500


@pytest.fixture(scope="module")
def few() -> Tally:
    return tally_of(1, FEW)


@pytest.fixture(scope="module")
def total(few: Tally) -> Tally:
    total = tally_of(FEW + 1, SEEDS - FEW)
    total.add(few)
    return total


def tally_of(first: int, count: int) -> Tally:
    total = Tally()
    for part in campaign(first, count):
        total.add(part)
    return total


def test_none_of_a_few_seeds_loses_or_repeats_a_group(few: Tally) -> None:
    assert few.seeds == FEW and not few.failures, few.told()


def test_no_seed_loses_or_repeats_a_group(total: Tally) -> None:
    assert total.seeds == SEEDS and not total.failures, total.told()


def test_runs_had_one_shard_and_several(total: Tally) -> None:
    assert min(total.shards[shards] for shards in SHARDS) > SEEDS / 3, total.shards


def test_every_kind_of_fault_has_struck(total: Tally) -> None:
    assert set(Faults.NAMES) - total.faults.keys() == set()


def test_every_function_has_had_every_kind_of_result(total: Tally) -> None:
    assert total.outcomes.keys() == EVERY_OUTCOME
