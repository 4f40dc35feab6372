"""Which rollouts of a step are kept for people to read, and what is kept about each start."""

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from asyncrl.learner import Step
from asyncrl.report.reports import dropped_records
from asyncrl.report.step_metrics import LONGEST_LAG, step_metrics
from asyncrl.run.starts import CODE_VARIABLE, code_at_start, code_of, read_starts, record_start
from asyncrl.types import Group, VersionSpan
from tests.support.steps import group, rollout, step
from tests.support.task_config import config_of


def decode(ids: object) -> str:
    return " ".join(map(str, ids))  # type: ignore[call-overload]


def step_with(*rejected: tuple[Group, str]) -> Step:
    base = step(rollout(a=1.0))
    return replace(base, collected=replace(base.collected, rejected=rejected))


def test_of_the_dropped_groups_each_reason_is_shown_before_any_is_shown_twice():
    rejected = [(group([0.0, 0.0], [1, 2], ticket), "zero_variance") for ticket in range(10, 20)]
    dead = Group.dead(7, "reward: timed out", generator_id="g1", version=3)
    taken = step_with(*rejected, (group([0.2, 0.9], [3, 4], 5), "stale"), (dead, "dead: reward: timed out"))
    found = [(record.ticket_id, record.reason) for record in dropped_records(taken, decode, 4)]
    assert found == [
        (10, "zero_variance"),
        (5, "stale"),
        (7, "dead: reward: timed out"),
        (11, "zero_variance"),
    ]
    assert dropped_records(taken, decode, 0) == [] == dropped_records(step_with(), decode, 4)
    assert len(dropped_records(taken, decode, 99)) == 12


def test_a_dropped_group_is_shown_by_its_best_rollout_and_a_dead_one_by_its_reason_alone():
    stale, dead = dropped_records(
        step_with(
            (group([0.2, 0.9, 0.1], [3, 4, 5]), "stale"),
            (Group.dead(7, "r", generator_id="g1", version=3), "dead: r"),
        ),
        decode,
        9,
    )
    assert (stale.kind, stale.reward, stale.response.strip(), stale.versions) == (
        "dropped",
        0.9,
        "0 0 0 0",
        [(0, 4)],
    )
    assert (
        math.isnan(stale.advantage)
        and (dead.response, dead.generator_id) == ("", "g1")
        and math.isnan(dead.reward)
    )


def test_histograms_of_lag_agree_with_the_means_and_their_last_bin_is_open():
    """Tokens of versions 0 to 3 in groups that ended with version 3 and are trained as version 9 or 40."""
    spans = tuple(VersionSpan(version, tokens) for version, tokens in ((0, 4), (2, 3), (3, 3)))
    one = replace(
        rollout(a=1.0),
        response_ids=np.zeros(10, np.int32),
        action_mask=np.array([True] * 9 + [False]),
        behaviour_logprobs=np.zeros(10, np.float32),
        version_spans=spans,
    )
    for trained, in_queue in ((9, 6), (40, LONGEST_LAG)):
        base = step(one)
        collected = replace(base.collected, groups=(replace(base.collected.groups[0], finished_version=3),))
        metrics = step_metrics(replace(base, version=trained + 1, collected=collected))
        flight = {
            int(name.split("/")[2]): value
            for name, value in metrics.items()
            if name.startswith("staleness/in_flight/")
        }
        queue = {
            int(name.split("/")[2]): value
            for name, value in metrics.items()
            if name.startswith("staleness/in_queue/")
        }
        assert flight == pytest.approx({0: 2 / 9, 1: 3 / 9, 2: 0.0, 3: 4 / 9})
        assert queue == pytest.approx({**dict.fromkeys(range(in_queue), 0.0), in_queue: 1.0})
        assert sum(steps * share for steps, share in flight.items()) == pytest.approx(
            metrics["staleness/in_flight"]
        )


def test_starts_are_kept_in_order_with_their_software(tmp_path: Path):
    path = tmp_path / "starts.jsonl"
    assert read_starts(path) == []
    record_start(path, 0, None)
    record_start(path, 12, "GPU of a kind")
    first, second = read_starts(path)
    assert (first.step, second.step) == (0, 12) and first.time <= second.time
    assert (
        second.hardware.endswith("GPU of a kind") and {"python", "torch", "asyncrl"} <= first.versions.keys()
    )
    assert (
        len(path.read_text().splitlines()) == 2 and json.loads(path.read_text().splitlines()[1])["step"] == 12
    )


def test_data_that_a_command_names_is_no_code(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data, programs = ("rows.jsonl", "notes", "weights.bin"), ("agent.py", "helper.SH", "tool")
    for name in (*data, *programs):
        (tmp_path / name).write_text("#!/bin/sh\n" if name == "tool" else "1")
    command = ["python", "agent.py", "--rows", *data, "helper.SH", "tool", "gone.py", ""]
    command += ["x" * 300, "y" * 300 + ".py"]
    config = config_of(environment={"command": command}, reward={"functions": [{"function": "gsm8k"}]})
    served = config_of(
        environment={"uses": ["mcp:python agent.py rows.jsonl helper.SH tool"]},
        reward={"functions": [{"function": "gsm8k"}]},
    )
    before = code_of(config)
    assert [one.rpartition(" ")[0] for one in before] == sorted(programs) and code_of(served) == before
    for name in data:
        (tmp_path / name).write_text("2")
    assert code_of(config) == before
    (tmp_path / "tool").write_text("#!/bin/sh\nexit 1\n")
    assert code_of(config) != before


def test_a_start_says_which_files_of_user_code_have_changed(tmp_path: Path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    for name in ("odd.py", "game.py", "agent.py", "server.py"):
        (tmp_path / name).write_text("A = 1")
    reward = {"functions": [{"function": "odd.py:odd"}, {"function": "gsm8k"}]}
    config = config_of(reward=reward, environment={"uses": ["game:play", "mcp:python server.py"]})
    agents = config_of(reward=reward, environment={"command": ["python", "agent.py"]})
    digest = hashlib.sha256(b"A = 1").hexdigest()[:16]
    before = code_of(config)
    assert before == tuple(f"{name}.py {digest}" for name in ("game", "odd", "server"))
    assert code_of(agents) == tuple(f"{name}.py {digest}" for name in ("agent", "odd"))
    (tmp_path / "game.py").write_text("A = 2")
    given = {CODE_VARIABLE: json.dumps(before)}
    assert code_at_start(config, given) == before, "a learner that is started again within the run"
    starts = tmp_path / "starts.jsonl"
    for number, code in enumerate((before, before, code_at_start(config, {}))):
        assert "changed" not in caplog.text
        record_start(starts, number, None, code)
    assert "game.py changed since the run was last started: rewards before step 2" in caplog.text
    assert [start.code[1:] == before[1:] for start in read_starts(starts)] == [True] * 3
