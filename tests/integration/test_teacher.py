"""A teacher in scorer processes: its column, what the learner makes of it, and groups without it."""

import asyncio
import json
import subprocess
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.algo.trainable import GroupLimits, trainable
from asyncrl.columns import TEACHER
from asyncrl.config.reward_section import RewardConfig
from asyncrl.control import scoring
from asyncrl.control.scoring import ScorerService, endpoint_of, serve_scores
from asyncrl.engine.base import SamplingSpec
from asyncrl.engine.duty import Clock
from asyncrl.engine.sampler import TaughtSampler
from asyncrl.errors import ConfigError, RewardError
from asyncrl.hosting.supervisor import Supervisor
from asyncrl.launch.scorers import scorer_specs
from asyncrl.preflight.validate import validated_config
from asyncrl.rewards.opened import Asker
from asyncrl.run.directory import RunDirectory
from asyncrl.types import Group, Prompt, Rollout, VersionSpan
from tests.support.command import ASYNCRL
from tests.support.models import tiny_qwen2
from tests.support.whole_run import rows, steps, tiny_run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

LIMITS = GroupLimits(vocabulary=99, rollouts=3, max_tokens=32, required=(TEACHER,))
SPEC = SamplingSpec(temperature=1.0, max_response_tokens=24)
PROMPT = Prompt(token_ids=(2, 3), text="", row={})


def rollout(prompt: Sequence[int], response: Sequence[int]) -> Rollout:
    size = len(response)
    return Rollout(
        prompt_ids=np.array(prompt, np.int32),
        response_ids=np.array(response, np.int32),
        action_mask=np.ones(size, np.bool_),
        behaviour_logprobs=np.full(size, -1.0, np.float32),
        version_spans=(VersionSpan(0, size),),
        finish_reason="stop",
    )


class Plain:
    """A sampler without a teacher."""

    def __init__(self, rollouts: Sequence[Rollout]) -> None:
        self.clock, self.faults, self.counts = Clock(), Counter[str](), Counter[str]()
        self._rollouts = tuple(rollouts)

    async def group(self, prompt, ticket_id, limits, spec, *, greedy=False) -> Group:
        group = Group(ticket_id=ticket_id, rollouts=self._rollouts, generator_id="g0", finished_version=0)
        assert trainable(group, limits) is None
        return group


def taught(
    directory: Path, rollouts: Sequence[Rollout], timeout_s: float, prompt: Prompt = PROMPT
) -> tuple[Group, Counter[str]]:
    """The group with the answers of the teacher that listens in `directory`."""

    async def run() -> Group:
        service = ScorerService("teacher", directory, 1, call_s=timeout_s, remembers=False)
        config = RewardConfig.model_validate({"functions": [], "timeout_s": timeout_s})
        teacher = Asker("the teacher", service, config, counts)
        await teacher.start()
        try:
            return await TaughtSampler(Plain(rollouts), teacher.answer, counts).group(prompt, 1, LIMITS, SPEC)
        finally:
            await teacher.close()

    counts: Counter[str] = Counter()
    return asyncio.run(run()), counts


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    tiny_qwen2(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    values = {
        "run": {"name": "taught", "root": str(tmp_path / "runs")},
        "model": {"path": str(tmp_path / "model"), "dtype": "float32"},
        "data": {"train": str(tmp_path / "train.jsonl")},
        "reward": {"functions": [{"function": "exact_match"}]},
        "sampling": {"max_prompt_tokens": 8, "max_response_tokens": 24},
        "algorithm": {
            "advantage": "distill",
            "reference": {"path": str(tmp_path / "model"), "scorers": 1},
        },
        "generator": {"engine": "transformers"},
        "learner": {"device": "cpu"},
    }
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(values))
    return path


def test_the_column_of_a_teacher_is_what_transformers_computes(config_file, tmp_path):
    config, directory = validated_config(config_file), RunDirectory(tmp_path / "runs" / "taught")
    directory.create(fresh=False)
    directory.config.write_text(config_file.read_text())
    draw = np.random.default_rng(0)
    sizes = ((1, 1), (2, 9), (8, 24))
    ids = [(draw.integers(2, 12, size=p).tolist(), draw.integers(2, 12, size=r).tolist()) for p, r in sizes]
    supervisor = Supervisor(scorer_specs(config, directory, config.teacher), max_restarts=0)
    watching = threading.Thread(target=supervisor.run)
    try:
        watching.start()
        group, counts = taught(directory.path, [rollout(*one) for one in ids], timeout_s=300.0)
        told = replace(PROMPT, teacher_ids=(9, 4, 8, 2, 3))
        informed, _ = taught(directory.path, [rollout(*one) for one in ids], 300.0, told)
    finally:
        supervisor.request_stop("over")
        watching.join()
        supervisor.stop()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()

    def right(prompt: Sequence[int], response: Sequence[int]) -> np.ndarray:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0].numpy()

    for one, other, (prompt, response) in zip(group.rollouts, informed.rollouts, ids, strict=True):
        assert np.abs(one.recorded[TEACHER] - right(prompt, response)).max() <= 1e-4
        assert np.abs(other.recorded[TEACHER] - right(told.teacher_ids, response)).max() <= 1e-4
        assert other.prompt_ids.tolist() == prompt, "the policy is trained behind its own prompt"
    assert trainable(group, LIMITS) is None
    assert counts["reward_calls"] == 3 and not counts["reward_retries"]


@pytest.mark.parametrize(
    "reply",
    [0.5, b"", np.zeros(9, np.float32).tobytes(), np.full(10, np.nan, np.float32).tobytes()],
    ids=["number", "nothing", "short", "nan"],
)
def test_an_answer_that_is_no_column_fails_the_group_and_is_counted(tmp_path, reply):
    async def serve() -> None:
        async def answer(ids: list[int]) -> object:
            return reply

        serving = asyncio.create_task(serve_scores(endpoint_of(tmp_path, "teacher", 0), answer))  # type: ignore[arg-type]
        try:
            await asyncio.to_thread(ask)
        finally:
            serving.cancel()
            await asyncio.wait({serving})

    def ask() -> None:
        with pytest.raises(RewardError, match="the teacher got"):
            taught(tmp_path, [rollout([2, 3], [4] * 9)], timeout_s=20.0)

    asyncio.run(serve())


def test_a_command_that_starts_generators_starts_their_teacher(tmp_path, monkeypatch):
    """The learner's command starts none; both end with the run, and what listened is gone."""
    place = tmp_path / "private"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    with tiny_run(tmp_path) as config:
        teacher = f"algorithm.reference={{path: {tmp_path}/model, scorers: 1}}"
        settings = ["algorithm.advantage=distill", teacher, "learner.steps=3", "data.eval=null"]
        run = tmp_path / "runs" / "whole"
        with (tmp_path / "up.out").open("ab") as out:
            commands = [["learner", "--config", str(config), *settings]]
            commands.append(["generator", "--count", "1", "--wait", "300"])
            begun = [
                subprocess.Popen([*ASYNCRL, *one], cwd=tmp_path, stdout=out, stderr=out) for one in commands
            ]
        try:
            statuses = [process.wait(timeout=500) for process in begun]
        finally:
            for process in begun:
                process.kill()
                process.wait()
        assert statuses == [0, 0], (tmp_path / "up.out").read_text()[-3000:]
        assert steps(run) == [1, 2, 3]
        assert all(row["reference/nll"] > 0 for row in rows(run) if "time/step" in row)
        (log,) = run.glob("logs/*teacher.0.out")
        assert str(begun[1].pid) in log.name
    assert not list(place.rglob("*.sock"))


def test_without_a_teacher_the_group_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(scoring, "START_S", 0.2)
    with pytest.raises(RewardError, match="no scorer `teacher` answered"):
        taught(tmp_path, [rollout([2, 3], [4])], timeout_s=1.0)


@pytest.mark.parametrize("column", [None, np.array([np.nan], np.float32), np.array([1.0], np.float32)])
def test_a_group_without_a_usable_column_is_untrainable(column):
    one = rollout([2, 3], [4])
    one = one if column is None else replace(one, recorded={TEACHER: column})
    group = Group(ticket_id=1, rollouts=(one,), generator_id="g0", finished_version=0)
    assert trainable(group, LIMITS) is not None
    assert column is not None or trainable(group, replace(LIMITS, required=())) is None


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["sampling.temperature=0.7"], "sampling.temperature is 0.7, not 1"),
        (["sampling.top_k=20"], "sampling.top_k is set, and scorers measure a token among all"),
        (["sampling.max_response_tokens=504"], "scorers need one more than the longest sequence"),
    ],
)
def test_what_no_scorer_can_teach_is_named_before_the_run(config_file, overrides, said):
    with pytest.raises(ConfigError) as error:
        validated_config(config_file, overrides)
    assert said in str(error.value), str(error.value)
