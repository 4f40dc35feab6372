"""A whole run with rows, rewards and user code that no run should suffer from, one of each kind.

Tickets of such rows die, with their reasons, and nothing else does. Run with -s, this prints what was made.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from asyncrl.data.dataset import CHECKED
from tests.support.whole_run import rows, start, steps, tiny_run

pytestmark = pytest.mark.integration
# How the reason of each kind of row's group goes on; groups of the kinds without one are trained.
EPISODES = {
    "text": "the rollout raised ValueError: no such item: \\?",
    "unprintable": "the rollout raised Unprintable, which has no text",
    "metric": "session.metrics has the name '\\?'; 1 to 200 letters",
    "nan": "`rollout` returned the reward nan",
    "huge": "the rollout raised ValueError: found [0-9,]+ bytes; at most 16,777,216 are allowed",
    "reward": "reward part `judged` raised ValueError: \\?",
    "said": "",
    "state": "",
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


def run_with(config: Path, **sections: Any) -> tuple[Path, list[str]]:
    """Run the config with these sections to the end; its directory, and how tickets failed."""
    values = yaml.safe_load(config.read_text())
    del values["eval"], values["data"]["eval"]
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    config.write_text(yaml.safe_dump(values))
    said = config.parent / "up.out"
    assert start(config).wait(600) == 0, said.read_text()[-3000:]
    assert not re.search(r"\b(g[0-9]|learner\S*|store) died", said.read_text())
    run = config.parent / "runs" / "whole"
    assert steps(run) == list(range(1, values["learner"]["steps"] + 1))
    logs = "".join(path.read_text() for path in (run / "logs").glob("g*.jsonl"))
    return run, [line["event"] for line in map(json.loads, logs.splitlines()) if " failed: " in line["event"]]


def require_reasons(run: Path, failed: Sequence[str], kinds: Mapping[str, str]) -> None:
    """Each kind with a reason has failed with it, as often as tickets are tried, and nothing else has."""
    wanted = {kind: reason for kind, reason in kinds.items() if reason}
    counts = {
        kind: sum(bool(re.search(reason, event)) for event in failed) for kind, reason in wanted.items()
    }
    rejected = {
        name.removeprefix("groups/"): sum(row.get(name, 0) for row in rows(run))
        for name in sorted({name for row in rows(run) for name in row if name.startswith("groups/rejected_")})
    }
    sys.stdout.write(f"{len(steps(run))} steps; {len(kinds)} kinds of rows; {rejected}\n")
    for kind, reason in kinds.items():
        sys.stdout.write(f"{kind}: {counts.get(kind, 'trained')} {reason}\n")
    assert all(count >= 3 for count in counts.values()) and sum(counts.values()) == len(failed), (
        counts,
        sorted(set(failed)),
    )
    assert rejected["rejected_dead"] >= len(wanted)


def test_poisonous_episodes_are_rejected_with_their_reasons_and_every_step_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in LIBRARIES:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the user')\n")
    with tiny_run(tmp_path) as config:
        # 8 steps have more groups than there are good rows, so that each row has its turn.
        kinds = [*EPISODES, *["good"] * 22]
        data = [{"prompt": f"{number + 10}+1=", "kind": kind} for number, kind in enumerate(kinds)]
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
        (tmp_path / "queue.py").write_text(CODE)
        found = run_with(
            config,
            learner={"steps": 8},
            environment={"uses": f"{tmp_path}/queue.py:play", "replays": 0},
            reward={"functions": [{"function": f"{tmp_path}/queue.py:judged"}]},
        )
        require_reasons(*found, EPISODES)


def said_by(role: str, content: object, **more: object) -> list[dict[str, object]]:
    """A prompt of one chat message."""
    return [{"role": role, "content": content, **more}]


# Kind of a row -> its prompt, and how the reason goes on; without one its groups are trained. A kind that has a
# sentence in `SCORED` is scored by it, others by their odd digits. Half of these rows would stop the run before it
# begins, were they among those that are looked at.
ROWS: dict[str, tuple[object, str]] = {
    "half of a character": ("\ud83d", r"the prompt holds \\ud83d, half of a character"),
    "huge": ("1" * 200_000, "the prompt has 200000 tokens; sampling.max_prompt_tokens allows 8"),
    "null": (None, "jsonl:6: found `None`; a chat prompt is text or a list"),
    "number": (7, "found `7`; a chat prompt is text or a list"),
    "empty": (" ", "the prompt is empty"),
    "no messages": ([], r"jsonl:12: found `\[\]`; a chat prompt"),
    "message without a role": ([{"content": "1"}], r"found `\[{'content': '1'}\]`; a chat prompt"),
    "null message": ([None], r"jsonl:16: found `\[None\]`; a chat prompt"),
    "image": (said_by("user", [{"type": "image"}]), "the messages cannot be used: "),
    "answer of the assistant": (said_by("assistant", "1"), "the prompt is an answer"),
    "refused by the template": (said_by("robot", "1"), "the chat template refuses .*no robots"),
    "null keys": (said_by("user", "1+1=", name=None, tool_calls=None), ""),
    "parts": (said_by("user", [{"type": "text", "text": "1+2="}]), ""),
    "no column of the reward": ("1+3=", r"wants column\(s\) \['answer'\]"),
    "reward raises": ("1+4=", "reward part `judged` raised ValueError: wrong"),
    "reward hangs": ("1+5=", "reward part `judged` took longer than 5 s and was killed"),
    "reward ends its process": ("1+6=", r"reward part `judged`: the worker process died \(exit status 3\)"),
    "reward is NaN": ("1+7=", "reward part `judged` returned nan"),
    "reward is text": ("1+8=", "reward part `judged` returned str `one`"),
    "reward abstains": ("1+9=", "every reward function returned None for a response"),
}
SCORED = """
import os, threading

def judged(prompt, response, answer, kind):
    if kind == "reward raises":
        raise ValueError("wrong")
    if kind == "reward hangs":
        threading.Event().wait(600)
    if kind == "reward ends its process":
        os._exit(3)
    odd = sum(c in "13579" for c in response) / 4
    return {"reward is NaN": float("nan"), "reward is text": "one", "reward abstains": None}.get(kind, odd)
"""
TEMPLATE = (
    "{% for one in messages %}{% if one.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "{{ one.content }}{% endfor %}"
)
# As parquet files have them: each message has every key, and most are null.
MESSAGE = pyarrow.struct(
    {
        "role": pyarrow.string(),
        "content": pyarrow.string(),
        "tool_calls": pyarrow.list_(pyarrow.struct({"id": pyarrow.string(), "name": pyarrow.string()})),
    }
)
NESTED: dict[str, tuple[object, str]] = {
    "nested": (said_by("user", "2+1=", tool_calls=None), ""),
    "nested, no calls": (said_by("user", "2+2=", tool_calls=[]), ""),
    "nested null": (None, "row 6: found `None`; a chat prompt"),
    "nested, no messages": ([], r"row 8: found `\[\]`; a chat prompt"),
    "nested null message": ([None], r"row 10: found `\[None\]`; a chat prompt"),
    "nested null role": (said_by(None, "2+3="), r"found `\[{'content': '2\+3='}\]`"),  # type: ignore[arg-type]
    "nested null content": (said_by("user", None), r"found `\[{'role': 'user'}\]`"),
}


def rows_with(kinds: Mapping[str, tuple[object, str]], good: object) -> list[dict[str, object]]:
    """Every second row is good, and so are all behind the odd ones: more than are looked at before a run."""
    found: list[dict[str, object]] = []
    for kind, (prompt, _) in kinds.items():
        found.append({"prompt": good, "answer": "2", "kind": "good"})
        found.append({"prompt": prompt, "answer": "2", "kind": kind})
    return found + found[:1] * (CHECKED + 2 - len(found))


def test_poisonous_rows_are_rejected_with_their_reasons_and_every_step_is_made(tmp_path: Path) -> None:
    with tiny_run(tmp_path) as config:
        (tmp_path / "judge.py").write_text(SCORED)
        data = rows_with(ROWS, "1+1=")
        del next(row for row in data if row["kind"] == "no column of the reward")["answer"]
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
        nested = rows_with(NESTED, said_by("user", "2+2="))
        schema = pyarrow.schema(
            {"prompt": pyarrow.list_(MESSAGE), "answer": pyarrow.string(), "kind": pyarrow.string()}
        )
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(nested, schema=schema), tmp_path / "nested.parquet"
        )
        found = run_with(
            config,
            # Each source is read in its order, three rows of the first for one of the second.
            data={
                "train": [
                    {"path": str(tmp_path / "train.jsonl"), "weight": 3},
                    str(tmp_path / "nested.parquet"),
                ],
                "shuffle": False,
            },
            learner={"steps": 12},
            model={"chat_template": TEMPLATE},
            reward={"functions": [{"function": f"{tmp_path}/judge.py:judged"}], "timeout_s": 5},
        )
        require_reasons(*found, {kind: reason for kind, (_, reason) in (ROWS | NESTED).items()})
