"""Real engines with an adapter: what arrives is what PEFT computes with it, or the engine does not sample."""

import asyncio
import threading

import numpy as np
import pytest
import torch

from asyncrl.engine.base import SamplingSpec
from asyncrl.errors import ConfigError, TransferError
from asyncrl.lineage import Weights
from tests.support.adapters import LORA, adapted, adapter_order, tensors_of
from tests.support.vllm_engines import (
    STAGING,
    STORIES,
    Sender,
    apply,
    load,
    logprobs_of,
    needs_stories,
    running_engine,
    slot_order,
)
from tests.support.waiting import turns, until

pytestmark = [pytest.mark.integration, needs_stories]

PROBE = (1, *range(300, 331))
SPEC = SamplingSpec(temperature=1.0, max_response_tokens=200)
# vLLM joins the adapters of the first three, and of the next two.
QUERY, VALUE = (f"base_model.model.model.layers.0.self_attn.{part}_proj" for part in "qv")
GATE = "base_model.model.model.layers.1.mlp.gate_proj"


@pytest.fixture(scope="module", params=["vllm", "transformers"])
def world(request):
    """(runner, engine)"""
    with running_engine(STORIES, engine=request.param, lora=LORA) as (runner, engine):
        yield runner, engine


def assert_computes(runner, engine, model):
    np.testing.assert_allclose(runner.run(engine.score(PROBE)), logprobs_of(model, PROBE), atol=1e-4)


def test_it_begins_as_its_base(world):
    runner, engine = world
    assert_computes(runner, engine, load(STORIES))
    for rollout in runner.run(engine.sample([1, 403], 2, SPEC)):
        expected = logprobs_of(load(STORIES), [1, 403, *rollout.response_ids])[1:]
        np.testing.assert_allclose(rollout.behaviour_logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("world", ["vllm"], indirect=True)
def test_each_request_names_the_adapter(world, monkeypatch):
    """On a GPU the base answers a request that does not; on a CPU the one adapter is added to all."""
    runner, engine = world
    generate, named = engine._llm.generate, []

    def noted(*args, lora_request, **settings):
        named.append(lora_request.lora_name)
        return generate(*args, lora_request=lora_request, **settings)

    monkeypatch.setattr(engine._llm, "generate", noted)
    runner.run(engine.score(PROBE))
    runner.run(engine.sample([1, 403], 1, SPEC))
    assert named == ["policy", "policy"]


@pytest.mark.parametrize("transport", ["slot", "tcp"])
def test_it_computes_with_each_adapter_in_turn(world, transport):
    """The first that it gets may be of any version: it was started late."""
    runner, engine = world
    sender = Sender() if transport == "tcp" else None
    for version in (7, 8, 9):
        model = adapted(STORIES, version)
        before = runner.run(engine.score(PROBE))
        _slot, update = adapter_order(version, tensors_of(model), sender)
        runner.run(apply(engine, update))
        assert engine.weights.version == version
        assert np.abs(runner.run(engine.score(PROBE)) - before).max() > 0.1
        assert_computes(runner, engine, model)


def test_requests_run_through_a_swap_and_prompts_of_the_old_adapter_are_not_used(world):
    """Also a prompt whose blocks a running request holds in the cache."""
    runner, engine = world
    old, new = adapted(STORIES, 1), adapted(STORIES, 2)
    prompt = [1, *torch.randint(3, 512, (255,), generator=torch.Generator().manual_seed(0)).tolist()]

    async def scenario():
        await apply(engine, adapter_order(1, tensors_of(old))[1])
        leave = threading.Event()
        update = adapter_order(2, tensors_of(new), Sender(), after=leave)[1]
        arriving = asyncio.create_task(asyncio.to_thread(STAGING.stage, update))
        across = asyncio.create_task(engine.sample(prompt, 8, SPEC))
        await turns(1)  # so that it runs
        await engine.progress()
        leave.set()
        ready = await arriving
        await engine.begin_update()
        queued = asyncio.create_task(engine.sample(prompt, 2, SPEC))
        await until(lambda: engine.stats().running_requests == 10)
        await engine.receive(ready)
        await engine.finish_update(Weights(2))
        return await across, await queued

    across, queued = runner.run(scenario())
    assert {span.version for rollout in across for span in rollout.version_spans} == {1, 2}
    for rollout in (*across, *queued):
        ids = [*prompt, *rollout.response_ids]
        for version, model in ((1, old), (2, new)):
            # After the swap, a running request keeps what the old adapter has computed.
            if version == 1 or rollout in queued:
                of_it = rollout.versions == version
                expected = logprobs_of(model, ids)[len(prompt) - 1 :]
                np.testing.assert_allclose(rollout.behaviour_logprobs[of_it], expected[of_it], atol=1e-3)
    assert_computes(runner, engine, new)


def part_of(tensors, *without, **replaced):
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(without)} | replaced


def test_an_adapter_that_is_not_the_engines_is_refused_by_name_and_the_next_one_is_used(world):
    runner, engine = world
    tensors = tensors_of(adapted(STORIES, 3))
    head = {"base_model.model.lm_head.lora_A.weight": torch.ones(8, 64)}
    wrong = {
        f"{QUERY}.lora_A.weight has shape None in the update": part_of(tensors, QUERY),
        f"{VALUE}.lora_B.weight has shape None": part_of(tensors, f"{VALUE}.lora_B"),
        f"{GATE}.lora_A.weight has shape None": part_of(tensors, GATE),
        "lm_head.lora_A.weight has shape .* in the update, None in the engine": tensors | head,
        r"layers.0.mlp.down_proj.lora_A.weight has shape \(4, ": {
            name: tensor[:4] if "lora_A" in name else tensor[:, :4] for name, tensor in tensors.items()
        },
    }
    for reason, sent in wrong.items():
        with pytest.raises(TransferError, match=reason):
            runner.run(apply(engine, adapter_order(3, sent)[1]))
        assert engine.weights.version == -1
    with pytest.raises(TransferError, match="update of 'weights', but this engine takes 'adapter'"):
        runner.run(apply(engine, slot_order(3, load(STORIES))[1]))
    runner.run(apply(engine, adapter_order(4, tensors)[1]))
    assert_computes(runner, engine, adapted(STORIES, 3))


def test_a_swap_that_fails_at_any_moment_is_repaired_by_the_next(world):
    runner, engine = world
    first, second = (adapted(STORIES, seed) for seed in (5, 6))

    async def scenario():
        await apply(engine, adapter_order(5, tensors_of(first))[1])
        # On its way: nothing has begun, and the first goes on.
        spoilt = adapter_order(6, tensors_of(second), Sender(), spoil=3)[1]
        with pytest.raises(TransferError, match="checksum"):
            await apply(engine, spoilt)
        assert engine.weights.version == 5
        np.testing.assert_allclose(await engine.score(PROBE), logprobs_of(first, PROBE), atol=1e-4)
        # While it is copied.
        slot, update = adapter_order(6, tensors_of(second))
        ready = await asyncio.to_thread(STAGING.stage, update)
        slot.complete(7)
        await engine.begin_update()
        with pytest.raises(TransferError, match="wrote the next version over these"):
            await engine.receive(ready)
        assert engine.weights.version == -1
        await apply(engine, adapter_order(8, tensors_of(second))[1])

    runner.run(scenario())
    assert_computes(runner, engine, second)


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_it_begins_with_the_start_adapter_of_some_layers(engine, tmp_path):
    targets = ["q_proj", "up_proj"]
    model = adapted(STORIES, 1, targets)
    model.save_pretrained(tmp_path)
    lora = LORA | {"start": tmp_path, "targets": targets}
    with running_engine(STORIES, engine=engine, lora=lora) as (runner, begun):
        assert_computes(runner, begun, model)
        runner.run(apply(begun, adapter_order(1, tensors_of(adapted(STORIES, 2, targets)))[1]))
        assert_computes(runner, begun, adapted(STORIES, 2, targets))


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_an_adapter_of_no_layer_is_a_mistake_of_the_config(engine):
    with (
        pytest.raises(ConfigError, match=r"model\.lora\.targets: lm_head "),
        running_engine(STORIES, engine=engine, lora=LORA | {"targets": ["lm_head"]}),
    ):
        pass


def test_an_engine_without_an_adapter_takes_none():
    with running_engine(STORIES, engine="transformers", lora=LORA | {"sync": "merged"}) as (runner, engine):
        update = adapter_order(1, tensors_of(adapted(STORIES, 1)))[1]
        with pytest.raises(TransferError, match="update of 'adapter', but this engine takes 'weights'"):
            runner.run(apply(engine, update))
        runner.run(apply(engine, slot_order(2, load(STORIES))[1]))
        assert_computes(runner, engine, load(STORIES))
