"""transformers as the engine, with a tiny model: requests that fail end alone, and texts end an answer."""

import asyncio
import sys
from concurrent.futures import Future
from unittest.mock import MagicMock, Mock

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from asyncrl.engine.base import SamplingSpec
from asyncrl.engine.transformers import TransformersEngine
from asyncrl.engine.vllm.engine import VLLMEngine
from asyncrl.errors import ResultError
from tests.support.agent_talks import character_tokenizer

TOKENIZER = character_tokenizer()
POSITIONS = 64


@pytest.fixture
def engine():
    torch.manual_seed(0)
    sizes = {"n_positions": POSITIONS, "n_embd": 8, "n_layer": 1, "n_head": 1}
    config = GPT2Config(vocab_size=len(TOKENIZER), **sizes, bos_token_id=0, eos_token_id=0)
    made = TransformersEngine(GPT2LMHeadModel(config).eval(), TOKENIZER, target="weights", deadline_s=60)
    yield made
    asyncio.run(made.close())


def sample(engine, prompt, count=1, **spec):
    ids = TOKENIZER(prompt)["input_ids"]
    spec = {"temperature": 1.0, "max_response_tokens": 8} | spec
    return asyncio.run(engine.sample(ids, count, SamplingSpec(**spec)))


def test_a_request_beyond_the_models_positions_fails_alone(engine):
    with pytest.raises(ResultError, match="at a request of 65 prompt tokens: IndexError"):
        sample(engine, "x" * (POSITIONS + 1))
    assert sample(engine, "xyz")[0].prompt_ids.tolist() == TOKENIZER("xyz")["input_ids"]


@pytest.mark.parametrize("error", [KeyError("x"), ZeroDivisionError(), RuntimeError("x"), MemoryError()])
def test_whatever_a_model_raises_is_a_failed_request(engine, monkeypatch, error):
    def forward(*_, **__):
        raise error

    monkeypatch.setattr(engine._model, "forward", forward)
    with pytest.raises(ResultError, match=type(error).__name__):
        sample(engine, "xyz")


def test_each_answer_ends_with_the_first_of_the_texts_that_end_it(engine):
    stops = ("a", "b", "7")
    rollouts = sample(engine, "xyz", 16, max_response_tokens=POSITIONS - 8, stop=stops)
    assert {one.finish_reason for one in rollouts} >= {"stop"}
    for rollout in rollouts:
        ids = rollout.response_ids.tolist()
        text = TOKENIZER.decode(ids[:-1])
        assert not any(stop in text for stop in stops)
        ended = ids[-1] == 0 or TOKENIZER.decode(ids[-1:]) in stops
        assert ended == (rollout.finish_reason == "stop")


@pytest.mark.parametrize("waits", ["transformers receives", "vllm receives", "vllm is called"])
def test_an_engine_that_answers_in_the_tick_of_a_cancellation_leaves_it_cancelled(engine, monkeypatch, waits):
    """Or its generator goes on after the end of the run. `asyncio.wait_for` of Python 3.11 forgot it."""
    for name in ("vllm", "vllm.v1", "vllm.v1.engine", "vllm.v1.engine.exceptions"):
        monkeypatch.setitem(sys.modules, name, Mock(EngineDeadError=OSError))

    async def scenario():
        answer, told = Future(), asyncio.get_running_loop().create_future()
        llm, order = Mock(collective_rpc=lambda *_, **__: told), MagicMock(deadline_s=600.0)
        vllm = VLLMEngine(llm, deadline_s=600.0, recompute_kv=False)
        monkeypatch.setattr(engine, "_loading", Mock(submit=lambda *_: answer))
        vllm._paused_since_s = engine._paused_since_s = 0.0
        call = {
            "transformers receives": lambda: engine.receive(order),
            "vllm receives": lambda: vllm.receive(order),
            "vllm is called": lambda: vllm._call(told, "pause"),
        }[waits]
        update = asyncio.create_task(call())
        await asyncio.to_thread(int)  # by now the update waits for the answer
        answer.set_result([])
        told.set_result([])
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update

    asyncio.run(scenario())
    monkeypatch.undo()  # the engine closes its own
