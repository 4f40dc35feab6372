"""Real engines: every token has the version and the log-probability of the weights that sampled it.
Weights that arrive are the weights that were sent, or the engine does not sample."""

import asyncio
import os
import re
import shutil
import signal
import sys
import threading
from dataclasses import replace

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoTokenizer

from asyncrl.addons.endpoint.agent_process import AgentEnvironment
from asyncrl.columns import KEPT_COUNTS, KEPT_IDS
from asyncrl.config.environment_section import EnvironmentConfig
from asyncrl.engine.answers import AnswerReader
from asyncrl.engine.base import SamplingSpec
from asyncrl.engine.episodes import EpisodeSampler
from asyncrl.errors import ConfigError, EngineError, TransferError
from asyncrl.lineage import Weights
from asyncrl.session.chat_template import TemplateRenderer
from asyncrl.types import Prompt
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
    order,
    running_engine,
    scrambled,
    slot_order,
    untied_qwen2,
)
from tests.support.waiting import stop, turns, until

pytestmark = [pytest.mark.integration, needs_stories]

PROBE = (1, *range(300, 331))
SPEC = SamplingSpec(temperature=1.0, max_response_tokens=200)


@pytest.fixture(scope="module", params=["vllm", "vllm untied", "transformers"])
def world(request, tmp_path_factory):
    """(runner, engine, a Hugging Face model of the same architecture)"""
    engine, *untied = request.param.split()
    directory = untied_qwen2(tmp_path_factory.mktemp("untied")) if untied else STORIES
    with running_engine(directory, engine=engine) as (runner, engine):
        yield runner, engine, load(directory)


# Tests of what one engine shows come first: those of updates leave other weights in it.
tied = pytest.mark.parametrize("world", ["vllm"], indirect=True)
both = pytest.mark.parametrize("world", ["vllm", "transformers"], indirect=True)


def spec(temperature=1.0, tokens=100, stop=()):
    return SamplingSpec(temperature=temperature, max_response_tokens=tokens, stop=stop)


def assert_sampled_from(model, rollout, temperature=1.0):
    """The recorded log-probabilities are those of the model."""
    expected = logprobs_of(model, [*rollout.prompt_ids, *rollout.response_ids], temperature)[
        len(rollout.prompt_ids) - 1 :
    ]
    np.testing.assert_allclose(rollout.behaviour_logprobs, expected, atol=1e-4)


@tied
def test_it_is_the_model_runner_that_is_expected(world):
    """The newer one on a GPU, or with Triton's interpreter in place of a GPU."""
    config = world[1]._llm.vllm_config
    is_newer = os.environ.get("TRITON_INTERPRET") == "1"
    assert config.use_v2_model_runner == bool(config.scheduler_config.async_scheduling) == is_newer


@both
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_behaviour_logprobs_are_the_models_at_the_sampling_temperature(world, temperature):
    runner, engine, model = world
    rollouts = runner.run(engine.sample([1, 403, 407], 6, spec(temperature)))
    assert len({tuple(rollout.response_ids.tolist()) for rollout in rollouts}) == 6
    for rollout in rollouts:
        assert rollout.prompt_ids.tolist() == [1, 403, 407]
        assert_sampled_from(model, rollout, temperature)


@both
def test_a_greedy_request_beside_sampled_ones_says_the_likeliest_tokens_with_their_logprobs(world):
    runner, engine, model = world

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


@both
def test_a_rollout_records_what_was_left_to_sample_and_its_probability_among_it(world):
    """Beside requests of all tokens, and one that is greedy."""
    runner, engine, model = world
    few = SamplingSpec(temperature=0.8, max_response_tokens=60, top_k=20, top_p=0.9)

    async def scenario():
        kinds = ((4, few), (4, spec()), (1, replace(few, temperature=0.0)))
        requests = [engine.sample([1, 403, 407], count, one) for count, one in kinds]
        return await asyncio.gather(*requests)

    rollouts, *others = runner.run(scenario())
    assert all(not one.recorded for other in others for one in other)
    sizes = set()
    for rollout in rollouts:
        ids = torch.tensor([[*rollout.prompt_ids.tolist(), *rollout.response_ids.tolist()]])
        with torch.no_grad():
            p_TV = (model(ids).logits[0, 2:-1] / 0.8).double().softmax(-1).numpy()
        sets = np.split(rollout.recorded[KEPT_IDS], np.cumsum(rollout.recorded[KEPT_COUNTS])[:-1])
        kept = [p[ids].sum() for p, ids in zip(p_TV, sets, strict=True)]
        expected = np.log([p[token] for p, token in zip(p_TV, rollout.response_ids, strict=True)]) - np.log(
            kept
        )
        np.testing.assert_allclose(rollout.behaviour_logprobs, expected, atol=1e-4)
        for p, of, ids in zip(p_TV, kept, sets, strict=True):
            top = np.sort(p)[::-1][:20]
            # The most probable ones, as few as have 0.9 of what top_k left.
            assert of == pytest.approx(top[: len(ids)].sum(), abs=1e-6) and len({*ids.tolist()}) == len(ids)
            assert (of - p[ids].min()) / top.sum() < 0.9 + 1e-5 and of / top.sum() > 0.9 - 1e-5
            sizes.add(len(ids))
    assert min(sizes) == 1 and max(sizes) > 3


@both
def test_score_is_at_temperature_one(world):
    runner, engine, model = world
    ids = [1, *range(300, 331)]
    np.testing.assert_allclose(runner.run(engine.score(ids)), logprobs_of(model, ids), atol=1e-4)


AGENT = """
import json, os
from openai import OpenAI
client, text = OpenAI(), "Once upon a time"
for _ in range(2):
    answer = client.completions.create(model="any", prompt=text, max_tokens=20).choices[0].text
    text += answer + " Then she said"
json.dump(1.0, open(os.environ["ASYNCRL_RESULT"], "w"))
"""


@tied
def test_an_episode_of_a_program_with_the_package_openai_has_the_models_logprobs(world, tmp_path):
    """Engine, session, endpoint, HTTP, client: the second turn was sampled behind the ids of the first."""
    runner, engine, model = world
    (tmp_path / "agent.py").write_text(AGENT)
    config = EnvironmentConfig(command=(sys.executable, str(tmp_path / "agent.py")))
    tokenizer = AutoTokenizer.from_pretrained(STORIES)
    renderer = TemplateRenderer(tokenizer)

    async def played():
        environment = AgentEnvironment(config)
        await environment.start()
        try:
            sampler = EpisodeSampler(
                engine, None, environment, config, renderer=renderer, read=AnswerReader(tokenizer, renderer).read,
                max_prompt_tokens=100, generator_id="g", seed=0,
            )  # fmt: skip
            return await sampler.play(Prompt(token_ids=(), text="", row={}), SPEC, seed=0, episode=0)
        finally:
            await environment.close()

    (rollout,) = runner.run(played()).rollouts
    assert rollout.prompt_ids.tolist() == tokenizer("Once upon a time")["input_ids"]
    assert len(rollout.turns.ends) == 2
    actions = rollout.action_mask
    assert tokenizer.decode(rollout.response_ids[~actions]).strip() == "Then she said"
    ids = [*rollout.prompt_ids, *rollout.response_ids]
    expected = logprobs_of(model, ids)[len(rollout.prompt_ids) - 1 :]
    np.testing.assert_allclose(rollout.behaviour_logprobs[actions], expected[actions], atol=1e-4)


@tied
def test_prompts_cached_under_old_weights_are_not_used_by_new_requests(world, tmp_path):
    runner, engine, model = world
    prompt = [1, *torch.randint(3, 512, (255,), generator=torch.Generator().manual_seed(0)).tolist()]

    async def scenario():
        await engine.sample(prompt, 2, spec())  # leaves its blocks in the cache
        sent = scrambled(model, 5)
        running = asyncio.create_task(engine.sample(prompt, 2, spec(tokens=256)))  # holds them
        await turns(1)  # so that it runs
        await engine.progress()
        await engine.begin_update()
        queued = asyncio.create_task(engine.sample(prompt, 2, spec()))
        await until(lambda: engine.stats().running_requests == 4)
        await engine.receive(disk_order(1, sent, tmp_path))
        await engine.finish_update(Weights(1))
        late = await engine.sample(prompt, 2, spec())
        await running
        return sent, [*await queued, *late]

    sent, rollouts = runner.run(scenario())
    for rollout in rollouts:
        assert_sampled_from(sent, rollout)
    runner.run(apply(engine, disk_order(0, model, tmp_path)))


@tied
def test_turns_of_one_salt_keep_their_cache_through_an_update_and_nothing_else_reads_it(
    world, tmp_path, monkeypatch
):
    runner, engine, model = world
    prompt = [1, *torch.randint(3, 512, (255,), generator=torch.Generator().manual_seed(1)).tolist()]
    cached, generate = [], engine._llm.generate

    async def observed(*args, **kwargs):
        async for output in generate(*args, **kwargs):
            yield output
        cached.append(output.num_cached_tokens)

    monkeypatch.setattr(engine._llm, "generate", observed)

    async def scenario():
        salt = engine.salt
        (first,) = await engine.sample(prompt, 1, spec(tokens=20), salt=salt)
        history = [*prompt, *first.response_ids.tolist(), 300, 301]
        sent = scrambled(model, 6)
        await apply(engine, disk_order(1, sent, tmp_path))
        assert engine.salt != salt
        (second,) = await engine.sample(history, 1, spec(tokens=20), salt=salt)
        (fresh,) = await engine.sample(history, 1, spec(tokens=20))
        return sent, second, fresh

    sent, second, fresh = runner.run(scenario())
    assert cached[0] == 0 and cached[1] >= 128 and cached[2] == 0
    assert [span.version for span in second.version_spans] == [1]
    assert_sampled_from(sent, fresh)
    with pytest.raises(AssertionError):  # the history is that of the old weights, as in one long request
        assert_sampled_from(sent, second)
    monkeypatch.undo()
    runner.run(apply(engine, disk_order(0, model, tmp_path)))


@tied
def test_a_prompt_that_was_read_is_not_read_again_but_for_its_end(world, monkeypatch):
    runner, engine, _ = world
    prompt, cached, generate = [1, *range(3, 72)], [], engine._llm.generate

    async def observed(*args, **kwargs):
        async for output in generate(*args, **kwargs):
            yield output
        cached.append(output.num_cached_tokens)

    async def one_by_one():
        for _ in range(2):
            await engine.sample(prompt, 1, spec(tokens=1))

    monkeypatch.setattr(engine._llm, "generate", observed)
    runner.run(one_by_one())
    assert cached == [0, 64]


@both
def test_a_response_that_a_string_ends_has_the_models_logprobs(world):
    runner, engine, model = world
    rollouts = runner.run(engine.sample([1, 403, 407], 4, spec(tokens=200, stop=("a",))))
    assert all(rollout.finish_reason == "stop" and len(rollout.response_ids) < 200 for rollout in rollouts)
    for rollout in rollouts:
        assert_sampled_from(model, rollout)


@both
def test_the_text_of_a_special_token_ends_a_response_too(world):
    runner, engine, _ = world
    rollouts = runner.run(engine.sample([1, 403, 407], 64, spec(temperature=2.0, tokens=200, stop=("<s>",))))
    begins = [rollout.response_ids.tolist() for rollout in rollouts if 1 in rollout.response_ids]
    assert begins and all(ids.index(1) == len(ids) - 1 for ids in begins)


@both
def test_cancelled_and_dropped_requests_leave_the_engine(world, tmp_path):
    runner, engine, model = world

    async def scenario():
        cancelled = asyncio.create_task(engine.sample([1, 300], 8, spec(tokens=256)))
        await until(lambda: engine.stats().running_requests == 8)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        dropped = asyncio.create_task(engine.sample([1, 300], 8, spec(tokens=256)))
        await until(lambda: engine.stats().running_requests == 8)
        await engine.begin_update()
        await engine.abort_requests()
        with pytest.raises(EngineError, match="aborted"):
            await dropped
        with pytest.raises(EngineError, match="no weights were received"):
            await engine.finish_update(Weights(0))
        await apply(engine, disk_order(0, model, tmp_path))
        llm = getattr(engine, "_llm", None)
        await until(lambda: not (llm and llm.output_processor.request_states))
        return engine.stats()

    assert runner.run(scenario()).running_requests == 0
    assert len(runner.run(engine.sample([1, 300], 2, spec()))) == 2


@tied
def test_a_refused_request_is_an_engine_error(world):
    runner, engine, _ = world
    with pytest.raises(EngineError, match="refused"):
        runner.run(engine.sample([1] * 600, 1, spec()))


@tied
def test_an_engine_whose_core_is_stopped_makes_no_progress(world):
    """Idle and while it samples; under an event loop that goes on."""
    runner, engine, _ = world
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
            stop(core)
            try:
                assert await is_silent()
            finally:
                core.send_signal(signal.SIGCONT)
            await asyncio.wait_for(engine.progress(), 60.0)
            if task is not None:
                assert len(await asyncio.wait_for(task, 120.0)) == 16

    runner.run(scenario())


def assert_same_weights(runner, engine, model):
    np.testing.assert_allclose(runner.run(engine.score(PROBE)), logprobs_of(model, PROBE), atol=1e-4)


@pytest.mark.parametrize("transport", ["slot", "tcp", "disk"])
def test_the_engine_scores_like_the_model_that_was_sent(world, transport, tmp_path):
    runner, engine, model = world
    sender = Sender()
    for version in range(1, 7):
        sent = scrambled(model, version)
        if transport == "disk":
            update = disk_order(version, sent, tmp_path)
        elif transport == "slot":
            _slot, update = slot_order(version, sent)
        else:
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
        update = Sender().order(2, new, after=leave)
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
        await turns(1)  # so that it runs
        await engine.progress()
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
        await apply(engine, Sender().order(1, model))
        running = asyncio.create_task(engine.sample([1, 300], 4, SPEC))
        nobody = Sender(deadline_s=1.0).order(2, model, absent=True)
        # Not in the first tensor.
        spoilt = Sender().order(3, scrambled(model, 3), spoil=8)
        reasons = ["0 of .* bytes arrived", "checksum"]
        for update, reason in zip([nobody, spoilt], reasons, strict=True):
            with pytest.raises(TransferError, match=reason):
                await apply(engine, update)
            assert engine.weights.version == 1
            np.testing.assert_allclose(await engine.score(PROBE), logprobs_of(model, PROBE), atol=1e-4)
        rollouts = await running
        await apply(engine, Sender().order(5, scrambled(model, 5)))
        return rollouts

    assert {version for rollout in runner.run(scenario()) for version, *_ in rollout.version_spans} == {1}
    assert_same_weights(runner, engine, scrambled(model, 5))


def test_after_a_failed_load_nothing_is_sampled_until_an_update_succeeds(world, tmp_path):
    runner, engine, model = world

    async def scenario():
        await apply(engine, Sender().order(1, model))
        incomplete = Sender().order(4, scrambled(model, 4), leave_out=["model.layers.1.mlp.down_proj.weight"])
        # vLLM joins both with others, and would use what is left of the layer.
        fused = ["model.layers.0.self_attn.v_proj.weight", "model.layers.1.mlp.gate_proj.weight"]
        partly = disk_order(4, scrambled(model, 4), tmp_path, leave_out=fused)
        nowhere = disk_order(5, model, tmp_path / "none")
        shutil.rmtree(tmp_path / "none")
        running = asyncio.create_task(engine.sample([1, 300], 4, SPEC))
        await turns(1)  # so that it runs
        await engine.progress()
        reasons = [
            r"1 of .* parameters were not sent|mlp.down_proj.weight has shape None in the update",
            rf"2 parts of fused parameters were not sent, first '{re.escape(fused[0])}'|has shape None in the upd",
            "cannot be opened",
        ]
        for update, reason in zip([incomplete, partly, nowhere], reasons, strict=True):
            with pytest.raises(TransferError, match=reason):
                await apply(engine, update)
            assert engine.weights.version == -1
            with pytest.raises(EngineError, match="paused"):
                await engine.score(PROBE)
        waiting = asyncio.create_task(engine.sample([1, 301], 1, SPEC))
        assert not (await asyncio.wait({running, waiting}, timeout=0.5))[0]
        await apply(engine, Sender().order(6, scrambled(model, 6)))
        return await running, await waiting

    running, waiting = runner.run(scenario())
    assert {version for rollout in running for version, *_ in rollout.version_spans} == {1, 6}
    assert {version for version, *_ in waiting[0].version_spans} == {6}
    assert_same_weights(runner, engine, scrambled(model, 6))


@pytest.mark.parametrize("last", ["mlp.up_proj", "self_attn.v_proj"])
def test_half_a_fused_layer_of_a_failed_update_is_not_mixed_into_the_next(world, last, tmp_path):
    """vLLM buffers the parts of a fused layer until it has all; in place of the last one, loading fails."""
    runner, engine, model = world
    _slot, torn = slot_order(1, scrambled(model, 1))
    for spec in torn.details["layout"]["specs"]:
        if spec[0] == f"model.layers.1.{last}.weight":
            spec[0] = "model.layers.1.unknown.weight"

    async def scenario():
        with pytest.raises(TransferError, match="incomplete"):
            await apply(engine, torn)
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
    assert engine.weights.version == 1  # it is verified before the pause
    runner.run(apply(engine, disk_order(3, new, tmp_path)))
    assert_same_weights(runner, engine, new)


def test_arguments_that_vllm_does_not_know_are_mistakes_of_the_config_and_others_may_pass(tmp_path):
    with (
        pytest.raises(ConfigError, match=r"generator\.vllm: cache_dtype: .*'auto'.*, found 'fp9'"),
        running_engine(STORIES, vllm={"kv_cache_dtype": "fp9"}),
    ):
        pass
    with pytest.raises(EngineError, match=f"model '{tmp_path}' on cpu: "), running_engine(tmp_path):
        pass  # its files may come later
