"""`asyncrl play`: the pieces of an episode are its tokens, in order, by who said them and which weights."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from asyncrl.algo.trainable import GroupLimits
from asyncrl.buffer.lanes import group_limits
from asyncrl.engine.episodes import EpisodeFailed
from asyncrl.errors import AsyncRLError, ConfigError, RewardError
from asyncrl.hosting.environment import PARENT_VARIABLE
from asyncrl.results import engine_process, play
from asyncrl.results.play import pieces, shown
from asyncrl.rewards.reward_process import Divisible
from asyncrl.types import Group, Rollout, Turns, VersionSpan
from tests.support.characters import character_tokenizer
from tests.support.task_config import config_of

ROLLOUT = Rollout(
    prompt_ids=np.array([1, 2], np.int32),
    response_ids=np.arange(10, 18, dtype=np.int32),
    action_mask=np.array([1, 1, 0, 0, 1, 1, 1, 1], np.bool_),
    behaviour_logprobs=np.zeros(8, np.float32),
    version_spans=(VersionSpan(3, 5), VersionSpan(4, 3)),
    finish_reason="turns",
    reward=0.5,
    reward_parts={"environment": 1.0},
    turns=Turns(ends=np.array([2, 8], np.int32)),
)


def test_pieces_are_runs_of_one_speaker_and_one_version():
    assert list(pieces(ROLLOUT)) == [
        ("action v3", [10, 11]),
        ("context v3", [12, 13]),
        ("action v3", [14]),
        ("action v4", [15, 16, 17]),
    ]


def test_an_episode_is_shown_with_its_text_ids_versions_and_reward():
    group = Group(
        ticket_id=1,
        rollouts=(ROLLOUT, ROLLOUT),
        generator_id="play",
        finished_version=4,
        episode_of=np.zeros(2, np.int32),
        episode_metrics={"turns": np.array([2.0], np.float32)},
    )
    lines = list(shown(group, {"secret": 17}, lambda ids: "".join(chr(87 + one) for one in ids)))
    assert lines[0] == 'row {"secret": "17"}'
    assert "  sequence 2 of 2" in lines and lines.count('  context v3  "cd"  [12 13]') == 2
    assert '  action v4   "fgh"  [15 16 17]' in lines
    assert lines[-1] == "  turns: reward 0.5 (environment 1); turns 2"


def test_no_text_of_an_episode_moves_the_cursor_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    one = replace(ROLLOUT, finish_reason="stop", reward=1.0, reward_parts={})
    metrics = {"b\x7f": np.array([1.0], np.float32)}
    group = Group(
        ticket_id=1, rollouts=(one,), generator_id="play", finished_version=4, episode_metrics=metrics
    )
    lines = list(shown(group, {"a": "\x9b2J"}, lambda ids: "\x1b[2J\u202e\n"))
    monkeypatch.setattr(play, "ask", lambda *_: lines)
    assert list(play.play_rows(Path("task.yaml"), [], 1)) == [
        'row {"a": "\\u009b2J"}',
        '  prompt      "\\u001b[2J\\u202e\\n"  [1 2]',
        '  action v3   "\\u001b[2J\\u202e\\n"  [10 11]',
        '  context v3  "\\u001b[2J\\u202e\\n"  [12 13]',
        '  action v3   "\\u001b[2J\\u202e\\n"  [14]',
        '  action v4   "\\u001b[2J\\u202e\\n"  [15 16 17]',
        "  stop: reward 1 (); b␡ 1",
    ]


def test_no_teacher_is_asked(tmp_path, monkeypatch):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    model = character_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama", "vocab_size": 64}')
    config = config_of(
        model={"path": model},
        data={"train": str(rows)},
        algorithm={"advantage": "distill", "reference": {"template": "{answer}{prompt}", "scorers": 1}},
    )
    asked = []

    async def group(prompt: object, ticket: int, limits: GroupLimits, spec: object) -> Group:
        asked.append(limits.required)
        return Group(ticket_id=1, rollouts=(ROLLOUT,), generator_id="play", finished_version=0)

    @asynccontextmanager
    async def sampler_of(*_: object) -> AsyncIterator[SimpleNamespace]:
        yield SimpleNamespace(group=group)

    monkeypatch.setattr(play, "sampler_of", sampler_of)
    asyncio.run(play._play(config, "1"))
    assert group_limits(config, 64)[0].required and asked == [()]


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (EpisodeFailed("line 3 of task.py", "died"), RewardError),
        (Divisible("line 3 of task.py"), RewardError),
        (ConfigError("line 3 of task.py"), ConfigError),
    ],
)
def test_an_error_keeps_its_message_wherever_its_class_is_defined(
    error: AsyncRLError, raised: type[AsyncRLError], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(config: object) -> None:
        raise error

    def status_of(argv: list[str]) -> object:
        monkeypatch.setattr(sys, "argv", argv[argv.index("m") :])
        with pytest.raises(SystemExit) as ended:
            engine_process.serve(work)
        return ended.value.code

    monkeypatch.setenv(PARENT_VARIABLE, "1")
    monkeypatch.setattr(engine_process, "die_with_parent", lambda pid: None)
    monkeypatch.setattr(engine_process, "load_config", lambda path, overrides: None)
    monkeypatch.setattr(engine_process, "_status_of", status_of)
    with pytest.raises(raised, match=r"^line 3 of task\.py$") as found:
        engine_process.ask("m", Path("task.yaml"), [])
    assert type(found.value) is raised
