"""The worked examples of docs/planes are what the program computes."""

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from asyncrl.algo.advantages import rloo
from asyncrl.algo.staleness import choose, credit_limit, lag_bound, minimum_version
from asyncrl.batch.estimate import Estimator
from asyncrl.buffer.ledger import Ledger
from asyncrl.control.base import STATES
from asyncrl.control.membership import Member
from asyncrl.heartbeats import Heartbeats
from asyncrl.lineage import Weights
from asyncrl.session.tree import Session
from asyncrl.types import Group, Rollout, version_spans

MINUS = "\N{MINUS SIGN}"
PLANES = Path(__file__).parents[2] / "docs" / "planes"


def rows(page: str, columns: int) -> list[list[str]]:
    """The cells of the tables with so many columns below "Worked example"."""
    text = (PLANES / f"{page}.md").read_text(encoding="utf-8").split("## Worked example")[1].split("\n## ")[0]
    found = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    return [cells for cells in found if len(cells) == columns][2:]


def test_credit_and_window_of_the_sampling_page() -> None:
    table = [[int(cell) for cell in cells[1:5]] for cells in rows("sampling", 6)]
    assert len(table) == 7
    for trained, rejected, _, limit in table:
        assert credit_limit(trained, max_lag=2, groups=4, rejected=rejected) == limit
    assert lag_bound(2, window=4, groups=4) == 3
    assert choose([1, 3, 4, 5], anchor=2, count=4, window=4) == [1, 3, 4, 5]
    assert choose([1, 3, 4, 5], anchor=2, count=4, window=3) is None
    assert choose([6, 7, 8], anchor=2, count=4, window=4) is None
    assert choose([2, 6, 7, 8], anchor=9, count=4, window=4) == [2, 6, 7, 8]
    needed = {ticket: minimum_version(ticket, version=2, limit=21, groups=4) for ticket in range(14, 22)}
    assert [ticket for ticket, version in needed.items() if version == 2] == [18, 19, 20, 21]
    assert {minimum_version(ticket, version=1, limit=16, groups=4) for ticket in range(13, 17)} == {1}


def test_states_of_the_control_page() -> None:
    """That before the first heartbeat, and those that heartbeats tell."""
    found = {Member(hello=None, heard_at_s=0.0).state}
    for updating, version, sampling, holds in itertools.product(
        (True, False), (-1, 0), (True, False), (0, 1)
    ):
        heartbeats = Heartbeats(
            engine=None,
            sampler=SimpleNamespace(clock=SimpleNamespace(sampling=sampling)),
            weights=SimpleNamespace(is_updating=updating, version=version),
            control=None,
            tracker=None,
            every_s=1.0,
            duty=None,
            holds_tickets=lambda holds=holds: bool(holds),
        )
        found.add(heartbeats._state())
    text = (PLANES / "control.md").read_text(encoding="utf-8").split("## States of a member")[1]
    assert set(re.findall(r"^\| `(\w+)` \|", text.split("\n## ")[0], re.MULTILINE)) == {*STATES} == found


def test_ledger_of_the_buffer_page() -> None:
    ledger, takes = Ledger(), [(1, 2), (3, 5), (4, 6), (7, 8)]
    shown = [cells[1] for cells in rows("buffer", 4)]
    for ids in takes:
        ledger.consume(ids)
        above = f", above {{{', '.join(map(str, sorted(ledger.above)))}}}" if ledger.above else ""
        state = f"takes {ledger.takes}, watermark {ledger.watermark}{above}"
        assert state in shown


def test_numbers_of_the_learning_page() -> None:
    text = (PLANES / "learning.md").read_text(encoding="utf-8")
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    advantage = float(((rewards - rewards.mean()) / rewards.std())[0])
    assert f"{advantage:.3f}" in text and f"{float(rewards.std()):.3f}" in text
    table = [[float(cell.replace(MINUS, "-")) for cell in cells] for cells in rows("learning", 7)]
    assert len(table) == 4
    for _, _, behaviour, proximal, ratio, weight, product in table:
        assert ratio == pytest.approx(math.exp(proximal - behaviour), abs=5e-4)
        assert weight == pytest.approx(min(ratio, 2.0), abs=5e-4)
        assert product == pytest.approx(weight * advantage, abs=2e-3)
    one_of_four = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    shown = ", ".join(f"{x:.1f}" for x in ((one_of_four - one_of_four.mean()) / one_of_four.std()).tolist())
    assert shown.replace("-", MINUS) in " ".join(text.split())


class _Digits:
    """A tokenizer whose tokens are digits, with a template that writes 9 behind each answer."""

    stop_ids = frozenset({9})
    special_texts: frozenset[str] = frozenset()
    opening_ids = ()

    def render(self, messages, tools=(), *, generation):
        return "".join(one["content"] + "9" * (one["role"] == "assistant") for one in messages)

    def encode(self, text, *, inside=False):
        return [int(digit) for digit in text]

    def decode(self, ids):
        return "".join(map(str, ids))


def numbers(cell: str) -> list[int]:
    return [int(one) for one in cell.split()]


def _played() -> tuple[Rollout, ...]:
    """The sequences of the turns in the first table of the episodes page."""
    session, conversations = Session(_Digits()), []
    for _, continues, prompt, sampled, versions in rows("episodes", 5)[:3]:
        before, ids = conversations[int(continues)] if continues else ([], [])
        new = "".join(map(str, numbers(prompt)[len(ids) :]))
        messages = [*before, {"role": "user", "content": new}]
        request = session.request(messages)
        assert list(request.prompt_ids) == numbers(prompt)
        response = np.array(numbers(sampled), dtype=np.int32)
        rollout = Rollout(
            prompt_ids=np.array(request.prompt_ids, dtype=np.int32),
            response_ids=response,
            action_mask=np.ones(len(response), dtype=np.bool_),
            behaviour_logprobs=np.full(len(response), -0.5, dtype=np.float32),
            version_spans=version_spans(Weights(version) for version in numbers(versions)),
            finish_reason="stop",
        )
        answer = {"role": "assistant", "content": "".join(sampled.split()[:-1])}
        session.record(request, rollout, answer)
        conversations.append(([*messages, answer], [*request.prompt_ids, *response.tolist()]))
    return session.rollouts()


def test_sequences_of_the_episodes_page() -> None:
    table = rows("episodes", 5)[5:]  # behind the three turns and the head of the second table
    sequences = _played()
    assert len(table) == len(sequences) == 2
    for (_, response, trained, versions, ends), sequence in zip(table, sequences, strict=True):
        assert sequence.prompt_ids.tolist() == [1, 2]
        assert sequence.response_ids.tolist() == numbers(response)
        assert sequence.action_mask.astype(int).tolist() == numbers(trained)
        assert sequence.versions.tolist() == numbers(versions)
        turns = [len(sequence.response_ids)] if sequence.turns is None else sequence.turns.ends.tolist()
        assert turns == numbers(ends)


def test_an_episode_of_the_page_counts_once() -> None:
    branches = [replace(one, reward=1.0) for one in _played()]
    sibling = replace(branches[0], reward=0.0)
    group = Group(
        ticket_id=1,
        rollouts=(*branches, sibling),
        generator_id="g",
        finished_version=8,
        episode_of=np.array([0, 0, 1], dtype=np.int32),
    )
    estimator = Estimator(advantage=rloo, max_response_tokens=8)
    rewards, advantages_T, _ = estimator.estimate([group], {}, 0.0)
    assert advantages_T.tolist() == [1.0] * 6 + [-1.0] * 4
    assert rewards.lengths_S.tolist() == [6, 4]
