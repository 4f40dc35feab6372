"""What agents cost the engine: a call through the endpoint, slots that wait for tools, and bytes of a group.

    python -m bench.endpoint --model MODEL [--tokens 128] [--rounds 5] [--figures calls slots bytes]
        [--json bench/results/endpoint.json]

"calls": seconds per sampled token of 64 callers, each with one call after the other, for the engine alone,
for a talk (session, template and reading of the answer) and for the endpoint with clients in another process.
The three take turns, and each ratio is to the engine in the same round. "cpu_us_per_call" is that of the
generator's process.

"slots": the share of the engine's slots in use while each turn waits for a tool ten times as long as it
samples, with two limits on the episodes in flight. The engine is the one in
memory, whose answers take a second, because only times matter.

"bytes": the size of an encoded group per token, with three turns and with one.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from asyncrl.addons.endpoint.agent_server import Endpoint
from asyncrl.algo.trainable import GroupLimits
from asyncrl.config.environment_section import EnvironmentConfig
from asyncrl.engine.answers import AnswerReader
from asyncrl.engine.base import SamplingSpec
from asyncrl.engine.duty import Duty
from asyncrl.engine.episodes import EpisodeSampler
from asyncrl.engine.fake import FakeEngine
from asyncrl.engine.open import open_engine
from asyncrl.engine.talk import Budget, SessionTalk
from asyncrl.environments.base import Outcome
from asyncrl.session.chat_template import TemplateRenderer
from asyncrl.session.tree import Session
from asyncrl.types import Group, Prompt, Rollout, Turns, VersionSpan
from asyncrl.wire.group_frames import encode_group
from bench.environment import describe, engine_package, report
from bench.gpu.sampling_rate import Load

CALLERS = 64
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
SLOTS, SLOT_TOKENS, TOKEN_S, TURNS, GROUP = 16, 32, 0.03, 3, 4  # of the second figure
LIMITS = (4, 16)  # `environment.episodes_per_slot`
TOOL_TIMES = 10.0  # waiting for a tool / sampling a turn
SETTLE_S = 70.0  # longer than the window of `engine/duty.py`


class Model:
    """An engine with what turns messages into ids and ids into answers."""

    def __init__(self, engine, path, tokens):
        from transformers import AutoTokenizer  # not before the engine, which hides builds for another torch

        tokenizer = AutoTokenizer.from_pretrained(path)
        tokenizer.chat_template = TEMPLATE
        self.engine = engine
        self.renderer = TemplateRenderer(tokenizer)
        self.read = AnswerReader(tokenizer, self.renderer).read
        self.spec = SamplingSpec(temperature=1.0, max_response_tokens=tokens)

    def talk(self):
        """A talk with room for many turns, and its session."""
        session = Session(self.renderer)
        budget = Budget(
            max_prompt_tokens=128,
            max_response_tokens=10**6,
            max_turns=10**6,
            max_sequences=10**6,
            ends_at_s=10**12,
        )
        return SessionTalk(session, self.engine, self.spec, self.read, budget)


def messages(caller, call):
    """A conversation that no other call has."""
    return [{"role": "user", "content": f"Tell story {call} of {caller}: a girl found a red ball."}]


async def by_engine(model, calls):
    """Tokens of `calls` calls of each caller."""
    ids = {
        (caller, call): model.renderer.encode(model.renderer.render(messages(caller, call), generation=True))
        for caller in range(CALLERS)
        for call in range(calls)
    }

    async def one(caller):
        rollouts = [(await model.engine.sample(ids[caller, call], 1, model.spec))[0] for call in range(calls)]
        return sum(len(rollout.response_ids) for rollout in rollouts)

    return sum(await asyncio.gather(*map(one, range(CALLERS))))


async def by_talk(model, calls):
    """The same through a talk for each caller."""

    async def one(caller):
        talk = model.talk()
        limit = model.spec.max_response_tokens
        answers = [await talk.chat(messages(caller, call), max_tokens=limit) for call in range(calls)]
        return sum(answer.tokens for answer in answers)

    return sum(await asyncio.gather(*map(one, range(CALLERS))))


async def by_endpoint(model, calls, endpoint, clients):
    """The same through the endpoint, with an episode for each caller."""
    episodes = [endpoint.episodes.open(model.talk()) for _ in range(CALLERS)]
    host, port = endpoint.url.removeprefix("http://").split(":")
    limit = model.spec.max_response_tokens
    keys = [episode.key for episode in episodes]
    asked = {"host": host, "port": int(port), "keys": keys, "calls": calls, "max_tokens": limit}
    clients.stdin.write(json.dumps(asked).encode() + b"\n")
    tokens = int(await clients.stdout.readline())
    for episode in episodes:
        assert episode.calls == calls, episode.fault
        endpoint.episodes.close(episode)
    return tokens


def client_process():
    """Make the calls that lines of the standard input ask for; after each line print the tokens."""

    async def one(asked, caller):
        reader, writer = await asyncio.open_connection(asked["host"], asked["port"])
        tokens = 0
        for call in range(asked["calls"]):
            body = {
                "model": "policy",
                "messages": messages(caller, call),
                "max_tokens": asked["max_tokens"],
            }
            content = json.dumps(body).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n"
            writer.write(f"{head}authorization: Bearer {asked['keys'][caller]}\r\n\r\n".encode() + content)
            answer = await reader.readuntil(b"\r\n0\r\n\r\n")
            tokens += json.loads(answer[answer.index(b"{") : answer.rindex(b"}") + 1])["usage"][
                "completion_tokens"
            ]
        writer.close()
        return tokens

    async def everyone(asked):
        return sum(await asyncio.gather(*(one(asked, caller) for caller in range(CALLERS))))

    for line in sys.stdin:
        print(asyncio.run(everyone(json.loads(line))), flush=True)


async def measure_calls(model, calls, rounds):
    """Seconds per token and microseconds of CPU per call, and ratios to the engine alone."""
    endpoint = Endpoint()
    await endpoint.start()
    pipe = asyncio.subprocess.PIPE
    clients = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.endpoint", "--clients", stdin=pipe, stdout=pipe
    )
    ways = {
        "engine": by_engine,
        "talk": by_talk,
        "endpoint": lambda model, calls: by_endpoint(model, calls, endpoint, clients),
    }
    seconds, cpu, lengths = ({name: [] for name in ways} for _ in range(3))
    try:
        for number in range(rounds + 1):
            for name in (names := list(ways))[number % 3 :] + names[: number % 3]:
                began_s, cpu_s = time.perf_counter(), time.process_time()
                tokens = await ways[name](model, calls)
                if number:  # the first round warms up
                    seconds[name].append((time.perf_counter() - began_s) / tokens)
                    cpu[name].append(1e6 * (time.process_time() - cpu_s) / (CALLERS * calls))
                    lengths[name].append(tokens / (CALLERS * calls))
    finally:
        assert clients.stdin is not None
        clients.stdin.close()
        await clients.wait()
        await endpoint.close()
    return {
        name: {
            "ratio_to_engine": round(
                statistics.median(
                    one / other for one, other in zip(seconds[name], seconds["engine"], strict=True)
                ),
                3,
            ),
            "tokens_per_s": round(1 / statistics.median(seconds[name])),
            "tokens_per_call": round(statistics.mean(lengths[name]), 1),
            "cpu_us_per_call": round(statistics.median(cpu[name])),
        }
        for name in ways
    }


class Slotted(FakeEngine):
    """The engine in memory with `SLOTS` slots; further requests wait in its queue, as in vLLM's."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self._free = asyncio.Semaphore(SLOTS)
        self.busy = 0

    async def _respond(self, prompt_ids, spec):
        async with self._free:
            self.busy += 1
            try:
                return await super()._respond(prompt_ids, spec)
            finally:
                self.busy -= 1


class Waiting:
    """An environment with a tool that takes about `tool_s` before each turn of `tokens`."""

    def __init__(self, tool_s, tokens):
        self._tool_s, self._tokens = tool_s, tokens

    async def start(self):
        pass

    async def close(self):
        pass

    async def play(self, talk, row, *, prompt, seed, episode):
        for turn in range(TURNS):
            await asyncio.sleep(self._tool_s * np.random.default_rng((seed, episode, turn)).uniform(0.5, 1.5))
            await talk.chat(messages(seed, (episode, turn)), max_tokens=self._tokens)
        return Outcome(finish_reason="stop", reward=0.0)


async def measure_slots(asked, episodes_per_slot):
    """The share of `SLOTS` slots in use after `SETTLE_S`, and the duty that was measured."""
    engine = Slotted(vocabulary=400, seed=1, token_s=TOKEN_S)
    model, seconds = Model(engine, asked.model, SLOT_TOKENS), asked.seconds
    began_s = time.perf_counter()
    talks = [model.talk() for _ in range(SLOTS)]
    limit = SLOT_TOKENS
    await asyncio.gather(*(talk.chat(messages(0, n), max_tokens=limit) for n, talk in enumerate(talks)))
    turn_s = time.perf_counter() - began_s
    environment = Waiting(TOOL_TIMES * turn_s, limit)
    sampler = EpisodeSampler(
        model.engine, None, environment, EnvironmentConfig(uses="x:y"), renderer=model.renderer,
        read=model.read, max_prompt_tokens=128, generator_id="g", seed=0,
    )  # fmt: skip
    spec = SamplingSpec(temperature=1.0, max_response_tokens=TURNS * limit)
    limits = GroupLimits(vocabulary=10**6, rollouts=GROUP, max_tokens=10**6)
    duty = Duty(model.engine, sampler.clock, SLOTS, SLOTS * episodes_per_slot)
    prompt, playing, used = Prompt(token_ids=(), text="", row={}), set(), []
    began_s, tickets = time.perf_counter(), 0
    while (passed_s := time.perf_counter() - began_s) < SETTLE_S + seconds:
        playing = {one for one in playing if not one.done()}
        for _ in range(duty.room(GROUP * len(playing)) // GROUP):
            tickets += 1
            playing.add(asyncio.create_task(sampler.group(prompt, tickets, limits, spec)))
        if passed_s > SETTLE_S:
            used.append(engine.busy / SLOTS)
        await asyncio.sleep(0.05)
    share, episodes = duty.share, sampler.clock.episodes
    assert share is not None
    for one in playing:
        one.cancel()
    await asyncio.wait(playing)
    return {
        "busy_share": round(statistics.mean(used), 3),
        "duty": round(share, 3),
        "episodes_in_flight": episodes,
        "slots": SLOTS,
        "turn_s": round(turn_s, 2),
        "tool_s": round(TOOL_TIMES * turn_s, 2),
    }


def group_of(turns, *, rollouts=8, prompt=200, response=600):
    """A group whose responses have `turns` turns, with a tenth of the tokens from the environment between."""
    mask, ends = np.ones(response, dtype=np.bool_), []
    for turn in range(turns):
        ends.append(response * (turn + 1) // turns)
        if turn:
            start = response * turn // turns
            mask[start : start + response // 10 // (turns - 1)] = False
    random = np.random.default_rng(0)
    rollout = Rollout(
        prompt_ids=random.integers(0, 150_000, prompt, dtype=np.int32),
        response_ids=random.integers(0, 150_000, response, dtype=np.int32),
        action_mask=mask,
        behaviour_logprobs=-random.random(response, dtype=np.float32) * mask,
        version_spans=(VersionSpan(1, response),),
        finish_reason="stop",
        turns=Turns(ends=np.array(ends, dtype=np.int32)) if turns > 1 else None,
    )
    numbers = {f"chat/{name}": np.zeros(rollouts, dtype=np.float32) for name in range(12)}
    return Group(
        ticket_id=1, generator_id="g", finished_version=1, rollouts=(rollout,) * rollouts,
        episode_metrics=numbers if turns > 1 else {},
    )  # fmt: skip


def measure_bytes():
    """Bytes per token of prompt and response."""
    groups = {turns: group_of(turns) for turns in (1, 3)}
    tokens = {
        turns: sum(len(one.prompt_ids) + len(one.response_ids) for one in group.rollouts)
        for turns, group in groups.items()
    }
    per_token = {turns: len(encode_group(group)) / tokens[turns] for turns, group in groups.items()}
    return {
        "one_turn": round(per_token[1], 3),
        "three_turns": round(per_token[3], 3),
        "ratio": round(per_token[3] / per_token[1], 3),
    }


async def measured_calls(asked):
    """The first figure."""
    load = Load(model=asked.model, device="cpu", dtype="float32", running=CALLERS, tokens=96 + asked.tokens)
    engine = await open_engine(*load.parts(), device="cpu")
    try:
        return await measure_calls(Model(engine, asked.model, asked.tokens), asked.calls, asked.rounds)
    finally:
        await engine.close()


async def measured_slots(asked):
    """The second figure, for each limit."""
    return {f"{limit} episodes per slot, at most": await measure_slots(asked, limit) for limit in LIMITS}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="directory of a model without a chat template of its own")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer, at most")
    parser.add_argument("--calls", type=int, default=4, help="of each caller in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60.0, help="of the second figure")
    figures = ["calls", "slots", "bytes"]
    parser.add_argument("--figures", nargs="+", choices=figures, default=figures)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--clients", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.clients:
        client_process()
    else:
        ways = {
            "calls": lambda: asyncio.run(measured_calls(asked)),
            "slots": lambda: asyncio.run(measured_slots(asked)),
            "bytes": measure_bytes,
        }
        found = {name: ways[name]() for name in asked.figures}
        report({"environment": describe(engine_package(), "torch"), "callers": CALLERS, **found}, asked.json)


if __name__ == "__main__":
    main()
