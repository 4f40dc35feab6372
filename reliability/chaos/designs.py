"""What the same faults cost this design and others."""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from . import rivals
from .faults import Scenario, kill_generator, kill_learner, kill_store, lose_power, strike, swallow
from .lineage import Verdict
from .world import World

OURS = "asyncrl"
SCHEDULES = (
    Scenario(name="processes", faults={kill_generator: 1.0, kill_learner: 1.0}, gap_s=0.5, share=0.0),
    Scenario(
        name="everything",
        faults={kill_generator: 1.0, kill_learner: 1.0, kill_store: 1.0, lose_power: 1.0},
        gap_s=0.7,
        share=0.0,
        always=partial(swallow, 0.005, 0.0),
    ),
)
"""Kills of generators and learner; also kills and power losses of the store, and 1 reply in 200 swallowed."""


def compare(seed: int, faults: int) -> list[dict[str, Any]]:
    """Every design under every schedule: the same `faults` faults in the same order and intervals."""
    return [
        _run(design, schedule, seed, faults) for schedule in SCHEDULES for design in (*rivals.DESIGNS, OURS)
    ]


def _run(design: str, schedule: Scenario, seed: int, faults: int) -> dict[str, Any]:
    cast = {} if design == OURS else {
        "learner_role": partial(rivals.consumer, design),
        "generator_role": partial(rivals.producer, design),
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="asyncrl-chaos-") as root:
        directory = Path(root) / "run"
        with World(directory, seed, **cast) as world:  # type: ignore[arg-type]
            world.start()
            strike(world, schedule, seed, 3600.0, most=faults)
            verdict = world.finish() if design == OURS else _settle(world)
        return {
            "design": design,
            "schedule": schedule.name,
            "faults": sum(world.struck.values()),
            "groups": verdict.groups,
            "lost": verdict.lost,
            "duplicated": verdict.duplicated,
            "wrong": list(verdict.wrong),
        }


def _settle(world: World) -> Verdict:
    world.settle()
    return rivals.judge(world.directory)


def table(results: list[dict[str, Any]]) -> list[str]:
    """As Markdown."""
    rows = ["| faults | design | faults | groups | lost | duplicated |", "|---|---|---|---|---|---|"]
    return rows + [
        f"| {one['schedule']} | {one['design']} | {one['faults']} | {one['groups']} | {one['lost']} | "
        f"{one['duplicated']} |"
        for one in results
    ]
