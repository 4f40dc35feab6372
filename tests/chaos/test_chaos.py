"""Every kind of fault for a few seconds. `python -m reliability.chaos` runs them for any time."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from reliability.chaos.episodes import EPISODES
from reliability.chaos.faults import SCENARIOS, Scenario, strike, wipe
from reliability.chaos.hardening import DEADLY, FILES, HARDENING, POISON
from reliability.chaos.helpers import marked
from reliability.chaos.page import PAGE, results, rewritten
from reliability.chaos.poison import GROUPS, fates, send_message
from reliability.chaos.world import START_S, World

pytestmark = [pytest.mark.integration, pytest.mark.timeout(420)]

SECONDS, SEED = 5.0, 7


@pytest.mark.parametrize("scenario", SCENARIOS, ids=[scenario.name for scenario in SCENARIOS])
def test_nothing_is_lost_and_nothing_is_trained_twice(tmp_path: Path, scenario: Scenario) -> None:
    if reason := scenario.obstacle():
        pytest.skip(reason)
    with World(
        tmp_path / "run", SEED, fsync=scenario.fsync, is_spread=scenario.is_spread, hang_s=scenario.hang_s
    ) as world:
        world.start()
        strike(world, scenario, SEED, SECONDS)
        verdict = world.finish()
    assert world.struck or world.proxies["generators"].swallowed
    assert verdict.is_good, verdict
    assert verdict.groups >= 8 * verdict.steps > 0


def test_what_is_poisonous_is_set_aside_with_its_reason_while_files_are_damaged(tmp_path: Path) -> None:
    """Each once. `python -m reliability.chaos --only hardening` mixes them with all other faults."""
    chosen = {**POISON, **DEADLY, **FILES, send_message: 1.0}
    scenario = replace(HARDENING, faults=chosen, gap_s=0.1, calm=False, at_once=(1,))
    with World(tmp_path / "run", SEED, hang_s=scenario.hang_s) as world:
        world.start()
        strike(world, scenario, SEED, 300.0, most=len(chosen))
        last = max(marked(world.directory, "ticket") | marked(world.directory, "step"))
        world.wait(lambda: world.furthest > last, START_S, f"step beyond group {last}")
        verdict = world.finish()
        found, survived = fates(world, verdict)
    assert verdict.is_good and not survived, (verdict, survived)
    assert found["deadly ticket"] == {"deadly": 1}
    # A death of the learner may undo the versions that sampled the step's group, which then kills nobody again.
    assert found["deadly step"] in ({"deadly": 1}, {"discarded_lineage": 1})
    assert found.keys() >= set(GROUPS)
    assert {"untrainable", "discarded_lineage"} <= {
        reason for reasons in found.values() for reason in reasons
    }


def test_no_fault_of_an_environment_scores_an_episode_or_leaves_a_process(tmp_path: Path) -> None:
    """`python -m reliability.chaos --only episodes` does it hundreds of times."""
    if reason := EPISODES.obstacle():
        pytest.skip(reason)
    with EPISODES.world(tmp_path / "run", SEED) as world:
        world.start()
        strike(world, EPISODES, SEED, START_S, most=20)
        verdict = world.finish()
    assert verdict.is_good, verdict
    assert world.found()["replays"] > 0


def test_of_two_learners_without_a_common_lock_one_goes_on_also_where_the_store_was_wiped(
    tmp_path: Path,
) -> None:
    with World(tmp_path / "run", SEED) as world:
        world.start()
        world.kill("learner")
        before = world.version
        world.wait(lambda: world.version > before + 2, START_S, "steps of a learner that has recovered twice")
        first = world.members["learner"]
        world.pause("learner", START_S)
        wipe(world, random.Random(SEED))
        world.usurp()
        before = world.version
        world.wait(lambda: world.version != before, START_S, "step of the second learner")
        world.wake_old()
        before = world.version
        world.wait(lambda: world.version > before + 2, START_S, "steps of the first learner")
        assert (world.given_back, world.members["learner"] is first, first.starts) == (1, True, 2)
        verdict = world.finish()
    assert verdict.is_good, verdict


def test_the_tables_of_the_page_are_those_of_the_results() -> None:
    page = PAGE.read_text()
    assert rewritten(page, results()) == page
