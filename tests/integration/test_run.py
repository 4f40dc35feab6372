"""Whole runs as a user starts them: real store, engines and DeepSpeed learner, some killed."""

import json
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoModelForCausalLM

from asyncrl.commands.down import processes_of
from tests.support.cluster import PRIMARIES, Node, cluster
from tests.support.command import ASYNCRL
from tests.support.whole_run import (
    B,
    call,
    kill,
    member_versions,
    rows,
    start,
    steps,
    tiny_run,
    wait,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Path]:
    with tiny_run(tmp_path) as path:
        yield path


def scrape(run: Path, process: str) -> dict[str, float]:
    """What a process tells Prometheus, found as Prometheus finds it, nothing before that; of series with
    labels the last."""
    target = run.parent / "prometheus" / f"{run.name}@{process}.json"
    if not target.exists():
        return {}
    (group,) = json.loads(target.read_text())
    text = httpx.get(f"http://{group['targets'][0]}/metrics", timeout=60).text
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def ledger_of(run: Path, step: int) -> dict[str, Any]:
    return json.loads((run / "checkpoints" / f"step-{step:06}" / "state.json").read_text())["ledger"]


def test_a_run_survives_kills_resumes_and_leaves_nothing_behind(config: Path) -> None:
    run = config.parent / "runs" / "whole"
    reward = config.parent / "rewards.py"  # so slow that the learner is not done before it is looked at
    reward.write_text(
        reward.read_text().replace("    return", "    __import__('threading').Event().wait(0.25)\n    return")
    )

    # 1. A generator is killed in the middle; the run finishes, and every group is accounted for.
    up = start(config, "telemetry.prometheus_port=0", "generator.engine=vllm")
    try:
        wait(lambda: "asyncrl_generator_sampled_tokens" in scrape(run, "g0"), up, config)
        learner: dict[str, float] = {}
        wait(
            lambda: learner.update(scrape(run, "learner")) or "asyncrl_time_step" in learner,
            up,
            config,
        )
        kill(run, "g1")
        assert learner["asyncrl_time_step"] > 0 and learner["asyncrl_buffer_missing_groups"] == 0
        assert learner["asyncrl_learner_target_step"] == 6 and learner["asyncrl_progress_age_seconds"] < 400
        wait(lambda: up.poll() is not None or 6 in steps(run), up, config)
        assert up.wait(timeout=120) == 0, (config.parent / "up.out").read_text()[-3000:]
    finally:
        up.kill()
    assert steps(run) == [1, 2, 3, 4, 5, 6]
    assert processes_of(run) == []
    assert not (run.parent / "prometheus" / "whole@learner.json").exists(), "who has ended is no target"
    log = [json.loads(line) for line in (run / "logs" / "g0.jsonl").read_text().splitlines()]
    assert {line["version"] for line in log} & set(range(1, 7)), "lines carry the version that samples"
    assert re.search(r" g0 v[0-6] asyncrl", (run / "logs" / "g0.out").read_text()), (
        "and people can read them too"
    )
    trace = [
        json.loads(line.removesuffix(","))
        for line in (run / "trace_events.json").read_text().splitlines()[1:]
    ]
    lived = Counter(
        event["args"]["outcome"].split(":")[0] for event in trace if event["name"].startswith("group ")
    )
    assert {f"trained in step {number}": B for number in range(1, 7)}.items() <= lived.items(), (
        "a life for each trained group"
    )
    durations = {event["name"]: event["dur"] / 1e6 for event in trace if event["name"].startswith("step ")}
    for row in rows(run):
        if "time/step" in row:  # between two parts nothing is done that counts
            assert durations[f"step {row['step']}"] == pytest.approx(row["time/step"], rel=0.2, abs=0.5)
    ledger = ledger_of(run, 6)
    consumed = ledger["watermark"] + len(ledger["above"])
    assert ledger["trained"] == 6 * B
    assert consumed == ledger["trained"] + sum(ledger["rejected"].values())
    audit = json.loads(call("audit", str(run)))
    assert audit["missing"] == 0 and audit["issued"] >= consumed
    evaluated = {row["step"]: row["eval/reward_mean"] for row in rows(run) if "eval/reward_mean" in row}
    assert evaluated.keys() == {0, 3, 6}
    for step, mean in evaluated.items():
        lines = (run / "evaluations" / f"step-{step:06d}.jsonl").read_text().splitlines()
        rewards = [json.loads(line)["reward"] for line in lines]
        assert len(rewards) == 8 and sum(rewards) / 8 == pytest.approx(mean)
    for row in rows(run):
        assert row.get("staleness/max", 0) <= 2 + 1  # L + ceil((W - 1) / B), and masked beyond L
        assert row.get("weights/probe_max", 0) < 1e-4

    # 2. The exported model is the trained one.
    call("export", str(run), "--to", str(config.parent / "export"))
    trained = AutoModelForCausalLM.from_pretrained(config.parent / "export").state_dict()
    before = AutoModelForCausalLM.from_pretrained(config.parent / "model").state_dict()
    assert any(not torch.equal(trained[name], before[name]) for name in before)

    # What the run left can be looked at.
    call("report", str(run), "--to", str(config.parent / "report.html"))
    assert "Who waited for whom" in (config.parent / "report.html").read_text()
    assert "tokens by version" in call("samples", str(run), "--best", "--count", "1")

    # 3. The same command goes on where it ended; the learner is killed, comes back from its checkpoint, and `down` ends it all.
    up = start(config, "learner.steps=500", "generator.engine=vllm")
    try:
        wait(lambda: max(steps(run), default=0) >= 9, up, config)
        assert min(steps(run)[6:]) == 7
        killed = kill(run, "learner")
        written = len(steps(run))
        wait(lambda: len(steps(run)) > written + 2, up, config)
        # From the checkpoint: steps may be repeated, never skipped.
        assert steps(run)[written] <= steps(run)[written - 1] + 1
        call("down", str(run))
        assert up.wait(timeout=60) == 128 + signal.SIGTERM
    finally:
        up.kill()
    assert processes_of(run) == []
    assert not psutil.pid_exists(killed) or psutil.Process(killed).status() == psutil.STATUS_ZOMBIE
    assert json.loads(call("audit", str(run)))["missing"] == 0


LIVES = (
    (4, B, ""),
    (
        8,
        8,
        "batch.groups=8 batch.minibatches=2 staleness.max_lag=4 sampling.max_response_tokens=6 "
        "eval.every=2 eval.samples=2 eval.temperature=0.7 checkpoint.every=1 store.max_gib=2 "
        "reward.workers=2 learner.optimizer.lr=5e-4 generator.count=1 reward.functions.0.weight=2 "
        "store.fsync=no",
    ),
    (
        12,
        2,
        "batch.groups=2 batch.group_size=2 staleness.max_lag=1 staleness.policy=drop "
        "sampling.temperature=0.8 eval.prompts=4 learner.tokens_per_microbatch=24 algorithm.advantage=rloo "
        "learner.optimizer.weight_decay=0.1 generator.count=1 weights.probe_tokens=6 "
        "control.heartbeat_s=0.5 reward.attempts=2",
    ),
)
"""learner.steps, batch.groups and what else of the config is changed: each life begins with a checkpoint of
the one before."""


def test_a_run_is_resumed_with_many_keys_changed_at_once_and_loses_nothing(config: Path) -> None:
    run, trained, before = config.parent / "runs" / "whole", 0, 0
    for last, groups, overrides in LIVES:
        up = start(config, f"learner.steps={last}", *overrides.split())
        try:
            assert up.wait(timeout=500) == 0, (config.parent / "up.out").read_text()[-3000:]
        finally:
            up.kill()
        trained, before = trained + (last - before) * groups, last
        ledger = ledger_of(run, last)
        assert ledger["trained"] == trained
        assert ledger["watermark"] + len(ledger["above"]) == trained + sum(ledger["rejected"].values())
        audit = json.loads(call("audit", str(run)))
        assert audit["missing"] == 0 and audit["issued"] <= trained + sum(ledger["rejected"].values()) + 5 * 8
    assert steps(run) == list(range(1, 13)), "no life repeats or skips a step"
    rates = {int(row["step"]): row["policy/lr"] for row in rows(run) if "policy/lr" in row}
    assert [rates[step] for step in (4, 8, 12)] == pytest.approx([1e-3, 5e-4, 1e-3])

    # Now there is nothing left to do; and with another seed it is another run. Either is said at once, and
    # changes nothing.
    saved = (run / "config.yaml").read_bytes()
    assert "nothing is left to do" in call("up", "--plain", "--config", str(config), "learner.steps=12")
    refused = subprocess.run(
        [*ASYNCRL, "up", "--plain", "--config", str(config), "learner.steps=20", "run.seed=1", "model.dtype=bfloat16"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (
        refused.returncode == 2
        and "2 problems in" in refused.stderr
        and "model.dtype: found 'bfloat16'" in refused.stderr
    )
    assert (run / "config.yaml").read_bytes() == saved and processes_of(run) == []


def test_two_ranks_train_from_four_shards_of_a_cluster_and_a_generator_without_a_config_joins_late(
    config: Path,
) -> None:
    (config.parent / "cluster").mkdir()
    with cluster(config.parent / "cluster") as nodes:
        _train_from_four_shards(config, nodes)
        assert all(node.client.dbsize() for node in nodes[:PRIMARIES])


def _train_from_four_shards(config: Path, nodes: list[Node]) -> None:
    run, url = config.parent / "runs" / "whole", nodes[0].url
    overrides = ("learner.ranks=2", "learner.zero_stage=2", "generator.count=1", "learner.steps=500")
    up = start(config, *overrides, "store.shards=4", f"store.url={url}")
    joined = None
    try:
        wait(lambda: 1 in steps(run), up, config)
        store = (run / "store.url").read_text()
        joined = subprocess.Popen(
            [*ASYNCRL, "generator", "--count", "1", "--store", store], cwd=config.parent
        )
        wait(lambda: any(row.get("weights/joined") == 2 for row in rows(run)), up, config)
        # Both adopt what is trained from then on; while an update is under way a member has no version (-1).
        at = len(steps(run))
        wait(lambda: len(versions := member_versions(run)) == 2 and min(versions) > at, up, config)
        for done in range(3):  # a store that forgets everything costs no rank its life
            for node in nodes[:PRIMARIES]:
                node.client.flushall()
            wait(partial(lambda goal: len(steps(run)) >= goal, len(steps(run)) + 2 + done), up, config)
        assert len((run / "starts.jsonl").read_text().splitlines()) == 1
        call("down", str(run))
        assert up.wait(timeout=60) == 128 + signal.SIGTERM
        assert joined.wait(timeout=60) == 0
    finally:
        up.kill()
        if joined:
            joined.kill()
    assert steps(run) == list(range(1, len(steps(run)) + 1))
    assert all(row.get("weights/probe_max", 0) < 1e-4 for row in rows(run))
    assert all(row.get("staleness/max", 0) <= 2 for row in rows(run)), "L + ceil((W - S) / B), where W is S"
    assert json.loads(call("audit", str(run)))["missing"] == 0
    ledgers = ledger_of(run, steps(run)[-1])["shards"]
    assert [ledger["trained"] for ledger in ledgers] == [len(steps(run)) * B // 4] * 4
    assert processes_of(run) == []
