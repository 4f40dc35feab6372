"""The toy engine keeps the promises of the interface that the loops are tested against."""

import asyncio
from collections import Counter

import numpy as np
import pytest

from asyncrl.engine.base import SamplingSpec
from asyncrl.engine.fake import EOS, FakeEngine, logits_of, logprobs_of
from asyncrl.errors import EngineError, TransferError
from asyncrl.lineage import Weights
from asyncrl.weights.base import UpdateOrder
from tests.support.waiting import LONG_S, elapse, in_virtual_time, turns


def order(version, **details):
    return UpdateOrder(
        version=version,
        transport="fake",
        deadline_s=1.0,
        details=details,
        probe_ids=(),
        probe_logprobs=(),
        initial_logprobs=(),
    )


async def apply(engine, update):
    await engine.begin_update()
    await engine.receive(update)
    await engine.finish_update(update.weights)


def spec(tokens=50, temperature=1.0):
    return SamplingSpec(temperature=temperature, max_response_tokens=tokens)


def run(scenario):
    return in_virtual_time(asyncio.wait_for(scenario, LONG_S))


def certain(token, vocabulary=16):
    return [30.0 if index == token else 0.0 for index in range(vocabulary)]


def test_every_token_has_the_version_and_logprob_that_sampled_it():
    async def scenario():
        engine = FakeEngine(token_s=0.0005)
        await apply(engine, order(1, tensors={"logits": certain(1)}))
        sampling = asyncio.gather(*(engine.sample([3], 4, spec(60)) for _ in range(3)))
        for version in range(2, 10):
            await elapse(0.003)
            await apply(engine, order(version, tensors={"logits": certain(version)}))
        return [rollout for group in await sampling for rollout in group]

    rollouts = run(scenario())
    for rollout in rollouts:
        np.testing.assert_array_equal(rollout.response_ids, rollout.versions)
        np.testing.assert_allclose(rollout.behaviour_logprobs, 0.0, atol=1e-5)
    assert max(len(rollout.version_spans) for rollout in rollouts) > 2


def test_frequencies_follow_the_recorded_logprobs():
    async def scenario():
        return await FakeEngine().sample([3], 400, spec(20, temperature=0.7))

    logprobs = logprobs_of(logits_of(0), 0.7)
    tokens = Counter()
    for rollout in run(scenario()):
        tokens.update(rollout.response_ids.tolist())
        np.testing.assert_array_equal(rollout.behaviour_logprobs, logprobs[rollout.response_ids])
        assert (rollout.finish_reason == "stop") == (rollout.response_ids[-1] == EOS)
        assert rollout.finish_reason == "stop" or len(rollout.response_ids) == 20
    total = sum(tokens.values())
    for token, logprob in enumerate(logprobs):
        p = np.exp(logprob)
        assert abs(tokens[token] / total - p) < 5 * np.sqrt(p * (1 - p) / total)


def test_scores_change_with_the_weights():
    async def scenario():
        engine = FakeEngine()
        before = await engine.score([1, 2, 3])
        await apply(engine, order(7))
        return before, await engine.score([1, 2, 3])

    before, after = run(scenario())
    np.testing.assert_array_equal(before, logprobs_of(logits_of(0))[[2, 3]])
    np.testing.assert_array_equal(after, logprobs_of(logits_of(7))[[2, 3]])


def test_dirty_weights_do_not_sample():
    async def scenario():
        engine = FakeEngine()
        await engine.begin_update()
        with pytest.raises(TransferError, match="shape"):
            await engine.receive(order(1, tensors={"logits": [1.0]}))
        assert engine.weights.version == -1
        with pytest.raises(EngineError, match="no weights were received"):
            await engine.finish_update(Weights(1))
        with pytest.raises(EngineError, match="paused"):
            await engine.score([1, 2])
        waiting = asyncio.create_task(engine.sample([3], 2, spec()))
        assert not (await asyncio.wait({waiting}, timeout=0.02))[0]
        await apply(engine, order(2))
        rollouts = await waiting
        return rollouts, engine.stats()

    rollouts, stats = run(scenario())
    assert {span.version for rollout in rollouts for span in rollout.version_spans} == {2}
    assert stats.paused_s == pytest.approx(0.02) and stats.running_requests == 0
    assert stats.sampled_tokens == sum(len(rollout.response_ids) for rollout in rollouts)


@pytest.mark.parametrize("how", ["abort", "kill", "close"])
def test_dropped_requests_raise(how):
    async def scenario():
        engine = FakeEngine(token_s=1.0)
        task = asyncio.create_task(engine.sample([3], 2, spec()))
        await elapse(0.01)
        assert engine.stats().running_requests == 2
        if how == "kill":
            engine.kill()
        else:
            await (engine.abort_requests() if how == "abort" else engine.close())
        with pytest.raises(EngineError):
            await task
        if how == "kill":
            with pytest.raises(EngineError, match="died"):
                await engine.sample([3], 1, spec())
        return engine.stats()

    assert run(scenario()).running_requests == 0


def test_cancelling_the_caller_cancels_the_request():
    async def scenario():
        engine = FakeEngine(token_s=1.0)
        task = asyncio.create_task(engine.sample([3], 2, spec()))
        await elapse(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await turns(3)
        return engine.stats()

    assert run(scenario()).running_requests == 0
