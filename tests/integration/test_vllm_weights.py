"""Weights that arrive in a real vLLM engine are the weights that were sent, or the engine does not sample."""

import asyncio

import numpy as np
import pytest
from vllm_helpers import (
    STORIES,
    Sender,
    apply,
    disk_order,
    load,
    logprobs_of,
    needs_stories,
    order,
    running_engine,
    scrambled,
    untied_qwen2,
)

from asyncrl.engine.base import SamplingSpec
from asyncrl.errors import EngineError, TransferError

pytestmark = [pytest.mark.integration, needs_stories]

PROBE = (1, *range(300, 331))
SPEC = SamplingSpec(temperature=1.0, max_response_tokens=200)


@pytest.fixture(scope="module", params=["tied", "untied"])
def world(request, tmp_path_factory):
    """(runner, engine, a Hugging Face model of the same architecture)"""
    directory = STORIES if request.param == "tied" else untied_qwen2(tmp_path_factory.mktemp("untied"))
    with running_engine(directory) as (runner, engine):
        yield runner, engine, load(directory)


def assert_same_weights(runner, engine, model):
    np.testing.assert_allclose(runner.run(engine.score(PROBE)), logprobs_of(model, PROBE), atol=1e-4)


@pytest.mark.parametrize("transport", ["gloo", "gloo, a new group each time", "disk"])
def test_the_engine_scores_like_the_model_that_was_sent(world, transport, tmp_path):
    runner, engine, model = world
    sender = Sender(tmp_path)
    for version in range(1, 7):
        sent = scrambled(model, version)
        if transport == "disk":
            update = disk_order(version, sent, tmp_path)
        else:
            sender = sender if transport == "gloo" else Sender(tmp_path)
            update = sender.order(version, sent)
        before = runner.run(engine.score(PROBE))
        runner.run(apply(engine, update))
        assert engine.version == version
        assert np.abs(runner.run(engine.score(PROBE)) - before).max() > 0.01  # the update is visible at all
        assert_same_weights(runner, engine, sent)


def test_after_a_failure_nothing_is_sampled_until_an_update_succeeds(world, tmp_path):
    runner, engine, model = world

    async def scenario():
        await apply(engine, Sender(tmp_path).order(1, model))
        running = asyncio.create_task(engine.sample([1, 300], 4, SPEC))
        await asyncio.sleep(0.05)
        nobody = Sender(tmp_path, deadline_s=1.0).order(2, model, absent=True)
        spoilt = Sender(tmp_path).order(3, scrambled(model, 3), spoil=8)  # in the second bucket: the first is loaded already
        incomplete = Sender(tmp_path).order(4, scrambled(model, 4), leave_out=["model.layers.1.mlp.down_proj.weight"])
        nowhere = order(5, "disk", {"directory": str(tmp_path / "none")})
        reasons = ["not opened within 1 s", "checksum", "1 of .* parameters were not sent", "no .safetensors"]
        for update, reason in zip([nobody, spoilt, incomplete, nowhere], reasons, strict=True):
            await engine.begin_update()
            with pytest.raises(TransferError, match=reason):
                await engine.receive(update)
            assert engine.version == -1
            with pytest.raises(EngineError, match="paused"):
                await engine.score(PROBE)
        waiting = asyncio.create_task(engine.sample([1, 301], 1, SPEC))
        assert not (await asyncio.wait({running, waiting}, timeout=0.5))[0]
        await apply(engine, Sender(tmp_path).order(6, scrambled(model, 6)))
        return await running, await waiting

    running, waiting = runner.run(scenario())
    assert {version for rollout in running for version, _ in rollout.version_spans} == {1, 6}
    assert {version for version, _ in waiting[0].version_spans} == {6}
    assert_same_weights(runner, engine, scrambled(model, 6))


def test_a_sender_that_dies_within_a_transfer_costs_one_update(world, tmp_path):
    runner, engine, model = world

    async def scenario():
        sender = Sender(tmp_path, deadline_s=2.0)
        await apply(engine, sender.order(1, model))
        stalled = order(2, "gloo", sender.order(2, model).details, 2.0)
        await apply(engine, stalled)
        await engine.begin_update()
        with pytest.raises(TransferError, match=r"transfer failed|not loaded within"):
            await engine.receive(stalled)  # nobody sends it a second time
        await apply(engine, Sender(tmp_path).order(3, scrambled(model, 7)))

    runner.run(scenario())
    assert_same_weights(runner, engine, scrambled(model, 7))
