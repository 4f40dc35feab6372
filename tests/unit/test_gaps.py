"""Differences of evaluations: against a t-test's definition, chance, and runs that answered other prompts."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from numpy.typing import NDArray

from asyncrl.evaluation import summarise
from asyncrl.report.reports import eval_records
from asyncrl.results.archive import read_archive
from asyncrl.results.compare import compare_runs, gaps
from asyncrl.run.directory import RunDirectory
from asyncrl.telemetry.jsonl import Lines, to_json
from asyncrl.telemetry.text import number
from asyncrl.types import Group
from tests.support.steps import rollout

DRAW = np.random.default_rng(0)


def evaluated(run: Path, rewards: dict[int, NDArray[np.float64]], *, first_prompt: int = 0) -> None:
    """Write a run whose evaluations have these rewards, by step: a row per prompt, a column per sample."""
    (run / "metrics").mkdir(parents=True)
    (run / "config.yaml").write_text(yaml.safe_dump({"run": {"name": run.name}}))
    rows = []
    for step, by_prompt in rewards.items():
        groups = [
            Group(
                ticket_id=place + 1,
                rollouts=tuple(
                    replace(rollout(a=float(reward)), prompt_ids=np.array([first_prompt + place], np.int32))
                    for reward in prompt
                ),
                generator_id="g",
                finished_version=step,
            )
            for place, prompt in enumerate(by_prompt)
        ]
        rows.append({"step": step, "time": 1.0, **summarise(groups, step).metrics})
        records = [to_json(asdict(record)) for record in eval_records(groups, step, str)]
        Lines(RunDirectory(run).evaluation(step)).write(records)
    (run / "metrics" / "learner.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def table_of(*runs: Path) -> dict[tuple[str, str], tuple[str, ...]]:
    found = gaps({run.name: read_archive(RunDirectory(run)) for run in runs})
    return {(row[1], row[0]): row[2:] for table in found for row in table.rows}


def solved(easy: NDArray[np.float64], samples: int) -> NDArray[np.float64]:
    return (DRAW.random((len(easy), samples)) < easy[:, None]).astype(float)


def test_a_difference_is_that_of_a_paired_t_test_else_of_a_welch_test(tmp_path: Path) -> None:
    easy = DRAW.random(60)
    one = np.maximum(solved(easy, 4), 0.25)
    other = one.copy()
    other[np.arange(60), one.argmin(1)] = np.where(np.arange(60) % 3, one.min(1), 1.0)  # a third improves
    evaluated(tmp_path / "a", {0: solved(easy, 4), 10: one})
    evaluated(tmp_path / "b", {0: other[::-1], 10: other})
    evaluated(tmp_path / "elsewhere", {10: other}, first_prompt=500)
    table = table_of(tmp_path / "a", tmp_path / "b", tmp_path / "elsewhere")
    for name, x, y in (
        ("eval/accuracy", (one == 1).mean(1), (other == 1).mean(1)),
        ("eval/reward_mean", one.mean(1), other.mean(1)),
    ):
        gap, by_pairs = (y - x).mean(), (y - x).std(ddof=1) / math.sqrt(60)
        apart = math.sqrt(x.var(ddof=1) / 60 + y.var(ddof=1) / 60)
        shown, way, verdict = table["b - a", f"{name}, last"]
        assert shown == f"+{number(gap)} ± {number(by_pairs, 2)}" and way == "60 prompts in pairs"
        assert verdict == "yes" and 2 * by_pairs < gap < 2 * apart, "only pairs show it"
        shown, way, verdict = table["elsewhere - a", f"{name}, last"]
        assert shown == f"+{number(gap)} ± {number(apart, 2)}" and way == "both scores, not in pairs"
        assert verdict.startswith("no")
    assert len(table) == 3 * 2 * 2


def test_the_best_evaluation_may_be_another_one_than_the_last(tmp_path: Path) -> None:
    few, many = np.zeros((8, 1)), np.zeros((8, 1))
    few[:2], many[:6] = 1.0, 1.0
    evaluated(tmp_path / "a", {0: few, 5: many, 10: few})
    evaluated(tmp_path / "b", {0: few, 5: few, 10: few})
    table = table_of(tmp_path / "a", tmp_path / "b")
    assert table["b - a", "eval/accuracy, last"] == ("0 ± 0", "8 prompts in pairs", "no: it may be chance")
    assert table["b - a", "eval/accuracy, best"][0].startswith("-0.5 ± ")
    (title,) = [
        one.title for one in compare_runs([tmp_path / "a", tmp_path / "b"], None) if one.rows[0][1] == "b - a"
    ]
    assert title == "differences of evaluations"


@pytest.mark.parametrize("shared", [True, False])
def test_chance_alone_is_rarely_taken_for_a_difference(tmp_path: Path, shared: bool) -> None:
    """Two runs of one policy: about one difference of twenty is larger than twice its error."""
    wrong = 0
    for trial in range(80):
        places = [tmp_path / f"{trial}-{name}" for name in "ab"]
        drawn = DRAW.random(50)
        for index, place in enumerate(places):
            easy = drawn if shared else DRAW.random(50)
            evaluated(place, {1: solved(easy, 2)}, first_prompt=0 if shared else 100 * index)
        wrong += next(iter(table_of(*places).values()))[2] == "yes"
    assert 1 <= wrong <= 10, wrong


def test_what_cannot_be_paired_is_not_and_one_prompt_has_no_error(tmp_path: Path) -> None:
    rewards = solved(DRAW.random(9), 1)
    for name in ("whole", "prefix", "lost", "plain", "single"):
        evaluated(tmp_path / name, {3: {"prefix": rewards[:5], "single": rewards[:1]}.get(name, rewards)})
    lost = RunDirectory(tmp_path / "lost").evaluation(3)
    lost.write_text("".join(line for line in lost.open() if json.loads(line)["prompt_number"] != 4))
    RunDirectory(tmp_path / "plain").evaluation(3).unlink()
    names = ("whole", "prefix", "lost", "plain", "single")
    table = table_of(*(tmp_path / name for name in names))
    ways = {other: table[f"{other} - whole", "eval/accuracy, last"][1] for other in names[1:]}
    assert ways["prefix"] == "5 prompts in pairs" and ways["lost"] == "8 prompts in pairs"
    assert ways["plain"] == ways["single"] == "both scores, not in pairs"
    assert table["single - whole", "eval/accuracy, last"][2] == "unknown: a score has no error"
    (tmp_path / "whole" / "metrics" / "learner.jsonl").write_text('{"step": 1, "reward/mean": 1.0}\n')
    assert not table_of(tmp_path / "whole", tmp_path / "plain")
