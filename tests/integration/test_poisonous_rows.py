"""A whole run with user code that no run should suffer from: by what its rows do, and by the names of its files.

Tickets of such rows die, and nothing else does.
"""

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.support.whole_run import rows, start, steps, tiny_run

pytestmark = pytest.mark.integration
# How the reason of each kind of row's group goes on; groups of the kinds without one are trained.
KINDS = {
    "text": "the rollout raised ValueError: no such item: \\?",
    "unprintable": "the rollout raised Unprintable, which has no text",
    "metric": "an episode metric has the name '\\?'",
    "state": "the state of a turn is '\\?'",
    "nan": "`rollout` returned the reward nan",
    "huge": "the rollout raised ValueError: found [0-9,]+ bytes; at most 16,777,216 are allowed",
    "reward": "reward part `judged` raised ValueError: \\?",
    "said": "",
    "part": "",
}
CODE = """
class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")

async def play(session, kind, prompt):
    await session.complete("\\ud83d" if kind == "said" else prompt)
    if kind == "text":
        raise ValueError("no such item: \\ud83d")
    if kind == "unprintable":
        raise Unprintable
    if kind == "metric":
        session.metrics["\\udc80"] = 1.0
    if kind == "state":
        session.score_turn(0.5, "\\ud83d")
    if kind == "huge":
        await session.complete("1" * (17 << 20))
    return {"nan": float("nan"), "part": {"\\ud83d": 1.0}}.get(kind, 0.5)

def judged(prompt, response, kind, **columns):
    if kind == "reward":
        raise ValueError("\\ud83d")
    return sum(c in "13579" for c in response) / 4
"""


# Modules that our processes import. The user's file with the code has the name of another one.
LIBRARIES = ["statistics", "types", "tokenizers", "datasets", "json", "torch"]


def test_poisonous_rows_are_rejected_with_their_reasons_and_every_step_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in LIBRARIES:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the user')\n")
    with tiny_run(tmp_path) as config:
        kinds = [*KINDS, *["good"] * 22]
        data = [{"prompt": f"{number + 10}+1=", "kind": kind} for number, kind in enumerate(kinds)]
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
        (tmp_path / "queue.py").write_text(CODE)
        values = yaml.safe_load(config.read_text())
        del values["eval"], values["data"]["eval"]
        values["environment"] = {"uses": f"{tmp_path}/queue.py:play", "replays": 0}
        values["reward"]["functions"] = [{"function": f"{tmp_path}/queue.py:judged"}]
        # More groups than good rows, so that each row has its turn.
        values["learner"]["steps"] = 8
        config.write_text(yaml.safe_dump(values))
        said = tmp_path / "up.out"
        assert start(config).wait(400) == 0, said.read_text()[-3000:]
    run = tmp_path / "runs" / "whole"
    assert steps(run) == list(range(1, 9))
    logs = "".join(path.read_text() for path in (run / "logs").glob("g*.jsonl"))
    failed = [line["event"] for line in map(json.loads, logs.splitlines()) if " failed: " in line["event"]]
    reasons = list(filter(None, KINDS.values()))
    counts = {reason: sum(bool(re.search(reason, event)) for event in failed) for reason in reasons}
    assert all(count >= 3 for count in counts.values()) and sum(counts.values()) == len(failed), counts
    assert sum(row.get("groups/rejected_dead", 0) for row in rows(run)) >= len(reasons)
    assert " died" not in said.read_text()
