"""Kills in each phase of a swap of adapters in vLLM, in whole runs that begin with an adapter of PEFT."""

import pytest

from reliability.chaos.swaps import LIMIT, PHASES, run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(3600)]


def test_a_death_in_any_phase_of_a_swap_costs_no_group_and_no_token_has_another_adapter(tmp_path):
    found = run(tmp_path)
    assert found["killed"] == {f"{who}: {phase}": 1 for who, phase, _ in PHASES} | {"supervisor": 1}
    assert found["probe_max"] < LIMIT and found["apart_without_lag_max"] < LIMIT
    # Another adapter would show: from one step to the next, the probe moves by far more.
    assert min(found["moved_max"]) > 10 * LIMIT and found["steps_without_lag"] > 5
    assert (found["unaccounted"], found["missing_in_audit"]) == (0, 0)
    assert found["steps_in_a_row"] and found["down_leaves_nothing"]
