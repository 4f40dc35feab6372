"""Groups that go without episodes whose processes were killed: real processes, and the learner's own path."""

import asyncio
from dataclasses import replace

import pytest
import torch

from asyncrl.algo.trainable import GroupLimits
from asyncrl.batch.estimate import Estimator
from asyncrl.batch.plan import Planner
from asyncrl.buffer.base import BufferRules, PutOutcome
from asyncrl.buffer.judge import Gate
from asyncrl.buffer.memory import MemoryBuffer
from asyncrl.config import registry
from asyncrl.config.environment_section import EnvironmentConfig
from asyncrl.engine.base import SamplingSpec
from asyncrl.engine.episodes import EpisodeSampler
from asyncrl.engine.fake import FakeEngine
from asyncrl.errors import RewardError
from asyncrl.types import Group, Prompt
from asyncrl.wire.group_frames import decode_group, encode_group
from tests.support.environments import environment
from tests.support.fake_learner import SETTINGS, FakeTrainer
from tests.support.intakes import intake
from tests.support.letters import Letters, read

pytestmark = pytest.mark.integration
LIMITS = GroupLimits(vocabulary=16, rollouts=4, max_tokens=200)
# The column names the episodes whose processes are killed, each in its second turn.
WEAK = """
import os, signal

class Weak:
    def reset(self, doomed, episode):
        self.doomed, self.episode, self.turns = doomed, episode, 0
        return "ab"
    def step(self, response):
        self.turns += 1
        if self.turns == 2 and self.episode in self.doomed:
            os.kill(os.getpid(), signal.SIGKILL)
        return "cd", float(self.episode) * (self.turns == 2), self.turns == 2
"""


def played(tmp_path, doomed: list[int], *, most_missing: int) -> Group:
    async def scenario() -> Group:
        async with environment(tmp_path, WEAK, "Weak") as processes:
            sampler = EpisodeSampler(
                FakeEngine(),
                None,
                processes,
                EnvironmentConfig(uses="mine.py:Weak", replays=1),
                renderer=Letters(),
                read=read,
                max_prompt_tokens=50,
                generator_id="g",
                seed=0,
                most_missing=most_missing,
            )
            prompt = Prompt(token_ids=(1,), text="a", row={"doomed": doomed})
            spec = SamplingSpec(temperature=1.0, max_response_tokens=100)
            try:
                return await sampler.group(prompt, 1, LIMITS, spec)
            finally:
                assert sampler.faults.total() >= 2 and set(sampler.faults) == {"died"}

    return asyncio.run(scenario())


def test_without_the_option_one_episode_whose_process_is_killed_fails_the_ticket(tmp_path):
    with pytest.raises(RewardError, match=r"in all 2 attempts at an episode: .*killed by SIGKILL"):
        played(tmp_path, [2], most_missing=0)


@pytest.mark.parametrize("doomed", [[2], [0, 3], [0, 1, 3]])
def test_with_it_the_group_is_trained_once_with_the_episodes_that_are_left(tmp_path, doomed):
    group = played(tmp_path, doomed, most_missing=3)
    rewards = [float(episode) for episode in range(4) if episode not in doomed]
    buffer = MemoryBuffer(BufferRules(groups=1))
    gate = Gate(lane="train", decode=decode_group, limits=LIMITS)
    learner, generator = intake(buffer, gate=gate, groups=1), buffer.peer()
    [ticket, *_] = generator.lease("g", 1).tickets
    frame = encode_group(group)
    assert generator.put("g", ticket.id, frame) is PutOutcome.STORED
    assert generator.put("g", ticket.id, frame) is not PutOutcome.STORED
    collected = learner.poll(0, wait_s=0)
    [taken] = collected.groups
    assert (learner.ledger.trained, learner.ledger.total_rejected) == (1, 0)
    assert [one.reward for one in taken.rollouts] == rewards and taken.missing == {"died": len(doomed)}

    estimator = Estimator(advantage=registry.resolve("advantage", "rloo", {}), max_response_tokens=100)
    settings = replace(SETTINGS, tokens_per_microbatch=1000)
    planner = Planner(
        estimator=estimator, columns=frozenset({"logprobs_T"}), proximal=True, settings=settings
    )
    samples = planner.assemble(collected.groups, 0)
    plan = planner.plan(collected.groups, samples, planner.measure(FakeTrainer(), samples), 0.0)
    assert plan.minibatches[0].counts.sequences == len(rewards)
    mean = sum(rewards) / len(rewards)
    scale = len(rewards) / max(len(rewards) - 1, 1)
    for sample, reward in zip(plan.sequences, rewards, strict=True):
        expected = torch.tensor((reward - mean) * scale, dtype=torch.float32)
        assert (sample.advantages[sample.keep] == expected.item()).all()
