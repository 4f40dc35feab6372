"""A run with two sources and two sets, each with rewards of its own, which is resumed in the middle.

The oracle is the text: a digit at the beginning of each prompt says which row it is of, and each reward
function's score follows from the response alone.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.whole_run import call, rows, start, steps, tiny_run, wait

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

REWARDS = """
def odd(prompt, response, kind):
    assert kind == "odd", prompt
    return sum(c in "13579" for c in response) / 4

def even(prompt, response, kind):
    assert kind == "even", prompt
    return sum(c in "02468" for c in response) / 4

def length(prompt, response, want):
    return 1.0 if len(response) == want else 0.25

class Digits:
    def reset(self, **row):
        return row["prompt"]

    def step(self, response):
        return "", 0.5 * any(c.isdigit() for c in response), True
"""
SCORES: dict[str, Callable[[str], float]] = {
    "odd": lambda text: sum(c in "13579" for c in text) / 4,
    "even": lambda text: sum(c in "02468" for c in text) / 4,
    "length": lambda text: 1.0 if len(text) == 3 else 0.25,
}


def write(path: Path, first: int, **columns: Any) -> str:
    """Rows whose prompts begin with this digit."""
    rows = ({"prompt": f"{first}+{second}=", **columns} for second in range(10))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Path]:
    with tiny_run(tmp_path) as path:
        (tmp_path / "mine.py").write_text(REWARDS)
        values = yaml.safe_load(path.read_text())

        def reward(name: str) -> list[dict[str, str]]:
            return [{"function": f"{tmp_path}/mine.py:{name}"}]

        values["reward"] = {"functions": reward("odd")}
        values["data"] = {
            "train": [
                {"path": write(tmp_path / "first.jsonl", 1, kind="odd"), "weight": 3},
                {"path": write(tmp_path / "second.jsonl", 2, kind="even"), "reward": reward("even")},
            ],
            "eval": [
                {
                    "path": write(tmp_path / "a.jsonl", 3, want=3),
                    "name": "long",
                    "reward": reward("length"),
                    "every": 2,
                    "limit": 4,
                    "samples": 2,
                    "temperature": 1.0,
                },
                {
                    "path": write(tmp_path / "b.jsonl", 4),
                    "name": "played",
                    "reward": [],
                    "environment": {"uses": f"{tmp_path}/mine.py:Digits"},
                    "limit": 3,
                },
            ],
        }
        values["learner"]["steps"] = 7
        values["telemetry"] = {"samples_per_step": 64}
        # A value that comes after its checkpoint was removed is not judged.
        values["checkpoint"] = {"every": 1, "keep": 8, "best": "eval/long/reward_mean"}
        path.write_text(yaml.safe_dump(values))
        yield path


def evaluated(run: Path, name: str) -> list[int]:
    return [int(row["step"]) for row in rows(run) if f"eval/{name}/accuracy" in row]


def test_each_source_and_set_is_scored_by_its_own_reward_and_keeps_its_interval_over_a_resume(
    config: Path,
) -> None:
    run = config.parent / "runs" / "whole"
    up = start(config)
    wait(lambda: len(steps(run)) >= 3, up, config)
    up.terminate()
    up.wait(timeout=200)
    assert len(steps(run)) < 7
    up = start(config)
    assert up.wait(timeout=400) == 0, (config.parent / "up.out").read_text()[-3000:]
    assert steps(run) == [1, 2, 3, 4, 5, 6, 7]

    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    trained = [sample for sample in samples if sample["kind"] == "train"]
    for sample in trained:
        name = {"1": "odd", "2": "even"}[sample["prompt"][0]]
        assert sample["parts"] == {name: SCORES[name](sample["response"])}
        assert sample["reward"] == sample["parts"][name]
    assert {sample["prompt"][0] for sample in trained} == {"1", "2"}, "both sources are trained on"
    last_step = next(row for row in reversed(rows(run)) if "reward/second/mean" in row)
    assert {"reward/first/mean", "reward/odd/mean", "reward/even/mean"} <= last_step.keys()

    # The last weights are always evaluated.
    assert evaluated(run, "long") == [0, 2, 4, 6, 7]
    assert evaluated(run, "played") == [0, 3, 6, 7]
    for step in evaluated(run, "long"):
        text = (run / "evaluations" / "long" / f"step-{step:06d}.jsonl").read_text()
        answers = [json.loads(line) for line in text.splitlines()]
        assert len(answers) == 4 * 2 and {one["prompt"][0] for one in answers} == {"3"}
        assert all(one["parts"] == {"length": SCORES["length"](one["response"])} for one in answers)
        assert all(one["eval_set"] == "long" for one in answers)
        (row,) = [row for row in rows(run) if row["step"] == step and "eval/long/accuracy" in row]
        assert row["eval/long/reward_mean"] == pytest.approx(sum(one["reward"] for one in answers) / 8)
        assert row["eval/long/prompts"] == 4 and "eval/long/pass@2" in row
    for step in evaluated(run, "played"):
        text = (run / "evaluations" / "played" / f"step-{step:06d}.jsonl").read_text()
        answers = [json.loads(line) for line in text.splitlines()]
        assert len(answers) == 3 and {one["prompt"][0] for one in answers} == {"4"}
        for one in answers:
            score = 0.5 * any(c.isdigit() for c in one["response"])
            assert one["parts"] == {"environment": score} and one["reward"] == score

    audit = json.loads(call("audit", str(run)))
    assert (
        audit["missing"] == audit["evaluation long"]["missing"] == audit["evaluation played"]["missing"] == 0
    )
    best = json.loads((run / "checkpoints" / "BEST").read_text())
    values = {
        int(row["step"]): row["eval/long/reward_mean"] for row in rows(run) if "eval/long/accuracy" in row
    }
    kept = {step: value for step, value in values.items() if step > 0}
    assert best["metric"] == "eval/long/reward_mean" and best["value"] == max(kept.values())
    assert "held-out long" in (config.parent / "up.out").read_text()
    call("report", str(run))
    assert "eval/played/accuracy" in (run / "report.html").read_text()
    assert "held-out played" in call("samples", str(run), "--kind", "eval")

    # Before training, and on one set only: no process of another task is started.
    (config.parent / "other.py").write_text("raise SystemExit('must not be loaded')")
    found = json.loads(
        call(
            "eval",
            str(config.parent / "model"),
            "--config",
            str(config),
            f"reward.functions=[{{function: '{config.parent}/other.py:nothing', weight: 1}}]",
            "--only",
            "long",
        )
    )
    assert {name.split("/")[1] for name in found} == {"long"} and found["eval/long/prompts"] == 4


CHOSEN = """
def even(row):
    return row["second"] % 2 == 0

def written(row):
    return {"prompt": f"{row['first']}+{row['second']}=", "want": row["first"] + row["second"]}

def closeness(prompt, response, want):
    first, second = prompt.rstrip("=").split("+")
    assert int(first) + int(second) == want, prompt
    return want / 100
"""


def test_rows_from_disk_are_chosen_and_made_by_functions_before_they_are_trained_on(tmp_path: Path) -> None:
    """The functions and the reward see whole rows of two files, of which no column is a prompt."""
    with tiny_run(tmp_path) as path:
        (tmp_path / "mine.py").write_text(CHOSEN)
        for first in (3, 4):
            lines = (json.dumps({"first": first, "second": second}) + "\n" for second in range(8))
            (tmp_path / f"part-{first}.jsonl").write_text("".join(lines))
        values = yaml.safe_load(path.read_text())
        values["reward"] = {"functions": [{"function": f"{tmp_path}/mine.py:closeness"}]}
        values["data"] = {
            "train": f"{tmp_path}/part-*.jsonl",
            "filter": f"{tmp_path}/mine.py:even",
            "map": f"{tmp_path}/mine.py:written",
        }
        values["learner"]["steps"] = 3
        values["telemetry"] = {"samples_per_step": 64}
        path.write_text(yaml.safe_dump(values))
        up = start(path)
        assert up.wait(timeout=400) == 0, (tmp_path / "up.out").read_text()[-3000:]
        run = tmp_path / "runs" / "whole"
        samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert steps(run) == [1, 2, 3] and samples
    wanted = {f"{first}+{second}=": first + second for first in (3, 4) for second in (0, 2, 4, 6)}
    for sample in samples:
        assert sample["reward"] == pytest.approx(wanted[sample["prompt"]] / 100)
    assert {sample["prompt"] for sample in samples} == wanted.keys(), "each row once in a pass of the data"
