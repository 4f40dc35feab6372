"""A whole run whose rewards come from a judge that fails in many ways, and what it leaves behind."""

import json
import math
from collections import Counter
from dataclasses import asdict

import numpy as np
import pytest

from asyncrl.cli.screens import full_lines
from asyncrl.engine.sampler import with_judgements
from asyncrl.report.reports import eval_records
from asyncrl.rewards.base import Judgement, Score
from asyncrl.telemetry.base import sample_from
from asyncrl.types import Group
from asyncrl.wire.group_frames import decode_group, encode_group
from tests.support.judge_server import Asked, Reply, chat, served
from tests.support.steps import rollout
from tests.support.waiting import wait_until
from tests.support.whole_run import call, rows, start, steps, tiny_run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

FAULTS = [
    Reply({}, 429, {"retry-after": "0.1"}),
    Reply({}, 503),
    Reply(b"\xff"),
    chat("no idea"),
    Reply(fault="drop"),
]


def test_a_run_survives_a_judge_that_fails_and_shows_its_words(tmp_path):
    """Every tenth request fails for good, every fourth needs another one; no score of any of them is 0."""
    template = tmp_path / "judge.jinja"
    template.write_text("Rate {{ response }}.")

    run = tmp_path / "runs" / "whole"

    def counted() -> Counter[str]:
        """The counters in the newest lines of both generators."""
        total: Counter[str] = Counter()
        for file in (run / "metrics").glob("g*.jsonl"):
            newest = next(reversed(rows(run, file.stem)), {})
            total.update({key: value for key, value in newest.items() if key.startswith("reward_")})
        return total

    def are_counted() -> bool:
        return min(counted()[name] for name in ("reward_retries", "reward_failures_refused")) > 0

    def answer(asked: Asked, number: int) -> Reply:
        if number >= 20:  # a short run would end before its generators write their second line
            wait_until(are_counted, within_s=60.0)
        if number % 10 == 9:
            return Reply({"error": "no"}, 400)
        return FAULTS[number // 4 % len(FAULTS)] if number % 4 == 3 else chat('Fine. {"score": 1.5}')

    with served(answer) as server, tiny_run(tmp_path) as config:
        params = {"url": server.url, "model": "m", "prompt": str(template)}
        functions = json.dumps([{"function": "llm_judge", "params": params, "weight": 2.0}])
        process = start(
            config,
            f"reward.functions={functions}",
            "learner.steps=4",
            "reward.attempts=9",
            "reward.timeout_s=90",
        )
        assert process.wait(timeout=380) == 0, (tmp_path / "up.out").read_text()[-3000:]
        calls = len(server.asked)
    assert steps(run) == [1, 2, 3, 4]
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    trained = [one for one in samples if one["kind"] == "train"]
    assert trained and {one["reward"] for one in trained} == {3.0}
    for one in trained:
        (said,) = one["judgements"]
        assert (
            said["answer"] == 'Fine. {"score": 1.5}' and said["score"] == 1.5 and said["part"] == "llm_judge"
        )
        assert said["prompt"].startswith("Rate ")
    assert "judge llm_judge 1.5" in call("samples", str(run)) and '| Fine. {"score"' in call(
        "samples", str(run)
    )
    assert 0 < counted()["reward_calls"] <= calls


def test_what_a_judge_said_is_shown_below_the_episode_that_it_judged():
    said = Judgement("judge", "is it\ngood?", "\x1b[31myes", 0.5)
    scores = [Score(total=1.0, parts={}), Score(total=2.0, parts={}, judgements=(said, said))]
    group = Group(
        ticket_id=1, rollouts=(rollout(a=1.0), rollout(a=2.0)), generator_id="g0", finished_version=0
    )
    judged = Group(
        **{name: getattr(group, name) for name in group.__slots__}
        | {"recorded": with_judgements(group, scores)}
    )
    sent = decode_group(encode_group(judged))
    first, _ = eval_records([sent], 1, str)
    assert first.judgements == []
    second = Group(
        **{name: getattr(sent, name) for name in sent.__slots__} | {"rollouts": sent.rollouts[::-1]}
    )
    assert with_judgements(group, scores[:1]) == {} and second.rollouts[0].reward == 2.0
    swapped = Group(
        **{name: getattr(group, name) for name in group.__slots__}
        | {"recorded": with_judgements(group, scores[::-1])}
    )
    record, _ = eval_records([swapped], 1, str)
    assert record.judgements == [asdict(said)] * 2
    lines = [line.plain for line in full_lines(sample_from(json.loads(json.dumps(asdict(record)))))]
    assert (
        lines[-4:] == ["  judge judge 0.5", "  ? is it", "  ? good?", lines[-1]] and "\x1b" not in lines[-1]
    )


@pytest.mark.parametrize("column", [b"\xff", b"{}", b"[[1], [2]]", b'[[{"part": 1}]]', b"[" * 9999, b""])
def test_a_column_of_judgements_can_hold_any_bytes(column):
    recorded = {"judgements": np.frombuffer(column, np.uint8)}
    group = Group(
        ticket_id=1, rollouts=(rollout(a=1.0),), generator_id="g0", finished_version=0, recorded=recorded
    )
    (record,) = eval_records([group], 1, str)
    assert record.judgements == [] and not math.isnan(record.reward)
