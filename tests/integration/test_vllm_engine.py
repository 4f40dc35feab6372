"""A real vLLM engine: every token has the version and the log-probability of the weights that sampled it."""

import asyncio
import signal

import numpy as np
import psutil
import pytest
import torch

from asyncrl.engine.base import SamplingSpec
from asyncrl.errors import EngineError
from asyncrl.lineage import Weights
from tests.support.vllm_engines import (
    STORIES,
    apply,
    disk_order,
    load,
    logprobs_of,
    needs_stories,
    running_engine,
    scrambled,
)

pytestmark = [pytest.mark.integration, needs_stories]


@pytest.fixture(scope="module")
def stories():
    with running_engine(STORIES) as (runner, engine):
        yield runner, engine, load(STORIES)


def spec(temperature=1.0, tokens=100, stop=()):
    return SamplingSpec(temperature=temperature, max_response_tokens=tokens, stop=stop)


def assert_sampled_from(model, rollout, temperature=1.0):
    """The recorded log-probabilities are those of the model."""
    expected = logprobs_of(model, [*rollout.prompt_ids, *rollout.response_ids], temperature)[
        len(rollout.prompt_ids) - 1 :
    ]
    np.testing.assert_allclose(rollout.behaviour_logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_behaviour_logprobs_are_the_models_at_the_sampling_temperature(stories, temperature):
    runner, engine, model = stories
    rollouts = runner.run(engine.sample([1, 403, 407], 6, spec(temperature)))
    assert len({tuple(rollout.response_ids.tolist()) for rollout in rollouts}) == 6
    for rollout in rollouts:
        assert rollout.prompt_ids.tolist() == [1, 403, 407]
        assert_sampled_from(model, rollout, temperature)


def test_a_greedy_request_beside_sampled_ones_says_the_likeliest_tokens_with_their_logprobs(stories):
    runner, engine, model = stories

    async def scenario():
        requests = (
            engine.sample([1, 403, 407], count, spec(temperature, tokens=40))
            for count, temperature in ((6, 1.0), (1, 0.0))
        )
        return await asyncio.gather(*requests)

    sampled, (greedy,) = runner.run(scenario())
    assert_sampled_from(model, greedy)  # temperature 0 is recorded as temperature 1
    for rollout in sampled:
        assert_sampled_from(model, rollout)
    ids = torch.tensor([[1, 403, 407, *greedy.response_ids.tolist()]])
    with torch.no_grad():
        logits = model(ids).logits[0, 2:-1]
    best = logits.max(-1).values - logits.gather(-1, ids[0, 3:, None]).squeeze(-1)
    np.testing.assert_allclose(best, 0.0, atol=1e-4)  # ties aside, the argmax


def test_score_is_at_temperature_one(stories):
    runner, engine, model = stories
    ids = [1, *range(300, 331)]
    np.testing.assert_allclose(runner.run(engine.score(ids)), logprobs_of(model, ids), atol=1e-4)


def test_prompts_cached_under_old_weights_are_not_used_by_new_requests(stories, tmp_path):
    runner, engine, model = stories
    prompt = [1, *torch.randint(3, 512, (255,), generator=torch.Generator().manual_seed(0)).tolist()]

    async def scenario():
        await engine.sample(prompt, 2, spec())  # leaves its blocks in the cache
        sent = scrambled(model, 5)
        running = asyncio.create_task(engine.sample(prompt, 2, spec(tokens=256)))  # holds them
        await asyncio.sleep(0.1)
        await engine.begin_update()
        queued = asyncio.create_task(engine.sample(prompt, 2, spec()))
        await asyncio.sleep(0.1)
        await engine.receive(disk_order(1, sent, tmp_path))
        await engine.finish_update(Weights(1))
        late = await engine.sample(prompt, 2, spec())
        await running
        return sent, [*await queued, *late]

    sent, rollouts = runner.run(scenario())
    for rollout in rollouts:
        assert_sampled_from(sent, rollout)
    runner.run(apply(engine, disk_order(0, model, tmp_path)))


def test_a_response_that_a_string_ends_has_the_models_logprobs(stories):
    runner, engine, model = stories
    rollouts = runner.run(engine.sample([1, 403, 407], 4, spec(tokens=200, stop=("a",))))
    assert all(rollout.finish_reason == "stop" and len(rollout.response_ids) < 200 for rollout in rollouts)
    for rollout in rollouts:
        assert_sampled_from(model, rollout)


def test_cancelled_and_dropped_requests_leave_the_engine(stories, tmp_path):
    runner, engine, model = stories

    async def scenario():
        cancelled = asyncio.create_task(engine.sample([1, 300], 8, spec(tokens=256)))
        await asyncio.sleep(0.05)
        assert engine.stats().running_requests == 8
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        dropped = asyncio.create_task(engine.sample([1, 300], 8, spec(tokens=256)))
        await asyncio.sleep(0.05)
        await engine.begin_update()
        await engine.abort_requests()
        with pytest.raises(EngineError, match="aborted"):
            await dropped
        with pytest.raises(EngineError, match="no weights were received"):
            await engine.finish_update(Weights(0))
        await apply(engine, disk_order(0, model, tmp_path))
        for _ in range(100):
            if not engine._llm.output_processor.has_unfinished_requests():
                break
            await asyncio.sleep(0.02)
        return engine._llm.output_processor.request_states, engine.stats()

    states, stats = runner.run(scenario())
    assert not states and stats.running_requests == 0
    assert len(runner.run(engine.sample([1, 300], 2, spec()))) == 2


def test_a_refused_request_is_an_engine_error(stories):
    runner, engine, _ = stories
    with pytest.raises(EngineError, match="refused"):
        runner.run(engine.sample([1] * 600, 1, spec()))


def test_an_engine_whose_core_is_stopped_makes_no_progress(stories):
    """Idle and while it samples; under an event loop that goes on."""
    runner, engine, _ = stories
    alive = [
        child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE
    ]
    (core,) = [child for child in alive if "VLLM::EngineCore" in " ".join(child.cmdline())]

    async def is_silent():
        for _ in range(5):  # what was under way when it was stopped may still arrive
            try:
                await asyncio.wait_for(engine.progress(), 2.0)
            except TimeoutError:
                return True
        return False

    async def scenario():
        for samples in (False, True):
            task = asyncio.create_task(engine.sample([1, 300], 16, spec(tokens=400))) if samples else None
            await asyncio.wait_for(engine.progress(), 60.0)
            core.send_signal(signal.SIGSTOP)
            try:
                assert await is_silent()
            finally:
                core.send_signal(signal.SIGCONT)
            await asyncio.wait_for(engine.progress(), 60.0)
            if task is not None:
                assert len(await asyncio.wait_for(task, 120.0)) == 16

    runner.run(scenario())
