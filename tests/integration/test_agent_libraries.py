"""Agents of other libraries, unmodified: only a base URL and a key are set, and every token is recorded.

The model is scripted, because one that calls tools is too large here: it samples ids that no tokenizer would
give for the same text, so that a text that is tokenised again is found out.
"""

import asyncio
import json
import socket
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from asyncrl.addons.endpoint.agent_process import AgentEnvironment
from asyncrl.config.environment_section import EnvironmentConfig
from asyncrl.engine.answers import AnswerReader
from asyncrl.engine.base import SamplingSpec
from asyncrl.engine.episodes import EpisodeSampler
from asyncrl.engine.fake import FakeEngine
from asyncrl.session.chat_template import TemplateRenderer
from asyncrl.types import Prompt, Rollout, VersionSpan
from tests.support.chat_templates import renderer_of, tokenizer_of
from tests.support.libraries import python_with

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

# langchain-core 1.7.5 and later need a newer certifi than some indexes of packages have.
PACKAGES = ["openai-agents==0.24.0", "langchain==1.4.7", "langchain-openai==1.7.3", "langchain-core==1.7.0"]
START = '''
import asyncio, json, os, sys

row = json.loads(os.environ["ASYNCRL_ROW"])

def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return f"it is {a + b}"

def end(answer):
    with open(os.environ["ASYNCRL_RESULT"], "w") as file:
        json.dump(float(row["answer"] in answer), file)
'''
AGENTS_SDK = """
import agents

async def run(model):
    agent = agents.Agent("calculator", instructions="Add.", tools=[agents.function_tool(add)], model=model)
    if "streamed" not in sys.argv:
        return (await agents.Runner.run(agent, row["prompt"])).final_output
    streamed = agents.Runner.run_streamed(agent, row["prompt"])
    async for _ in streamed.stream_events():
        pass
    return streamed.final_output

if "chat" in sys.argv:
    agents.set_default_openai_api("chat_completions")
end(asyncio.run(run("policy")))
"""
LANGCHAIN = """
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

model = ChatOpenAI(model="policy", use_responses_api="responses" in sys.argv)
if "react" in sys.argv:
    agent = create_react_agent(model, [add], prompt="Add.")
else:
    agent = create_agent(model, [add], system_prompt="Add.")
asked = {"messages": [{"role": "user", "content": row["prompt"]}]}
if "streamed" in sys.argv:
    parts = [part for part, _ in agent.stream(asked, stream_mode="messages")]
    last = max(index for index, part in enumerate(parts) if part.type == "tool")
    end("".join(part.text for part in parts[last + 1 :]))
else:
    end(agent.invoke(asked)["messages"][-1].text)
"""
OPENAI = """
from openai import OpenAI

tool = {"name": "add", "description": "Add two numbers.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}
client, messages = OpenAI(), [{"role": "system", "content": "Add."}, {"role": "user", "content": row["prompt"]}]
while True:
    message = client.chat.completions.create(
        model="policy", messages=messages, tools=[{"type": "function", "function": tool}]
    ).choices[0].message
    messages.append(message)
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        result = add(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
end(message.content)
"""
QUESTION = "What is 17 + 25, and one and two more?"
CALLS = [
    ["I add.", {"a": 17, "b": 25}],
    ["", {"a": 42, "b": 1}, {"a": 42, "b": 2}],  # two at the same time
    ["It is 42, then 43 and 44."],
]


def written(text: str, *calls: dict) -> str:
    """An answer as Qwen2.5 writes it."""
    lines = [f"<tool_call>\n{json.dumps({'name': 'add', 'arguments': one})}\n</tool_call>" for one in calls]
    return "\n".join([*([text] if text else []), *lines])


def results(*numbers: int) -> str:
    """What the template puts behind an answer that called tools."""
    told = "".join(f"\n<tool_response>\nit is {one}\n</tool_response>" for one in numbers)
    return f"\n<|im_start|>user{told}<|im_end|>\n<|im_start|>assistant\n"


class ScriptedEngine(FakeEngine):
    """Says what the script has after so many results of tools, in tokens of one character each."""

    def __init__(self, renderer: TemplateRenderer) -> None:
        super().__init__()
        self._renderer = renderer
        self.sampled: list[Rollout] = []

    async def _respond(self, prompt_ids: Sequence[int], spec: SamplingSpec) -> Rollout:
        seen = self._renderer.decode(prompt_ids).count("\n<tool_response>")
        text = written(*CALLS[(0, 1, 1, 2)[seen]])
        ids = [
            *(number for one in text for number in self._renderer.encode(one)),
            min(self._renderer.stop_ids),
        ]
        rollout = Rollout(
            prompt_ids=np.array(prompt_ids, dtype=np.int32),
            response_ids=np.array(ids, dtype=np.int32),
            action_mask=np.ones(len(ids), dtype=np.bool_),
            behaviour_logprobs=-np.random.default_rng(seen).random(len(ids), dtype=np.float32),
            version_spans=(VersionSpan(0, len(ids)),),
            finish_reason="stop",
        )
        self.sampled.append(rollout)
        return rollout


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with the libraries, beside our own packages."""
    directory = tmp_path_factory.mktemp("agents") / "venv"
    return python_with(
        directory, PACKAGES, ["agents", "langchain_openai", "langchain.agents", "langgraph.prebuilt"]
    )


@pytest.mark.parametrize(
    ("program", "options"),
    [
        (OPENAI, ""),
        (AGENTS_SDK, "responses"), (AGENTS_SDK, "responses streamed"), (AGENTS_SDK, "chat streamed"),
        (LANGCHAIN, "chat"), (LANGCHAIN, "responses streamed"), (LANGCHAIN, "chat react streamed"),
    ],
    ids=lambda one: one.split()[1] if one.startswith("\n") else one,
)  # fmt: skip
def test_an_agent_of_a_library_is_recorded_as_it_was_sampled(tmp_path, monkeypatch, python, program, options):
    """One sequence: what was sampled is trained, the results of tools are not, and nothing reaches another host."""
    agent = tmp_path / "agent.py"
    agent.write_text(START + program)
    elsewhere = socket.create_server(("127.0.0.1", 0))  # which never answers
    elsewhere.setblocking(False)
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{elsewhere.getsockname()[1]}")
    config = EnvironmentConfig(command=(str(python), str(agent), *options.split()), episode_s=60, replays=0)
    tokenizer, renderer = tokenizer_of("qwen2_5"), renderer_of("qwen2_5")
    engine = ScriptedEngine(renderer)

    async def run():
        environment = AgentEnvironment(config)
        await environment.start()
        try:
            sampler = EpisodeSampler(
                engine, None, environment, config, renderer=renderer,
                read=AnswerReader(tokenizer, renderer, "hermes").read, max_prompt_tokens=2000, generator_id="g", seed=0,
            )  # fmt: skip
            prompt = Prompt(token_ids=(), text=QUESTION, row={"answer": "43 and 44"})
            spec = SamplingSpec(temperature=1.0, max_response_tokens=2000)
            return await sampler.play(prompt, spec, seed=0, episode=0)
        finally:
            await environment.close()

    episode = asyncio.run(run())
    assert (episode.rollouts[0].finish_reason, episode.reward) == ("stop", 1.0)
    expected = {
        "model_calls": 3,
        "turns": 3,
        "refused_calls": 0,
        "overridden_calls": 0,
        "chat/branches": 0,
        "chat/roots": 1,
    }
    assert {name: episode.metrics[name] for name in expected} == expected
    [sequence] = episode.rollouts
    ids, mask = sequence.response_ids, sequence.action_mask
    for column in ("response_ids", "behaviour_logprobs"):
        sampled = np.concatenate([getattr(turn, column) for turn in engine.sampled])
        assert np.array_equal(getattr(sequence, column)[mask], sampled)
    said = [written(*one) + "<|im_end|>" for one in CALLS]
    assert renderer.decode(ids) == said[0] + results(42) + said[1] + results(43, 44) + said[2]
    assert renderer.decode(ids[~mask]) == results(42) + results(43, 44)
    given = renderer.decode(sequence.prompt_ids)
    assert given.startswith("<|im_start|>system\nAdd.") and '"name": "add"' in given
    assert given.endswith(f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n")
    with pytest.raises(BlockingIOError):
        elsewhere.accept()
    elsewhere.close()
