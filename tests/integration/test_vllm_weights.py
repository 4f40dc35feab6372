"""Weights that arrive in a real vLLM engine are the weights that were sent, or the engine does not sample."""

import asyncio
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from asyncrl.engine.base import SamplingSpec
from asyncrl.errors import EngineError, TransferError
from asyncrl.lineage import Weights
from tests.support.tiers import slow
from tests.support.vllm_engines import (
    STAGING,
    STORIES,
    Sender,
    apply,
    disk_order,
    flat,
    load,
    logprobs_of,
    needs_stories,
    on_disk,
    order,
    running_engine,
    scrambled,
    slot_order,
    untied_qwen2,
)

pytestmark = [pytest.mark.integration, needs_stories]

PROBE = (1, *range(300, 331))
SPEC = SamplingSpec(temperature=1.0, max_response_tokens=200)


@pytest.fixture(scope="module", params=["tied", slow("untied")])
def world(request, tmp_path_factory):
    """(runner, engine, a Hugging Face model of the same architecture)"""
    directory = STORIES if request.param == "tied" else untied_qwen2(tmp_path_factory.mktemp("untied"))
    with running_engine(directory) as (runner, engine):
        yield runner, engine, load(directory)


def assert_same_weights(runner, engine, model):
    np.testing.assert_allclose(runner.run(engine.score(PROBE)), logprobs_of(model, PROBE), atol=1e-4)


@pytest.mark.parametrize("transport", ["slot", "gloo", "gloo, a new group each time", "disk"])
def test_the_engine_scores_like_the_model_that_was_sent(world, transport, tmp_path):
    runner, engine, model = world
    sender = Sender(tmp_path)
    for version in range(1, 7):
        sent = scrambled(model, version)
        if transport == "disk":
            update = disk_order(version, sent, tmp_path)
        elif transport == "slot":
            _slot, update = slot_order(version, sent)
        else:
            sender = sender if transport == "gloo" else Sender(tmp_path)
            update = sender.order(version, sent)
        before = runner.run(engine.score(PROBE))
        runner.run(apply(engine, update))
        assert engine.weights.version == version
        assert np.abs(runner.run(engine.score(PROBE)) - before).max() > 0.01  # the update is visible at all
        assert_same_weights(runner, engine, sent)


def test_requests_run_on_while_a_version_arrives_and_its_tokens_are_of_the_old_one(world, tmp_path):
    runner, engine, model = world
    old, new = scrambled(model, 1), scrambled(model, 2)

    async def scenario():
        await apply(engine, disk_order(1, old, tmp_path))
        paused_before_s = engine.stats().paused_s
        leave = threading.Event()
        update = Sender(tmp_path).order(2, new, after=leave)
        arriving = asyncio.create_task(asyncio.to_thread(STAGING.stage, update))
        during = await engine.sample([1, 300], 4, SPEC)
        assert (
            not arriving.done() and engine.weights.version == 1 and engine.stats().paused_s == paused_before_s
        )
        leave.set()
        ready = await arriving
        # Nothing is loaded yet.
        np.testing.assert_allclose(await engine.score(PROBE), logprobs_of(old, PROBE), atol=1e-4)
        across = asyncio.create_task(engine.sample([1, 300], 32, SPEC))
        await asyncio.sleep(0.05)
        await engine.begin_update()
        await engine.receive(ready)
        await engine.finish_update(Weights(2))
        return during, await across

    during, across = runner.run(scenario())
    assert {version for rollout in during for version, *_ in rollout.version_spans} == {1}
    assert {version for rollout in across for version, *_ in rollout.version_spans} == {1, 2}
    for rollout in during + across:  # up to the update, all was computed by the old weights
        of_old = rollout.versions == 1
        ids = [1, 300, *rollout.response_ids.tolist()]
        expected = logprobs_of(old, ids)[1:]
        np.testing.assert_allclose(rollout.behaviour_logprobs[of_old], expected[of_old], atol=1e-3)
    assert_same_weights(runner, engine, new)


def test_a_transfer_that_fails_leaves_the_old_weights_in_use(world, tmp_path):
    runner, engine, model = world

    async def scenario():
        good = Sender(tmp_path)
        await apply(engine, good.order(1, model))
        good.deadline_s = 2.0
        running = asyncio.create_task(engine.sample([1, 300], 4, SPEC))
        nobody = Sender(tmp_path, deadline_s=1.0).order(2, model, absent=True)
        # In the second bucket: the first was fine.
        spoilt = Sender(tmp_path).order(3, scrambled(model, 3), spoil=8)
        # A sender that dies in the group of a good transfer.
        stalled = good.order(4, scrambled(model, 4), absent=True)
        reasons = ["transfer failed", "not opened within 1 s", "checksum"]
        for update, reason in zip([stalled, nobody, spoilt], reasons, strict=True):
            with pytest.raises(TransferError, match=reason):
                await apply(engine, update)
            assert engine.weights.version == 1
            np.testing.assert_allclose(await engine.score(PROBE), logprobs_of(model, PROBE), atol=1e-4)
        rollouts = await running
        await apply(engine, Sender(tmp_path).order(5, scrambled(model, 5)))
        return rollouts

    assert {version for rollout in runner.run(scenario()) for version, *_ in rollout.version_spans} == {1}
    assert_same_weights(runner, engine, scrambled(model, 5))


def test_after_a_failed_load_nothing_is_sampled_until_an_update_succeeds(world, tmp_path):
    runner, engine, model = world

    async def scenario():
        await apply(engine, Sender(tmp_path).order(1, model))
        running = asyncio.create_task(engine.sample([1, 300], 4, SPEC))
        await asyncio.sleep(0.05)
        incomplete = Sender(tmp_path).order(
            4, scrambled(model, 4), leave_out=["model.layers.1.mlp.down_proj.weight"]
        )
        nowhere = order(5, "disk", on_disk(tmp_path / "none"))
        reasons = ["1 of .* parameters were not sent", "no .safetensors"]
        for update, reason in zip([incomplete, nowhere], reasons, strict=True):
            with pytest.raises(TransferError, match=reason):
                await apply(engine, update)
            assert engine.weights.version == -1
            with pytest.raises(EngineError, match="paused"):
                await engine.score(PROBE)
        waiting = asyncio.create_task(engine.sample([1, 301], 1, SPEC))
        assert not (await asyncio.wait({running, waiting}, timeout=0.5))[0]
        await apply(engine, Sender(tmp_path).order(6, scrambled(model, 6)))
        return await running, await waiting

    running, waiting = runner.run(scenario())
    assert {version for rollout in running for version, *_ in rollout.version_spans} == {1, 6}
    assert {version for version, *_ in waiting[0].version_spans} == {6}
    assert_same_weights(runner, engine, scrambled(model, 6))


@pytest.mark.parametrize("last", ["mlp.up_proj", "self_attn.v_proj"])
def test_half_a_fused_layer_of_a_failed_update_is_not_mixed_into_the_next(world, last, tmp_path):
    """vLLM buffers the parts of a fused layer until it has all; the file of the last one cannot be read."""
    runner, engine, model = world
    tensors = {name: parameter.detach().clone() for name, parameter in scrambled(model, 1).named_parameters()}
    del tensors[f"model.layers.1.{last}.weight"]
    torn = tmp_path / "torn"
    torn.mkdir()
    save_file(tensors, torn / "1.safetensors")
    (torn / "2.safetensors").write_bytes(b"torn")

    async def scenario():
        with pytest.raises(TransferError, match="incomplete"):
            await apply(engine, order(1, "disk", on_disk(torn)))
        await apply(engine, disk_order(2, scrambled(model, 2), tmp_path))

    runner.run(scenario())
    assert_same_weights(runner, engine, scrambled(model, 2))


@pytest.mark.parametrize("spoilt", ["one element", "a stale layer"])
@pytest.mark.parametrize("transport", ["slot", "disk"])
def test_a_wrong_tensor_is_named_and_never_sampled(world, transport, spoilt, tmp_path):
    """The probe alone would not see it: in bfloat16 rounding moves it further."""
    runner, engine, model = world
    runner.run(apply(engine, disk_order(1, model, tmp_path)))
    new = scrambled(model, 2)
    slot, in_slot = slot_order(2, new)
    name = "model.layers.1.mlp.down_proj.weight"
    with torch.no_grad():
        wrong = dict(new.named_parameters())[name]
        if spoilt == "one element":
            wrong.view(-1)[11] *= 1.01
        else:
            wrong.copy_(dict(model.named_parameters())[name])
    if transport == "slot":
        slot.buffer.copy_(flat(new)[1])
        update = in_slot
    else:
        files = disk_order(2, new, tmp_path)
        update = order(2, "disk", {**files.details, "checksums": in_slot.details["checksums"]})
    with pytest.raises(TransferError, match=f"{name}.*checksum"):
        runner.run(apply(engine, update))
    assert engine.weights.version == (1 if transport == "slot" else -1)  # a slot is verified before the pause
    runner.run(apply(engine, disk_order(3, new, tmp_path)))
    assert_same_weights(runner, engine, new)
