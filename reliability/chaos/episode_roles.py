"""Processes of a run with environments: shipped generators that play episodes, and a learner that checks each."""

import asyncio
import inspect
import os
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import transformers.utils  # noqa: F401 - tools need it; the forks of this module find it loaded

from asyncrl.addons.endpoint.agent_process import AgentEnvironment
from asyncrl.buffer.intake import Collected
from asyncrl.config.environment_section import EnvironmentConfig
from asyncrl.engine.base import SamplingSpec
from asyncrl.engine.episodes import EpisodeSampler
from asyncrl.engine.fake import EOS, FakeEngine
from asyncrl.environments import fork_server
from asyncrl.environments.base import Answer, Message, ToolCall
from asyncrl.environments.environments import Environments
from asyncrl.rewards.base import RewardInput, Score
from asyncrl.run.lock import RunLock
from asyncrl.types import Group, Prompt, Rollout

from . import game
from .roles import Learner, Place, generate

KINDS = ("text", "tool", "agent", "mcp", "python")
"""What the generators g0, g1, g2 ... play; further ones begin again."""
MARK = "LC_ASYNCRL_CHAOS"
"""Variable that every process of a generator inherits: the run's directory and the generator's process id.
The sandbox of programs hands LC_* on."""
TOKENS, TOOL_TURNS = 60, 4
TOOLS = {"tool": "mix", "mcp": "mix", "python": "python"}
"""The tool of a kind."""
LATE = {
    "tool": "error: mix took longer than 1 s and was stopped",
    "python": "error: python took longer than 6 s and was stopped",
}
"""What the model is shown if a tool without a state does not answer in time."""
SLOTS = {"agent": 2, "mcp": 2}
"""Groups that are played at the same time, where each episode starts an interpreter; 12 otherwise."""
_CONFIG = {
    "text": {"uses": f"{game.__file__}:Text", "max_turns": game.TURNS},
    "tool": {"uses": (f"{game.__file__}:mix",), "max_turns": TOOL_TURNS, "workers": 2},
    "agent": {"command": (sys.executable, "-S", game.__file__), "max_turns": game.TURNS},
    "mcp": {
        "uses": f"mcp:{sys.executable} -S {game.__file__} {game.SERVER}",
        "max_turns": TOOL_TURNS,
        "step_s": 5.0,
    },
    "python": {"uses": ("python",), "max_turns": TOOL_TURNS, "workers": 2, "step_s": 6.0},
}
_PROGRAM = f"import json, zlib\nfrom collections.abc import Sequence\nLETTERS = {game.LETTERS!r}\n"


def kind_of(generator: str) -> str:
    """What a generator plays."""
    return KINDS[int(generator.removeprefix("g")) % len(KINDS)]


class Letters:
    """A renderer with a token per letter; other characters become letters, too. Token 0 ends an answer."""

    stop_ids = frozenset({EOS})
    special_texts = frozenset({"!"})
    opening_ids: tuple[int, ...] = ()

    def encode(self, text: str, *, inside: bool = False) -> list[int]:
        return [EOS if one == "!" else 1 + (ord(one) - ord("a")) % len(game.LETTERS) for one in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join("!" if one == EOS else game.LETTERS[one - 1] for one in ids)

    def render(self, messages: Sequence[Message], tools: Sequence[Message] = (), *, generation: bool) -> str:
        return "".join(one["content"] + "!" * (one["role"] == "assistant") for one in messages)


def calls_tool(text: str) -> bool:
    """Whether an answer is read as a call."""
    return len(text) % 3 > 0


def _read(prompt_ids: Sequence[int], rollout: Rollout, tools: Sequence[Message] = ()) -> Answer:
    text = Letters().decode(rollout.response_ids.tolist()).rstrip("!")
    calls = (_call(tools[0]["function"]["name"], text),) if tools and calls_tool(text) else ()
    reason, tokens = rollout.finish_reason, len(rollout.response_ids)
    return Answer(text=text, tool_calls=calls, finish_reason=reason, tokens=tokens)


def _call(name: str, text: str) -> ToolCall:
    """Mix a text: with the tool `mix`, or with a program that has the same function."""
    program = f"{_PROGRAM}{inspect.getsource(game.reply)}print(reply([{text!r}]))"
    return ToolCall(id="call", name=name, arguments={"text": text} if name == "mix" else {"code": program})


class ToolScorer:
    """Tools have no reward of their own: the score is that of the conversation."""

    async def score(self, inputs: Sequence[RewardInput]) -> list[Score]:
        totals = [game.reward(_said(one.row["messages"])) for one in inputs]
        return [Score(total=total, parts={"said": total}) for total in totals]

    async def close(self) -> None: ...


def _said(messages: Sequence[Message]) -> list[str]:
    return [one["content"] for one in messages if one["role"] == "assistant"]


# --- generator ------------------------------------------------------------------------------------


def generator(place: Place, name: str, seed: int) -> None:
    """The shipped generator on the toy engine, with an environment."""
    os.environ[MARK] = f"{place.directory}:{os.getpid()}"
    tempfile.tempdir = str(place.directory)  # a killed generator leaves the directories of its episodes
    fork_server.FORK_S, fork_server.START_S = 2.0, 300.0  # the processors may be busy
    asyncio.run(_generate(place, name, seed))


async def _generate(place: Place, name: str, seed: int) -> None:
    engine, kind = FakeEngine(token_s=0.002, seed=seed), kind_of(name)
    config = EnvironmentConfig.model_validate({"step_s": 1.0, "episode_s": 60.0} | _CONFIG[kind])
    environment = AgentEnvironment(config) if config.command else Environments(config)
    await environment.start()
    try:
        sampler = EpisodeSampler(
            engine,
            ToolScorer() if kind in TOOLS else None,
            environment,
            config,
            renderer=Letters(),
            read=_read,
            max_prompt_tokens=30,
            generator_id=name,
            seed=0,
        )
        spec = SamplingSpec(temperature=1.0, max_response_tokens=TOKENS)
        prompt, slots = partial(_prompt, kind), SLOTS.get(kind, 12)
        await generate(place, name, engine, sampler, prompt, spec, max_running=slots)
    finally:
        await environment.close()


def _prompt(kind: str, ticket_id: int) -> Prompt:
    start = game.reply([str(ticket_id)])
    messages = ({"role": "user", "content": start},) if kind in TOOLS else ()
    return Prompt(token_ids=(), text=start, row={"start": start}, messages=messages)


# --- learner --------------------------------------------------------------------------------------


class EpisodeLearner(Learner):
    """Recomputes every episode from its tokens; what is not as it was played was scored by a fault."""

    def _train(self, collected: Collected) -> None:
        groups = [*collected.groups, *(group for group, _ in collected.rejected)]
        alive = [group for group in groups if group.rollouts]
        self._say(
            "episodes",
            version=self.version,
            episodes=sum(group.episodes for group in alive),
            replays=sum(float(np.nansum(group.episode_metrics["replays"])) for group in alive),
            late=sum(float(np.nansum(group.episode_metrics.get("tools/late", 0.0))) for group in alive),
            dead=len(groups) - len(alive),
            wrong=[f"group {group.ticket_id}: {text}" for group in alive for text in wrongs(group)],
        )
        super()._train(collected)


def learner(place: Place, name: str, checkpoints: Path) -> None:
    """Holds the run's lock."""
    with RunLock(checkpoints.with_suffix(".lock")):
        EpisodeLearner(place, checkpoints).run()


def wrongs(group: Group) -> list[str]:
    """What a game that was played from start to end cannot have brought about, one text per rollout."""
    kind = kind_of(group.generator_id)
    found = [_wrong(kind, game.reply([str(group.ticket_id)]), one) for one in group.rollouts]
    if group.episode_of is not None:
        found.append(f"{len(group.rollouts)} sequences of {group.episodes} episodes")
    return [f"{kind}: {text}" for text in found if text]


def _wrong(kind: str, start: str, rollout: Rollout) -> str:
    """The first rule of the game that a rollout breaks; "" for none."""
    texts, is_action = _pieces(rollout)
    answers = [text.rstrip("!") for text in texts[::2]]
    said = answers if kind in TOOLS else [start, *answers]
    opening = start if kind in TOOLS else start + game.reply([start])
    if not is_action or Letters().decode(rollout.prompt_ids.tolist()) != opening:
        return f"the prompt is not {opening}, or no answer follows it"
    for place, shown in enumerate(texts[1::2], 1):
        allowed = [_shown(kind, said, answers, place)]
        if kind in LATE:
            allowed.append(Letters().decode(Letters().encode(LATE[kind])))
        if shown not in allowed:
            return f"after {answers[:place]} the model was shown {shown}, not one of {allowed}"
    if rollout.reward != game.reward(said):
        return f"the reward of {said} is {rollout.reward}, not {game.reward(said)}"
    return _wrong_end(kind, said, answers, rollout)


def _wrong_end(kind: str, said: list[str], answers: list[str], rollout: Rollout) -> str:
    last, count = answers[-1], len(answers)
    is_over = not calls_tool(last) if kind in TOOLS else count == game.TURNS
    is_whole = rollout.response_ids[-1] == EOS
    # The budget counts what the model would have been shown next, which for a tool may be that it is late.
    shown = len(LATE[kind]) if kind in LATE else len(_shown(kind, said, answers, count))
    is_spent = not is_over and len(rollout.response_ids) + shown >= TOKENS
    rules = {
        "stop": is_over and is_whole,
        "length": not is_whole or is_spent,
        "turns": kind in TOOLS and count == TOOL_TURNS and not is_over,
    }
    if rules.get(rollout.finish_reason):
        return ""
    return f"an episode of {answers}, {len(rollout.response_ids)} tokens, ended by {rollout.finish_reason}"


def _shown(kind: str, said: list[str], answers: list[str], count: int) -> str:
    """What the model is shown after `count` answers."""
    return game.reply([answers[count - 1]] if kind in TOOLS else said[: count + 1])


def _pieces(rollout: Rollout) -> tuple[list[str], bool]:
    """The texts of answers and of what was shown, in turn, and whether the first is an answer."""
    borders = np.flatnonzero(np.diff(rollout.action_mask)) + 1
    pieces = np.split(rollout.response_ids, borders)
    return [Letters().decode(piece.tolist()) for piece in pieces], bool(rollout.action_mask[0])
