"""The endpoint, called with the real client libraries, and by clients that mean it harm."""

import asyncio
import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import islice
from select import select

import anthropic
import httpx
import openai
import pytest

from asyncrl.addons.endpoint import agent_server, open_episodes
from asyncrl.addons.endpoint.agent_server import DIALECTS, Endpoint
from asyncrl.addons.endpoint.base import Refused
from asyncrl.addons.endpoint.open_episodes import OpenEpisode
from asyncrl.engine.base import SamplingSpec
from asyncrl.engine.fake import FakeEngine
from asyncrl.environments.base import Answer, BudgetSpent, ToolCall
from asyncrl.errors import EngineError
from tests.support.agent_talks import CHARACTERS, ScriptedTalk, engine_talk
from tests.support.waiting import LONG_S, turns, until, wait_until

CALL = ToolCall(id="abcdef010", name="add", arguments={"a": 1, "b": 2})
TEXT = Answer(text="two words", tokens=3, prompt_tokens=11)
CALLS = Answer(text="I add.", tool_calls=(CALL,), tokens=9, prompt_tokens=12)
CUT = Answer(text="two wo", finish_reason="length", tokens=2, prompt_tokens=11)
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
QUESTION = [{"role": "user", "content": "1+2?"}]


def serve(talk, play: Callable[[Endpoint, OpenEpisode], Awaitable[None]]) -> Endpoint:
    """Run `play` against an endpoint with one episode."""

    async def run() -> Endpoint:
        endpoint = Endpoint()
        await endpoint.start()
        try:
            async with asyncio.timeout(LONG_S):
                await play(endpoint, endpoint.episodes.open(talk))
        finally:
            await endpoint.close()
        return endpoint

    return asyncio.run(run())


def chat_client(endpoint: Endpoint, episode: OpenEpisode, **options) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key=episode.key, **options)


def post(endpoint: Endpoint, key: str, body, path: str = "/v1/chat/completions", **headers):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {
        "authorization": f"Bearer {key}",
        **{name.replace("_", "-"): one for name, one in headers.items()},
    }
    return httpx.AsyncClient(timeout=LONG_S).post(f"{endpoint.url}{path}", content=content, headers=headers)


def asking(path: str) -> dict:
    """The body of a question in the dialect of a path."""
    return {
        "/v1/chat/completions": {"messages": QUESTION},
        "/v1/completions": {"prompt": "x"},
        "/v1/responses": {"input": "x"},
        "/v1/messages": {"messages": QUESTION, "max_tokens": 9},
    }[path]


def recall_nothing(number):
    raise Refused(400, "unknown", "unknown_id")


TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}


@pytest.mark.parametrize("streams", [False, True], ids=["plain", "streamed"])
def test_openai_chat_with_a_tool(streams):
    talk = ScriptedTalk(CALLS, TEXT)

    async def ask(client, messages):
        options = {"model": "any", "messages": messages, "tools": [TOOL], "max_tokens": 50}
        if not streams:
            answer = await client.chat.completions.create(**options)
            return answer.choices[0].message, answer.choices[0].finish_reason, answer.usage
        message, reason, usage = {"role": "assistant", "content": "", "tool_calls": []}, None, None
        usage_too = {"include_usage": True}
        async for chunk in await client.chat.completions.create(
            stream=True, stream_options=usage_too, **options
        ):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                message["content"] += choice.delta.content or ""
                message["tool_calls"] += [one.model_dump() for one in choice.delta.tool_calls or ()]
                reason = choice.finish_reason or reason
        return openai.types.chat.ChatCompletionMessage.model_validate(message), reason, usage

    async def play(endpoint, episode):
        client = chat_client(endpoint, episode)
        message, reason, usage = await ask(client, QUESTION)
        assert (message.content, reason) == ("I add.", "tool_calls")
        assert json.loads(message.tool_calls[0].function.arguments) == {"a": 1, "b": 2}
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (12, 9, 21)
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
        message, reason, _ = await ask(client, [*QUESTION, message.model_dump(exclude_none=True), result])
        assert (message.content, reason) == ("two words", "stop")
        assert episode.calls == 2
        assert not episode.fault

    serve(talk, play)
    assert talk.asked[0] == {"messages": QUESTION, "tools": [TOOL], "max_tokens": 50, "train": True}
    _, call, result = talk.asked[1]["messages"]
    assert (call["role"], call["content"]) == ("assistant", "I add.")
    assert call["tool_calls"][0]["function"]["name"] == "add"
    assert result == {"role": "tool", "tool_call_id": CALL.id, "content": "3"}
    assert talk.asked[1]["tools"] == [TOOL]


@pytest.mark.parametrize("streams", [False, True], ids=["plain", "streamed"])
def test_openai_responses_with_a_tool(streams):
    """The conversation that the talk gets is that of the chat interface: one tree for all dialects."""
    talk = ScriptedTalk(CALLS, CUT)

    async def ask(client, items):
        tool = {
            "type": "function",
            "name": "add",
            "description": "Adds.",
            "parameters": PARAMETERS,
            "strict": True,
        }
        options = {"model": "any", "input": items, "tools": [tool], "instructions": "Add."}
        if not streams:
            return await client.responses.create(**options)
        async with client.responses.stream(**options) as stream:
            return [event.response async for event in stream if hasattr(event, "response")][-1]

    async def play(endpoint, episode):
        client = chat_client(endpoint, episode)
        answer = await ask(client, QUESTION)
        assert answer.output_text == "I add."
        assert answer.usage.total_tokens == 21
        items = [item.model_dump(exclude={"parsed_arguments"}) for item in answer.output]
        result = {"type": "function_call_output", "call_id": items[1]["call_id"], "output": "3"}
        answer = await ask(client, [*QUESTION, *items, result])
        assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert answer.output_text == "two wo"

    serve(talk, play)
    assert talk.asked[0]["messages"] == [{"role": "system", "content": "Add."}, *QUESTION]
    assert talk.asked[0]["tools"] == [TOOL]
    *start, call, result = talk.asked[1]["messages"]
    assert start == talk.asked[0]["messages"]
    assert (call["content"], call["tool_calls"][0]["id"]) == ("I add.", CALL.id)
    assert result == {"role": "tool", "tool_call_id": CALL.id, "content": "3"}


@pytest.mark.parametrize("streams", [False, True], ids=["plain", "streamed"])
def test_anthropic_messages_with_a_tool(streams):
    talk = ScriptedTalk(CALLS, TEXT)

    async def ask(client, messages):
        tool = {"name": "add", "description": "Adds.", "input_schema": PARAMETERS}
        options = {"model": "any", "messages": messages, "tools": [tool], "system": "Add.", "max_tokens": 50}
        if not streams:
            return await client.messages.create(**options)
        async with client.messages.stream(**options) as stream:
            return await stream.get_final_message()

    async def play(endpoint, episode):
        client = anthropic.AsyncAnthropic(base_url=endpoint.url, api_key=episode.key)
        answer = await ask(client, QUESTION)
        assert (answer.content[0].text, answer.stop_reason) == ("I add.", "tool_use")
        assert answer.content[1].input == {"a": 1, "b": 2}
        assert (answer.usage.input_tokens, answer.usage.output_tokens) == (12, 9)
        blocks = [block.model_dump(exclude_none=True) for block in answer.content]
        result = {"type": "tool_result", "tool_use_id": answer.content[1].id, "content": "3"}
        new = [{"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
        answer = await ask(client, [*QUESTION, *new])
        assert (answer.content[0].text, answer.stop_reason) == ("two words", "end_turn")

    serve(talk, play)
    assert talk.asked[0]["messages"] == [{"role": "system", "content": "Add."}, *QUESTION]
    assert talk.asked[0]["tools"] == [TOOL]
    *_, call, result = talk.asked[1]["messages"]
    assert json.loads(call["tool_calls"][0]["function"]["arguments"]) == {"a": 1, "b": 2}
    assert result == {"role": "tool", "tool_call_id": CALL.id, "content": "3"}


def test_completions_append_to_the_text_so_far():
    talk = ScriptedTalk(TEXT, TEXT)

    async def play(endpoint, episode):
        client = chat_client(endpoint, episode, max_retries=0)
        first = await client.completions.create(model="any", prompt="one ")
        text = "one " + first.choices[0].text
        await client.completions.create(model="any", prompt=f"{text} more")
        with pytest.raises(openai.BadRequestError, match="must begin with the text of the episode so far"):
            await client.completions.create(model="any", prompt="another")
        assert "must begin" in episode.fault
        with pytest.raises(openai.BadRequestError, match="`n` is 3, and plain text has one answer"):
            await client.completions.create(model="any", prompt=text, n=3)

    serve(talk, play)
    assert [asked["text"] for asked in talk.asked] == ["one ", " more"]


def test_a_prompt_behind_a_conversation_is_refused():
    """It would be sampled behind the last answer, which the agent did not send."""

    async def play(endpoint, episode):
        client = chat_client(endpoint, episode, max_retries=0)
        await client.chat.completions.create(model="any", messages=QUESTION)
        with pytest.raises(openai.BadRequestError, match="this episode has calls with messages"):
            await client.completions.create(model="any", prompt="one ")
        assert "calls with messages" in episode.fault

    talk = ScriptedTalk(TEXT, TEXT)
    serve(talk, play)
    assert len(talk.asked) == 1


@pytest.mark.parametrize("streams", [False, True], ids=["plain", "streamed"])
def test_the_ids_that_an_engine_sampled_are_trained_as_they_are(streams):
    """Several turns, a branch and a call that is not trained, through the client and back."""

    async def play(endpoint, episode):
        client = chat_client(endpoint, episode)

        async def ask(messages, **headers):
            options = {"model": "any", "messages": messages, "extra_headers": headers}
            if not streams:
                return (await client.chat.completions.create(**options)).choices[0].message.content
            stream = await client.chat.completions.create(stream=True, **options)
            return "".join([one.choices[0].delta.content or "" async for one in stream if one.choices])

        messages = [*QUESTION]
        for turn in range(4):
            answer = await ask(messages)
            messages += [
                {"role": "assistant", "content": answer},
                {"role": "user", "content": f"more {turn}"},
            ]
        await ask([*messages[:3], {"role": "user", "content": "another way"}])
        await ask([{"role": "user", "content": "judge this"}], **{"X-AsyncRL-Train": "no"})

    engine = FakeEngine(vocabulary=len(CHARACTERS) + 2, seed=3)
    talk, session = engine_talk(engine, SamplingSpec(temperature=1.0, max_response_tokens=2000))
    serve(talk, play)
    turns, rollouts = session.turns, session.rollouts()  # no drift
    assert len(turns) == 6
    assert (session.counts["branches"], session.counts["untrained"]) == (1, 1)
    assert talk.response == turns[4].message["content"]  # the last answer that is trained
    assert len(rollouts) == 2
    trained = sum(int(rollout.action_mask.sum()) for rollout in rollouts)
    assert trained == sum(len(turn.sampled_ids) for turn in turns[:5])


@pytest.mark.parametrize("path", DIALECTS)
def test_answers_of_a_frozen_model_are_not_trained(path):
    talk = ScriptedTalk(TEXT, TEXT)

    async def run():
        endpoint = Endpoint(frozen=("judge",))
        await endpoint.start()
        try:
            key = endpoint.episodes.open(talk).key
            for model in ("judge", "policy"):
                body = {"model": model, **asking(path)}
                body |= {"prompt": "two words" * (model == "policy")} if "prompt" in body else {}
                assert (await post(endpoint, key, body, path)).status_code == 200
        finally:
            await endpoint.close()

    asyncio.run(run())
    assert [asked["train"] for asked in talk.asked] == [False, True]


def test_max_tokens_lowers_the_runs_limit_only():
    async def play(endpoint, episode):
        client = chat_client(endpoint, episode)
        for limit in (2, 1000):
            await client.chat.completions.create(model="any", messages=QUESTION, max_tokens=limit)

    engine = FakeEngine(vocabulary=len(CHARACTERS) + 2, seed=3)
    talk, session = engine_talk(engine, SamplingSpec(temperature=1.0, max_response_tokens=7))
    serve(talk, play)
    assert [len(turn.sampled_ids) for turn in session.turns] == [2, 5]  # two of seven are used up


def test_several_choices_are_several_answers():
    talk = ScriptedTalk(TEXT, CUT)

    async def play(endpoint, episode):
        answer = await chat_client(endpoint, episode).chat.completions.create(
            model="m", messages=QUESTION, n=2
        )
        assert [choice.message.content for choice in answer.choices] == ["two words", "two wo"]
        assert answer.usage.completion_tokens == 5

    serve(talk, play)


def test_if_one_of_several_choices_fails_the_others_end():
    """They would go on to be sampled, recorded and trained, although no agent has seen them."""
    ended = []

    class Talk(ScriptedTalk):
        async def chat(self, messages, **limits):
            self.asked.append(messages)
            if len(self.asked) == 2:
                raise EngineError("gone")
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

    async def play(endpoint, episode):
        answer = await post(endpoint, episode.key, {"messages": QUESTION, "n": 3})
        assert answer.status_code == 503
        assert ended == [True, True]

    serve(Talk(), play)


def test_choices_that_wait_for_tokens_end_with_the_one_that_fails():
    """Its failure wakes them and cancels them in the same moment."""
    engine = FakeEngine()
    begun, running = [], []

    async def sample(prompt_ids, count, spec, **more):
        begun.append(count)
        await turns(1)
        if len(begun) == 1:
            raise EngineError("gone")
        running.append(spec)
        try:
            await asyncio.Event().wait()
        finally:
            running.remove(spec)

    engine.sample = sample
    talk, _ = engine_talk(engine, SamplingSpec(temperature=1.0, max_response_tokens=400))

    async def play(endpoint, episode):
        answer = await post(endpoint, episode.key, {"messages": QUESTION, "n": 3})
        assert answer.status_code == 503
        await turns(9)
        assert not running

    serve(talk, play)


@pytest.mark.parametrize("budget", ["length", "turns"])
def test_the_choices_that_ended_before_a_budget_was_spent_are_answered(budget):
    """They are recorded and trained, so the agent must have seen them."""
    talk = ScriptedTalk(TEXT, BudgetSpent(budget), CUT)

    async def play(endpoint, episode):
        answer = await post(endpoint, episode.key, {"messages": QUESTION, "n": 3})
        assert [one["message"]["content"] for one in answer.json()["choices"]] == ["two words", "two wo"]
        assert episode.calls == 2
        assert (episode.overflowed, episode.spent) == ((True, "") if budget == "length" else (False, "turns"))

    serve(talk, play)


@pytest.mark.parametrize(
    ("path", "echo"),
    [
        ("/v1/messages", lambda answer: {"role": "assistant", "content": answer["content"]}),
        ("/v1/chat/completions", lambda answer: answer["choices"][0]["message"]),
    ],
)
def test_half_of_a_surrogate_pair_that_the_model_wrote_may_come_back(path, echo):
    """A model writes it as an escape in the JSON of a call; clients send it back as they got it."""
    call = ToolCall(id="abc", name="add", arguments={"a": "\ud800", "\udc00": 1})
    answers = {0: Answer(text="half \udfff", tool_calls=(call,)), 1: TEXT}

    async def play(endpoint, episode):
        first = await post(endpoint, episode.key, {"messages": QUESTION, "max_tokens": 5}, path)
        again = {"messages": [*QUESTION, echo(first.json()), *QUESTION], "max_tokens": 5}
        assert (await post(endpoint, episode.key, again, path)).status_code == 200
        assert not episode.fault

    engine = FakeEngine(vocabulary=len(CHARACTERS) + 2, seed=3)
    talk, session = engine_talk(engine, SamplingSpec(temperature=1.0, max_response_tokens=2000))
    talk._read = lambda *given: answers[len(session.turns)]
    serve(talk, play)
    first, second = session.turns
    assert second.parent is first, "the conversation is known again"
    json.dumps(talk.transcript, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("path", "question", "tool", "none", "echo"),
    [
        (
            "/v1/chat/completions",
            "messages",
            TOOL,
            "none",
            lambda answer: [answer["choices"][0]["message"]],
        ),
        (
            "/v1/responses",
            "input",
            {"type": "function", "name": "add", "description": "Adds.", "parameters": PARAMETERS},
            "none",
            lambda answer: answer["output"],
        ),
        (
            "/v1/messages",
            "messages",
            {"name": "add", "description": "Adds.", "input_schema": PARAMETERS},
            {"type": "none"},
            lambda answer: [{"role": "assistant", "content": answer["content"]}],
        ),
    ],
    ids=lambda one: one if isinstance(one, str) and one.startswith("/") else "",
)
def test_a_turn_without_calls_continues_the_conversation(path, question, tool, none, echo):
    """The model sees the tools as before, so the ids before the turn are those that were sampled."""
    offered = []

    def read(prompt_ids, rollout, tools):
        offered.append(list(tools))
        return CALLS if tools else TEXT

    async def play(endpoint, episode):
        said = list(QUESTION)
        for choice in ("auto", none, "auto"):
            more = {} if choice == "auto" else {"tool_choice": choice}
            body = asking(path) | {question: said, "tools": [tool]} | more
            answer = await post(endpoint, episode.key, body, path)
            assert answer.status_code == 200, answer.text
            said += [*echo(answer.json()), *QUESTION]

    engine = FakeEngine(vocabulary=len(CHARACTERS) + 2, seed=3)
    talk, session = engine_talk(engine, SamplingSpec(temperature=1.0, max_response_tokens=2000))
    talk._read = read
    serve(talk, play)
    assert offered == [[TOOL], [], [TOOL]]
    first, second, third = session.turns
    assert second.parent is first and third.parent is second
    assert len(session.rollouts()) == 1


def test_the_runs_sampling_is_kept_and_what_it_overrides_is_counted():
    async def play(endpoint, episode):
        ask = chat_client(endpoint, episode).chat.completions.create
        await ask(model="any", messages=QUESTION, temperature=0.1, seed=7)
        await ask(model="any", messages=QUESTION)
        assert (episode.calls, episode.overridden) == (2, 1)

    serve(ScriptedTalk(TEXT, TEXT), play)


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/chat/completions", {"tool_choice": "required"}),
        ("/v1/chat/completions", {"tool_choice": {"type": "function", "function": {"name": "add"}}}),
        ("/v1/chat/completions", {"response_format": {"type": "json_object"}}),
        ("/v1/responses", {"tool_choice": "required"}),
        ("/v1/responses", {"text": {"format": {"type": "json_object"}}}),
        ("/v1/messages", {"tool_choice": {"type": "any"}}),
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema"}}}),
    ],
    ids=str,
)
def test_constrained_decoding_is_refused_as_a_mistake_or_ignored_and_counted(path, more):
    async def play(endpoint, episode):
        answer = await post(endpoint, episode.key, {"model": "m", **asking(path), **more}, path)
        assert answer.status_code == 400
        assert "constrains what the model may sample" in answer.json()["error"]["message"]
        assert ("constrains" in episode.mistake, episode.fault, episode.refused) == (True, "", 1)
        endpoint._is_free = True
        answer = await post(endpoint, episode.key, {"model": "m", **asking(path), **more}, path)
        assert (answer.status_code, episode.overridden, episode.refused) == (200, 1, 1)

    serve(ScriptedTalk(TEXT), play)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
def test_an_answer_ends_before_a_text_that_the_agent_names(path):
    """A ReAct agent asks for it, so that the model does not invent what its tool says."""
    engine = FakeEngine(vocabulary=len(CHARACTERS) + 2, seed=3)
    talk, session = engine_talk(engine, SamplingSpec(temperature=1.0, max_response_tokens=2000, stop=("~~",)))
    talk._read = lambda ids, rollout, tools: Answer(text="Act: look\nObservation:", tokens=5)

    async def play(endpoint, episode):
        name = "stop_sequences" if path == "/v1/messages" else "stop"
        body = asking(path) | {name: ["Observation:", "never"]}
        answer = (await post(endpoint, episode.key, body, path)).json()
        said = answer["choices"][0] if "choices" in answer else answer["content"][0]
        assert (said.get("text") or said["message"]["content"]) == "Act: look\n"
        assert answer.get("stop_reason", "stop_sequence") == "stop_sequence"
        assert answer.get("stop_sequence", "Observation:") == "Observation:"
        if "prompt" in body:
            body["prompt"] += said["text"] + "Observation: a door"
        else:
            body["messages"] = [*QUESTION, {"role": "assistant", "content": "Act: look\n"}, *QUESTION]
        assert (await post(endpoint, episode.key, body, path)).status_code == 200
        assert (episode.overridden, episode.fault) == (0, "")
        for wrong in ("", [""], [7], ["x"] * 17, ["x" * 300], {}):
            assert (await post(endpoint, episode.key, body | {name: wrong}, path)).status_code == 400

    asked = []
    sample = engine.sample

    async def keep(prompt_ids, count, spec, **more):
        asked.append(spec.stop)
        return await sample(prompt_ids, count, spec, **more)

    engine.sample = keep
    serve(talk, play)
    assert asked == [("~~", "Observation:", "never")] * 2
    first, second = session.turns
    assert second.parent is first, "the ids of the text that ended the answer stay, and it is not repeated"
    if path == "/v1/completions":
        assert CHARACTERS[second.delta_ids[0] - 2] == " "


def test_log_probabilities_are_those_that_were_sampled():
    engine = FakeEngine(vocabulary=len(CHARACTERS) + 2, seed=3)
    talk, session = engine_talk(engine, SamplingSpec(temperature=1.0, max_response_tokens=2000))

    async def play(endpoint, episode):
        client = chat_client(endpoint, episode)
        answer = await client.chat.completions.create(
            model="any", messages=QUESTION, max_tokens=20, logprobs=True, top_logprobs=3
        )
        chat = [(one.token, one.logprob) for one in answer.choices[0].logprobs.content]
        stream = await client.chat.completions.create(
            model="any", messages=QUESTION, max_tokens=20, logprobs=True, stream=True
        )
        streamed = [one.choices[0].logprobs.content async for one in stream if one.choices[0].logprobs]
        include = ["message.output_text.logprobs"]
        response = await client.responses.create(
            model="any", input=QUESTION, max_output_tokens=20, include=include
        )
        part = response.output[0].content[0]
        answers = [
            chat,
            *([(one.token, one.logprob) for one in found] for found in (*streamed, part.logprobs)),
        ]
        for turn, found in zip(session.turns, answers, strict=True):
            values = turn.rollout.behaviour_logprobs[: len(found)]
            assert [value for _, value in found] == values.tolist()
            assert "".join(text for text, _ in found) == turn.message["content"]
        assert chat

    serve(talk, play)


def test_plain_text_has_log_probabilities_and_one_answer():
    talk = ScriptedTalk(Answer(text="ab c", logprobs=lambda: [("ab", -0.5), (" c", -1.0)]))

    async def play(endpoint, episode):
        client = chat_client(endpoint, episode)
        answer = await client.completions.create(model="any", prompt="x", logprobs=0)
        found = answer.choices[0].logprobs
        assert (found.tokens, found.token_logprobs, found.text_offset) == (["ab", " c"], [-0.5, -1.0], [0, 2])
        with pytest.raises(openai.BadRequestError, match="plain text has one answer"):
            await client.completions.create(model="any", prompt="xab c", n=3)

    serve(talk, play)


def test_calls_at_the_same_time_share_the_budget():
    """Each gets the room that it would have if the calls before it had ended."""
    engine = FakeEngine(vocabulary=len(CHARACTERS) + 2, seed=3)
    talk, session = engine_talk(engine, SamplingSpec(temperature=1.0, max_response_tokens=400))
    spent, rooms, running = [], [], [0]
    sample = engine.sample

    async def keep(prompt_ids, count, spec, **more):
        rooms.append(spec.max_response_tokens)
        running[0] += spec.max_response_tokens
        assert sum(spent) + running[0] <= 400
        (rollout,) = await sample(prompt_ids, count, spec, **more)
        running[0] -= spec.max_response_tokens
        spent.append(len(rollout.response_ids))
        return [rollout]

    engine.sample = keep

    async def play():
        calls = [talk.chat(QUESTION, max_tokens=300) for _ in range(16)]
        return await asyncio.gather(*calls, return_exceptions=True)

    answers = asyncio.run(play())
    assert sum(spent) == sum(len(turn.sampled_ids) for turn in session.turns) <= 400
    failed = [one for one in answers if not isinstance(one, Answer)]
    assert all(isinstance(one, BudgetSpent) and one.finish_reason == "length" for one in failed)
    assert (not failed) or sum(spent) == 400
    assert rooms[0] == 300 and len(spent) > 1


def test_closing_a_talk_ends_the_calls_that_wait_for_tokens():
    engine = FakeEngine(vocabulary=len(CHARACTERS) + 2, seed=3, token_s=0.01)
    talk, _ = engine_talk(engine, SamplingSpec(temperature=1.0, max_response_tokens=400))

    async def play():
        calls = [asyncio.create_task(talk.chat(QUESTION)) for _ in range(3)]
        await until(lambda: engine.stats().running_requests == 1)
        talk.close()
        return await asyncio.gather(*calls, return_exceptions=True)

    assert [type(one) for one in asyncio.run(play())] == [BudgetSpent] * 3


CONTEXT = {
    "/v1/messages": {
        "container": "c", "context_management": {"edits": [{"type": "clear_tool_uses"}]}, "compaction": {"type": "auto"},
        "mcp_servers": [{"type": "url", "url": "https://x", "name": "x"}], "thread": {"type": "other"},
        "tools": [{"type": "web_search_20250305", "name": "web_search"}],
    },
    "/v1/responses": {
        "conversation": "conv_1", "background": True, "prompt": {"id": "p"}, "context_management": [{"type": "compaction"}],
        "previous_response_id": "resp_1",
    },
    "/v1/chat/completions": {
        "functions": [{"name": "add"}], "web_search_options": {"search_context_size": "low"}, "audio": {"voice": "x"},
        "chat_template_kwargs": {"enable_thinking": True}, "a_parameter_of_tomorrow": 1,
        "messages": [{"role": "assistant", "audio": {"id": "audio_1"}}],
    },
    "/v1/completions": {"suffix": "x", "echo": True},
}  # fmt: skip


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, more in CONTEXT.items() for name in more])
def test_context_that_the_endpoint_does_not_serve_is_refused_by_name(path, name):
    """Otherwise the model would answer, and be trained on, a conversation with a hole."""

    async def play(endpoint, episode):
        answer = await post(endpoint, episode.key, asking(path) | {name: CONTEXT[path][name]}, path)
        assert answer.status_code == 400
        assert "is not the id of" in episode.fault or any(
            word in episode.fault for word in (f"`{name}`", "`audio`", "web_search")
        )

    serve(ScriptedTalk(), play)


@pytest.mark.parametrize("path", DIALECTS)
def test_every_parameter_of_a_client_library_is_known_or_brings_context(path):
    """A parameter that a new release of a library adds is decided about here, and until then refused."""
    decided = {
        "/v1/chat/completions": (
            openai.types.chat.completion_create_params.CompletionCreateParamsStreaming,
            {"audio", "function_call", "functions", "moderation", "web_search_options"},
        ),
        "/v1/completions": (
            openai.types.completion_create_params.CompletionCreateParamsStreaming,
            {"echo", "suffix"},
        ),
        "/v1/responses": (
            openai.types.responses.response_create_params.ResponseCreateParamsStreaming,
            {
                "access_programs", "background", "background_options", "context_management", "conversation", "image",
                "moderation", "prompt",
            },
        ),
        "/v1/messages": (
            anthropic.types.beta.message_create_params.MessageCreateParamsStreaming,
            {
                "compaction", "container", "context_management", "fallbacks", "fallback_credit_token", "mcp_servers",
                "betas",
            },
        ),
    }  # fmt: skip
    parameters, refused = decided[path]
    known = parameters.__required_keys__ | parameters.__optional_keys__
    assert known - DIALECTS[path].keys == refused


def test_a_thread_of_anthropics_library_is_one_conversation():
    """Its tool runner sends the tool's result only, with the id of the answer before it."""

    def read(prompt_ids, rollout, tools):
        return CALLS if len(session.turns) < 2 else TEXT

    async def play(endpoint, episode):
        @anthropic.beta_async_tool
        async def add(a: int, b: int) -> str:
            """Add.

            Args:
                a: one
                b: the other
            """
            return str(a + b)

        client = anthropic.AsyncAnthropic(base_url=endpoint.url, api_key=episode.key)
        runner = client.beta.messages.tool_runner(
            model="any", max_tokens=50, system="Add.", tools=[add], messages=QUESTION
        )
        last = await runner.until_done()
        assert (last.content[0].text, episode.calls, episode.refused) == ("two words", 3, 0)

    engine = FakeEngine(vocabulary=len(CHARACTERS) + 2, seed=3)
    talk, session = engine_talk(engine, SamplingSpec(temperature=1.0, max_response_tokens=2000))
    talk._read = read
    serve(talk, play)
    first, second, third = session.turns
    assert second.parent is first and third.parent is second
    said = [message["role"] for message in third.said.messages]
    assert said == ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]


def test_a_thread_goes_on_from_any_of_its_answers_and_an_unknown_id_is_refused():
    talk = ScriptedTalk(*[TEXT] * 3)

    async def play(endpoint, episode):
        created = asking("/v1/messages") | {"thread": {"type": "create"}, "system": "Add."}
        first = (await post(endpoint, episode.key, created, "/v1/messages")).json()["id"]
        for number, status in ((first, 200), (first, 200), ("msg_" + "0" * 24, 400), (7, 400)):
            more = {"thread": {"type": "continue", "previous_message_id": number}}
            answer = await post(endpoint, episode.key, asking("/v1/messages") | more, "/v1/messages")
            assert answer.status_code == status
        assert "is not the id of an answer in this episode" in episode.fault

    serve(talk, play)
    said = [{"role": "system", "content": "Add."}, *QUESTION, TEXT.message, *QUESTION]
    assert [asked["messages"] for asked in talk.asked] == [said[:2], said, said]


def test_responses_go_on_from_the_id_of_one_with_other_instructions():
    talk = ScriptedTalk(TEXT, CALLS, TEXT)

    async def play(endpoint, episode):
        client = chat_client(endpoint, episode)
        first = await client.responses.create(model="any", input="1+2?", instructions="Add.")
        more = {"model": "any", "instructions": "Be kind.", "previous_response_id": first.id}
        second = await client.responses.create(**more, input="again")
        result = {"type": "function_call_output", "call_id": CALL.id, "output": "3"}
        more["previous_response_id"] = second.id
        await client.responses.create(**more, input=[result])
        assert not episode.fault

    serve(talk, play)
    again, *_, result = talk.asked[2]["messages"][3:]
    assert talk.asked[1]["messages"] == [
        {"role": "system", "content": "Be kind."}, *QUESTION, TEXT.message, {"role": "user", "content": "again"}
    ]  # fmt: skip
    assert talk.asked[2]["messages"][:4] == talk.asked[1]["messages"]
    assert (again["content"], result["tool_call_id"]) == ("again", CALL.id)


def test_references_to_our_items_are_the_items():
    """Vercel's SDK sends them by default."""
    talk = ScriptedTalk(CALLS, CALLS)

    async def play(endpoint, episode):
        client = chat_client(endpoint, episode)
        first = await client.responses.create(model="any", input=QUESTION)
        result = {"type": "function_call_output", "call_id": CALL.id, "output": "3"}
        for echo in (first.output, [{"type": "item_reference", "id": item.id} for item in first.output]):
            items = [one if isinstance(one, dict) else one.model_dump() for one in echo]
            talk.answers.append(TEXT)
            await client.responses.create(model="any", input=[*QUESTION, *items, result])
        assert not episode.fault
        unknown = {"type": "item_reference", "id": first.output[0].id + "0"}
        with pytest.raises(openai.BadRequestError, match="send the item"):
            await client.responses.create(model="any", input=[*QUESTION, unknown])

    serve(talk, play)
    assert talk.asked[1]["messages"] == talk.asked[2]["messages"]
    assert talk.asked[1]["messages"][1]["tool_calls"]


def test_a_first_call_that_is_too_long_has_the_code_that_agents_know_and_a_shorter_one_begins():
    engine = FakeEngine(vocabulary=len(CHARACTERS) + 2, seed=3)
    talk, session = engine_talk(engine, SamplingSpec(temperature=1.0, max_response_tokens=400))

    async def play(endpoint, episode):
        long = {"messages": [{"role": "user", "content": "x" * 1000}]}
        refused = await post(endpoint, episode.key, long)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert "the first prompt has 1013 tokens; sampling.max_prompt_tokens allows 1000" in episode.overlong
        assert (await post(endpoint, episode.key, {"messages": QUESTION})).status_code == 200
        assert (episode.calls, episode.refused, episode.fault) == (1, 1, "")

    serve(talk, play)
    assert len(session.turns) == 1


def test_an_overflow_has_the_code_that_agents_know_and_fails_nothing():
    async def play(endpoint, episode):
        client = chat_client(endpoint, episode)
        with pytest.raises(openai.BadRequestError) as found:
            await client.chat.completions.create(model="any", messages=QUESTION)
        assert found.value.code == "context_length_exceeded"
        other = anthropic.AsyncAnthropic(base_url=endpoint.url, api_key=episode.key)
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            await other.messages.create(model="any", messages=QUESTION, max_tokens=5)
        await client.chat.completions.create(model="any", messages=QUESTION)
        assert not episode.fault

    serve(ScriptedTalk(BudgetSpent("length"), BudgetSpent("length"), TEXT), play)


def test_an_episode_without_turns_left_is_over():
    async def play(endpoint, episode):
        client = chat_client(endpoint, episode)
        for _ in range(2):
            with pytest.raises(openai.PermissionDeniedError, match="the episode is over"):
                await client.chat.completions.create(model="any", messages=QUESTION)
        assert (episode.spent, episode.fault) == ("turns", "")

    serve(ScriptedTalk(BudgetSpent("turns")), play)


def test_a_failed_call_is_a_fault_of_the_episode_even_if_the_agent_goes_on():
    async def play(endpoint, episode):
        client = chat_client(endpoint, episode, max_retries=0)
        with pytest.raises(openai.InternalServerError, match="the engine has died"):
            await client.chat.completions.create(model="any", messages=QUESTION)
        await client.chat.completions.create(model="any", messages=QUESTION)
        assert "the engine has died" in episode.fault

    serve(ScriptedTalk(EngineError("the engine has died"), TEXT), play)


def test_keys_other_episodes_and_ended_ones():
    async def play(endpoint, episode):
        other = endpoint.episodes.open(ScriptedTalk(CUT))
        for key, status in ((episode.key[:-1], 401), ("x", 401), (other.key, 200)):
            answer = await post(endpoint, key, {"messages": QUESTION})
            assert answer.status_code == status
        assert answer.json()["choices"][0]["message"]["content"] == "two wo"  # of the other episode's talk
        endpoint.episodes.close(other)
        assert (await post(endpoint, other.key, {"messages": QUESTION})).status_code == 403
        answer = await post(endpoint, "", {"messages": QUESTION}, x_api_key=episode.key, authorization="x")
        assert answer.status_code == 200

    serve(ScriptedTalk(TEXT), play)


def test_closing_an_episode_ends_its_calls():
    talk = ScriptedTalk(TEXT)
    talk.release.clear()

    async def play(endpoint, episode):
        asking = asyncio.create_task(post(endpoint, episode.key, {"messages": QUESTION}))
        await until(lambda: talk.asked)
        endpoint.episodes.close(episode)
        assert (await asking).status_code == 403

    serve(talk, play)


def test_a_retry_joins_the_call_or_gets_its_answer_and_a_repetition_is_a_new_sample():
    talk = ScriptedTalk(TEXT, CUT)
    talk.release.clear()

    async def play(endpoint, episode):
        body = {"messages": QUESTION}

        async def text(**headers) -> str:
            answer = await post(endpoint, episode.key, body, **headers)
            return answer.json()["choices"][0]["message"]["content"]

        lost = asyncio.create_task(text())
        await until(lambda: talk.asked)
        lost.cancel()  # the connection of the first attempt is gone
        joined = asyncio.create_task(text(x_stainless_retry_count="1"))
        await until(lambda: episode.retries == 1)
        talk.release.set()
        assert await joined == "two words"
        assert await text(x_stainless_retry_count="2") == "two words"
        assert len(talk.asked) == 1
        assert await text() == "two wo"
        assert (episode.calls, episode.retries, episode.refused) == (2, 2, 0)

    serve(talk, play)


def test_retries_of_equal_calls_get_an_answer_each():
    """An agent that asks the same several times at once counts votes."""
    words = [replace(TEXT, text=f"answer {number}") for number in range(4)]
    talk = ScriptedTalk(*words)

    async def play(endpoint, episode):
        async def text(**headers) -> str:
            answer = await post(endpoint, episode.key, {"messages": QUESTION}, **headers)
            return answer.json()["choices"][0]["message"]["content"]

        first = [await text() for _ in range(4)]
        again = await asyncio.gather(*(text(x_stainless_retry_count="1") for _ in range(4)))
        assert sorted(again) == first == [one.text for one in words]
        assert episode.retries == 4

    serve(talk, play)


def test_the_retries_of_the_last_of_equal_calls_get_its_answer():
    words = [replace(TEXT, text=f"answer {number}") for number in range(3)]

    async def play(endpoint, episode):
        async def text(**headers) -> str:
            answer = await post(endpoint, episode.key, {"messages": QUESTION}, **headers)
            return answer.json()["choices"][0]["message"]["content"]

        told = [await text() for _ in range(3)]
        assert [await text(x_stainless_retry_count=number) for number in "12"] == [told[2]] * 2

    serve(ScriptedTalk(*words), play)


def test_the_retry_of_a_call_that_was_refused_is_a_new_call(monkeypatch):
    monkeypatch.setattr(open_episodes, "MOST_CALLS", 1)
    talk = ScriptedTalk(TEXT, CUT)
    talk.release.clear()

    async def play(endpoint, episode):
        body = {"messages": QUESTION}
        first = asyncio.create_task(post(endpoint, episode.key, body))
        await until(lambda: talk.asked)
        for headers in ({}, {"x_stainless_retry_count": "1"}):
            assert (await post(endpoint, episode.key, body, **headers)).status_code == 429
        talk.release.set()
        await first
        second = await post(endpoint, episode.key, body, x_stainless_retry_count="2")
        assert second.json()["choices"][0]["message"]["content"] == "two wo"
        third = await post(endpoint, episode.key, body, x_stainless_retry_count="1")
        assert third.status_code == 200 and (episode.calls, episode.retries) == (2, 1)

    serve(talk, play)


def test_a_waiting_stream_gets_comments_and_a_late_error_is_an_event(monkeypatch):
    monkeypatch.setattr(agent_server, "COMMENT_S", 0.05)
    talk = ScriptedTalk(EngineError("gone"), TEXT)

    async def play(endpoint, episode):
        client = chat_client(endpoint, episode, max_retries=0)
        for _ in range(2):
            talk.release.clear()
            asyncio.get_running_loop().call_later(0.2, talk.release.set)
            stream = await client.chat.completions.create(model="any", messages=QUESTION, stream=True)
            try:
                assert [one async for one in stream]
            except openai.APIError as error:
                assert "gone" in str(error)

    serve(talk, play)
    assert not talk.answers


@pytest.mark.parametrize("path", ["/pause", "/update_weights", "/v1/embeddings", "/metrics", "/", "/docs"])
def test_nothing_else_is_served(path):
    async def play(endpoint, episode):
        assert (await post(endpoint, episode.key, {}, path)).status_code == 404

    serve(ScriptedTalk(), play)


@pytest.mark.parametrize("path", DIALECTS)
def test_paths_are_served_without_the_version_too(path):
    async def play(endpoint, episode):
        answer = await post(endpoint, episode.key, asking(path), path.removeprefix("/v1"))
        assert answer.status_code == 200

    serve(ScriptedTalk(TEXT), play)


def test_the_list_of_models():
    async def play(endpoint, episode):
        models = await chat_client(endpoint, episode).models.list()
        assert [model.id for model in models.data] == ["policy"]
        assert (await chat_client(endpoint, episode).models.retrieve("org/any")).id == "org/any"
        assert (await post(endpoint, episode.key, {}, "/v1/models")).status_code == 405

    serve(ScriptedTalk(), play)


BAD = {
    "not JSON": b"{",
    "a list": b"[]",
    "deep": b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "no messages": b'{"messages":[]}',
    "messages of another type": b'{"messages":"x"}',
    "a role": b'{"messages":[{"role":"robot","content":"x"}]}',
    "an image": b'{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}',
    "calls": b'{"messages":[{"role":"assistant","tool_calls":[{"function":"x"}]}]}',
    "n": b'{"messages":[{"role":"user","content":"x"}],"n":1000000}',
    "max_tokens": b'{"messages":[{"role":"user","content":"x"}],"max_tokens":-1}',
    "stream": b'{"messages":[{"role":"user","content":"x"}],"stream":"yes"}',
    "tools": b'{"messages":[{"role":"user","content":"x"}],"tools":[{"function":{"name":7}}]}',
    "a function that is text": b'{"messages":[{"role":"user","content":"x"}],"tools":[{"function":"x"}]}',
}


@pytest.mark.parametrize("name", BAD)
def test_a_malformed_body_is_refused(name):
    async def play(endpoint, episode):
        answer = await post(endpoint, episode.key, BAD[name])
        assert answer.status_code == 400
        assert answer.json()["error"]["message"]
        assert episode.fault

    serve(ScriptedTalk(), play)


@pytest.mark.parametrize("path", DIALECTS)
def test_a_body_that_no_dialect_foresaw_is_refused_and_is_a_fault(path, monkeypatch):
    def read(body, recall):
        raise KeyError("unforeseen")

    monkeypatch.setattr(DIALECTS[path], "read", read)

    async def play(endpoint, episode):
        assert (await post(endpoint, episode.key, asking(path), path)).status_code == 400
        assert "unforeseen" in episode.fault

    serve(ScriptedTalk(), play)


@pytest.mark.parametrize("path", DIALECTS)
def test_a_dialect_reads_or_refuses_every_shape_of_every_member(path):
    shapes = [None, True, 7, "x", [], [7], {}, [{}], [{"type": "text"}], {"type": "x"}, [[]], {"x": {}}]
    shapes += [[{"role": role, "content": shape}] for role in ("user", "assistant") for shape in shapes]
    shapes += [
        [{"type": kind}]
        for kind in ("function", "function_call", "function_call_output", "reasoning", "item_reference")
    ]
    shapes += [[{"type": "function", "function": shape}] for shape in shapes]
    shapes += [{"type": "continue"}, {"type": "continue", "previous_message_id": []}]
    members = (
        "messages", "tools", "input", "prompt", "system", "instructions", "tool_choice", "stream", "n", "text",
        "stream_options", "max_tokens", "response_format", "stop", "functions", "output_config", "model",
        "thread", "previous_response_id", "logprobs", "include",
    )  # fmt: skip
    good = {"messages": QUESTION, "input": "x", "prompt": "x"}
    read = 0
    for member in members:
        for shape in shapes:
            try:
                DIALECTS[path].read({**good, member: shape}, recall_nothing)
                read += 1
            except Refused as refused:
                assert refused.status == 400
    assert read


def test_a_flood_of_one_episode_waits_and_others_are_served(monkeypatch):
    monkeypatch.setattr(open_episodes, "MOST_CALLS", 3)
    talk = ScriptedTalk(*[TEXT] * 3)
    talk.release.clear()

    async def play(endpoint, episode):
        flood = [asyncio.create_task(post(endpoint, episode.key, {"messages": QUESTION})) for _ in range(8)]
        await until(lambda: sum(one.done() for one in flood) == 5)
        waiting = [one for one in flood if not one.done()]
        assert [one.result().status_code for one in flood if one.done()] == [429] * 5
        other = endpoint.episodes.open(ScriptedTalk(TEXT))
        assert (await post(endpoint, other.key, {"messages": QUESTION})).status_code == 200
        talk.release.set()
        assert [one.status_code for one in await asyncio.gather(*waiting)] == [200] * 3
        assert not episode.fault  # client libraries wait and repeat the call
        assert episode.refused == 5

    serve(talk, play)


def test_an_oversized_body_is_refused_with_and_without_its_length(monkeypatch):
    monkeypatch.setattr(agent_server, "MAX_BODY_BYTES", 1000)

    async def play(endpoint, episode):
        assert (await post(endpoint, episode.key, b" " * 1001)).status_code == 413

        async def pieces():
            for _ in range(20):
                yield b" " * 100

        headers = {"authorization": f"Bearer {episode.key}"}
        async with httpx.AsyncClient() as client:
            url = f"{endpoint.url}/v1/responses"
            with contextlib.suppress(httpx.ReadError):  # the connection may be closed while the client writes
                assert (await client.post(url, content=pieces(), headers=headers)).status_code == 413
            assert not episode.fault
            assert episode.refused == 2

    serve(ScriptedTalk(), play)


async def raw(endpoint: Endpoint, first: bytes, then: bytes = b"") -> tuple[bytes, float]:
    """What the server answers to bytes that trickle, and the seconds until it closes the connection."""
    began_s = asyncio.get_running_loop().time()
    host, port = endpoint.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(first)
    answer = bytearray()

    async def read() -> None:
        # Bytes that the server has not read reset the connection when it closes: after its answer.
        with contextlib.suppress(ConnectionResetError):
            while data := await reader.read(65536):
                answer.extend(data)

    reading = asyncio.create_task(read())
    while not reading.done():
        writer.write(then)
        await asyncio.wait({reading}, timeout=0.05)
    writer.close()
    return bytes(answer), asyncio.get_running_loop().time() - began_s


def test_slow_heads_and_slow_bodies_are_cut_off(monkeypatch):
    monkeypatch.setattr(agent_server, "HEAD_S", 0.4)
    monkeypatch.setattr(agent_server, "BODY_S", 0.4)

    async def play(endpoint, episode):
        head = f"POST /v1/responses HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {episode.key}\r\n".encode()
        silent, slow_head, slow_body = await asyncio.gather(
            raw(endpoint, b""),
            raw(endpoint, b"POST /v1/responses HTTP/1.1\r\nx: ", b"x"),
            raw(endpoint, head + b"content-length: 999999\r\n\r\n", b" "),
        )
        assert (silent[0], slow_head[0]) == (b"", b"")
        assert b"408" in slow_body[0].partition(b"\r\n")[0]

    serve(ScriptedTalk(), play)


@pytest.mark.parametrize(
    ("call", "has_key", "status"),
    [
        ("POST /v1/responses", False, b"401"),
        ("POST /nothing", False, b"404"),
        ("GET /v1/responses", False, b"405"),
        ("GET /v1/models", True, b"200"),
    ],
)
def test_an_answer_to_an_unread_body_ends_the_connection(call, has_key, status):
    async def play(endpoint, episode):
        key = f"authorization: Bearer {episode.key}\r\n" if has_key else ""
        head = f"{call} HTTP/1.1\r\nhost: x\r\n{key}content-length: 999999\r\n\r\n"
        answer, _ = await asyncio.wait_for(raw(endpoint, head.encode(), b" "), 30)
        assert status in answer.partition(b"\r\n")[0]

    serve(ScriptedTalk(), play)


async def opened(endpoint: Endpoint, first: bytes = b"") -> asyncio.StreamReader:
    """A connection that sends its first bytes and stays."""
    host, port = endpoint.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(first)
    KEPT.append(writer)
    return reader


KEPT: list[asyncio.StreamWriter] = []
"""A connection whose writer is forgotten is closed."""


async def many_silent_connections(endpoint: Endpoint, episode: OpenEpisode) -> None:
    readers = [await opened(endpoint, b"POST /v1/re") for _ in range(20)]
    async with asyncio.timeout(LONG_S):
        for reader in readers[:8]:
            assert await reader.read() == b""  # the oldest are cut off


async def many_slow_bodies(endpoint: Endpoint, episode: OpenEpisode) -> None:
    head = f"POST /v1/responses HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {episode.key}\r\n".encode()
    readers = [await opened(endpoint, head + b"content-length: 9\r\n\r\n[") for _ in range(9)]
    reading = [asyncio.create_task(reader.readline()) for reader in readers]
    for one in islice(asyncio.as_completed(reading), 5):
        assert b"429" in await one
    assert sum(one.done() for one in reading) == 5


async def oversized_bodies(endpoint: Endpoint, episode: OpenEpisode) -> None:
    for _ in range(3):
        assert (await post(endpoint, episode.key, b" " * 3000)).status_code == 413


async def guessed_keys(endpoint: Endpoint, episode: OpenEpisode) -> None:
    for key in ("x", episode.key[:-1], episode.key + "0", episode.key.upper() + "x"):
        assert (await post(endpoint, key, {"messages": QUESTION})).status_code == 401


async def replayed_requests(endpoint: Endpoint, episode: OpenEpisode) -> None:
    """Also of the body that the other agent sends, as if it were a retry of it."""
    retried = {"x_stainless_retry_count": "1"}
    answers = [await post(endpoint, episode.key, {"messages": QUESTION}, **retried) for _ in range(3)]
    assert {one.json()["choices"][0]["message"]["content"] for one in answers} == {"two wo"}
    endpoint.episodes.close(episode)
    assert (await post(endpoint, episode.key, {"messages": QUESTION}, **retried)).status_code == 403


async def many_repetitions_of_a_call(endpoint: Endpoint, episode: OpenEpisode) -> None:
    episode._talk.release.clear()
    retried = {"x_stainless_retry_count": "1"}
    calls = [post(endpoint, episode.key, {"messages": QUESTION}, **retried) for _ in range(9)]
    asking = [asyncio.create_task(call) for call in calls]
    for one in islice(asyncio.as_completed(asking), 5):
        with contextlib.suppress(httpx.ReadError):  # the connection may be closed while the client writes
            assert (await one).status_code == 429
    assert (episode.refused, sum(one.done() for one in asking)) == (5, 5)
    endpoint.episodes.close(episode)
    answers = await asyncio.gather(*asking, return_exceptions=True)
    assert sum(getattr(one, "status_code", 429) == 403 for one in answers) == 4


NARROW = """
import asyncio, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (96, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
from asyncrl.addons.endpoint.agent_server import Endpoint
from asyncrl.environments.base import Answer
from tests.support.agent_talks import ScriptedTalk

async def main():
    endpoint = Endpoint()
    await endpoint.start()
    print(endpoint.url, *(endpoint.episodes.open(ScriptedTalk(Answer(text="two words"))).key for _ in range(8)), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await endpoint.close()

asyncio.run(main())
"""


def test_with_few_descriptors_callers_are_refused_and_do_not_wait_for_one():
    """Each caller of the crowd keeps its connection busy with a body that does not end."""
    command, pipe = [sys.executable, "-c", NARROW], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as server:
        assert server.stdin and server.stdout and server.stderr
        url, *keys = server.stdout.readline().split()
        with contextlib.ExitStack() as crowd:
            callers = []
            for number in range(120):
                caller = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
                crowd.enter_context(caller)
                head = f"POST /v1/messages HTTP/1.1\r\nhost: x\r\nx-api-key: {keys[number % 8]}\r\n"
                caller.sendall(f"{head}content-length: 9\r\n\r\n[".encode())
                callers.append(caller)
            wait_until(lambda: len(select(callers, (), (), 0)[0]) >= 120 - 48)
            for caller in select(callers, (), (), 0)[0]:
                with contextlib.suppress(ConnectionResetError):  # its body was not read
                    assert caller.recv(12) == b"HTTP/1.1 503"
        answer = httpx.post(
            f"{url}/v1/chat/completions", json={"messages": QUESTION}, headers={"x-api-key": keys[0]}
        )
        assert answer.json()["choices"][0]["message"]["content"] == "two words"
        server.stdin.close()
        assert "Traceback" not in server.stderr.read()


def test_each_endpoint_of_a_process_without_descriptors_refuses_its_callers():
    """Tasks with environments of their own have an endpoint each."""
    with contextlib.ExitStack() as opened:
        pairs = []
        for _ in range(2):
            server = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
            listener = opened.enter_context(agent_server._Listener(fileno=os.dup(server.fileno())))
            caller = opened.enter_context(socket.create_connection(server.getsockname(), timeout=LONG_S))
            pairs.append((listener, caller))
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = next(one for one in range(limits[0]) if not os.path.lexists(f"/proc/self/fd/{one}"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        try:
            for listener, caller in pairs:
                with pytest.raises(BlockingIOError):
                    listener.accept()
                assert caller.recv(1) == b""
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize(
    "attack",
    [
        many_silent_connections,
        many_slow_bodies,
        oversized_bodies,
        guessed_keys,
        replayed_requests,
        many_repetitions_of_a_call,
    ],
)
def test_a_hostile_agent_costs_only_its_own_episode(monkeypatch, attack):
    """Another agent is served while the connections of the attack stay, and gets its own answers."""
    monkeypatch.setattr(agent_server, "MOST_CONNECTIONS", 20)
    monkeypatch.setattr(agent_server, "MOST_WAITING", 12)
    monkeypatch.setattr(agent_server, "MAX_BODY_BYTES", 2000)
    monkeypatch.setattr(open_episodes, "MOST_REQUESTS", 4)

    async def play(endpoint, episode):
        talk = ScriptedTalk(TEXT, CALLS)
        other = endpoint.episodes.open(talk)
        answer = await post(endpoint, other.key, {"messages": QUESTION})
        assert answer.json()["choices"][0]["message"]["content"] == "two words"
        try:
            await attack(endpoint, episode)
            answer = await post(endpoint, other.key, {"messages": [*QUESTION, *QUESTION]})
        finally:
            while KEPT:
                KEPT.pop().close()
        assert answer.json()["choices"][0]["message"]["content"] == "I add."
        assert [asked["messages"] for asked in talk.asked] == [QUESTION, [*QUESTION, *QUESTION]]
        assert (other.calls, other.refused, other.retries, other.fault) == (2, 0, 0, "")

    serve(ScriptedTalk(CUT), play)
