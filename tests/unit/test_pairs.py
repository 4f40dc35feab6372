"""Preferences of a run: best and worst of each group that differ, once per step, in TRL's columns."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Metaspace
from tokenizers.models import WordLevel

from asyncrl.errors import RunError
from asyncrl.learner import Step
from asyncrl.report.reports import PairsFile, eval_records
from asyncrl.results.recorded import pairs_of
from asyncrl.types import Prompt
from tests.support.steps import group, step

PROMPT = Prompt(token_ids=(1,), text="1+1=", row={})


def of(version: int, *rewards: list[float]) -> Step:
    """A step of groups with these rewards; the third answer of each is longer by one token, and so on."""
    base = step(*group([0.0], [1]).rollouts)
    groups = tuple(
        group(one, [3 + i for i in range(len(one))], ticket) for ticket, one in enumerate(rewards, 1)
    )
    rewards_S = torch.tensor([reward for one in rewards for reward in one])
    shaped = replace(
        base.plan.rewards,
        rewards_S=rewards_S,
        group_S=torch.zeros(len(rewards_S), dtype=torch.int64),
        lengths_S=torch.zeros(len(rewards_S), dtype=torch.int64),
        sequence_T=torch.zeros(0, dtype=torch.int64),
        parts={},
    )
    return replace(
        base,
        version=version,
        plan=replace(base.plan, rewards=shaped),
        collected=replace(base.collected, groups=groups),
    )


def length(ids: object) -> str:
    return f"{len(ids)} tokens"  # type: ignore[arg-type]


def opened(path: Path, *, step: int = 0, prompt: Prompt = PROMPT) -> PairsFile:
    ids = np.array(prompt.token_ids, np.int32).tobytes()
    return PairsFile(path, {ids: prompt.messages or prompt.text}, length, step=step)


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_best_and_worst_of_each_group_that_differ_are_written(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    opened(path).write(of(3, [0.5, 0.1, 0.9], [1.0, 1.0], [0.0, 0.2]))
    assert rows(path) == [
        {"step": 3, "prompt": "1+1=", "chosen": "5 tokens", "rejected": "4 tokens"},
        {"step": 3, "prompt": "1+1=", "chosen": "4 tokens", "rejected": "3 tokens"},
    ]


def test_a_conversation_is_written_as_messages(tmp_path: Path) -> None:
    asked = ({"role": "user", "content": "1+1?"},)
    path = tmp_path / "pairs.jsonl"
    opened(path, prompt=replace(PROMPT, messages=asked)).write(of(1, [1.0, 0.0]))
    (row,) = rows(path)
    assert row["prompt"] == [*asked]
    assert row["chosen"] == [{"role": "assistant", "content": "3 tokens"}]
    assert row["rejected"] == [{"role": "assistant", "content": "4 tokens"}]


def test_prompt_and_answer_together_are_the_text_that_was_sampled(tmp_path: Path) -> None:
    """Pairs and samples become rows of a stage, which tokenises a prompt and its answer as one text."""
    words = Tokenizer(WordLevel({f"\u2581w{one}": one for one in range(64)}, unk_token="\u2581w0"))
    words.decoder = Metaspace()  # as Llama 2's: without the blank that begins a text
    path, found = tmp_path / "pairs.jsonl", of(1, [1.0, 0.0])
    PairsFile(path, {np.int32(1).tobytes(): words.decode([1])}, words.decode, step=0).write(found)
    (row,) = rows(path)
    samples = [sample.response for sample in eval_records(found.collected.groups, 1, words.decode)]
    best, worst = found.collected.groups[0].rollouts
    texts = [words.decode([1, *one.response_ids.tolist()]) for one in (best, worst)]
    assert [f"{row['prompt']}{row[name]}" for name in ("chosen", "rejected")] == texts
    assert [f"{row['prompt']}{text}" for text in samples] == texts
    assert texts[0].startswith("w1 w")


@pytest.mark.parametrize("tail", [b"", b'{"step": 4, "pro', b'{"step": 4, "prompt": "x"}\n{"st'])
def test_a_resume_forgets_what_will_be_trained_again(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "pairs.jsonl"
    first = opened(path)
    for version in (1, 2, 3):
        first.write(of(version, [1.0, 0.0], [0.0, 1.0]))
    first.close()
    # What a full disk left of a line stands before the whole of it.
    path.write_bytes(path.read_bytes().replace(b'{"step": 2', b'{"step": 2, "pro\n{"step": 2', 1) + tail)
    again = opened(path, step=2)
    assert [row["step"] for row in rows(path)] == [1, 1, 2, 2]
    again.write(of(3, [1.0, 0.0]))
    assert [row["step"] for row in rows(path)] == [1, 1, 2, 2, 3]
    opened(path, step=3)
    assert [row["step"] for row in rows(path)] == [1, 1, 2, 2, 3]


def test_the_command_prints_the_columns_of_trl_alone(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {name: x}\n")
    with pytest.raises(RunError, match=r"found no .*pairs.jsonl; a run with telemetry.pairs: true writes it"):
        next(iter(pairs_of(tmp_path)))
    opened(tmp_path / "pairs.jsonl").write(of(1, [1.0, 0.0]))
    assert [json.loads(line) for line in pairs_of(tmp_path)] == [
        {"prompt": "1+1=", "chosen": "3 tokens", "rejected": "4 tokens"}
    ]
