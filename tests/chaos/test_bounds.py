"""The bounds for a few seconds each. `python -m reliability.chaos.bounds` takes as long as one likes."""

import pytest

from reliability.chaos.bounds import COMPILER, SCENARIOS, broken, run_one

pytestmark = [pytest.mark.integration, pytest.mark.timeout(420)]


@pytest.mark.parametrize("name", SCENARIOS)
def test_bounds_hold(name):
    if name == "age" and COMPILER is None:
        pytest.skip("no C compiler for the shim that moves the store's clock")
    found = run_one(name, 12.0)
    assert broken(name, found) == [], found
