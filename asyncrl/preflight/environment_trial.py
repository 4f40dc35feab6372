"""`asyncrl environment test`: starts an environment as a run would, and plays an episode without a model."""

import ast
import asyncio
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.config.environment_section import EnvironmentConfig, is_rollout
from asyncrl.engine.episodes import require_same_start
from asyncrl.environments.base import Answer, BudgetSpent, Message, Outcome, ToolCall
from asyncrl.environments.environments import Environments
from asyncrl.environments.named import TOOLS
from asyncrl.environments.tool_schemas import example
from asyncrl.errors import ConfigError, EnvironmentFault
from asyncrl.types import Prompt

# What the model says if the user gives no answers: a number, a word, nonsense.
ANSWERS = ("0", "yes", "I do not know.")
TURNS = 6
SEED = 1


@dataclass(slots=True)
class Trial:
    """What was found."""

    uses: str
    description: Mapping[str, Any] = field(default_factory=dict)
    schemas: Sequence[Mapping[str, Any]] = ()
    start_s: float = 0.0
    # Lines of the episode: the role that speaks, and its text.
    spoken: list[tuple[str, str]] = field(default_factory=list)
    outcome: Outcome | None = None
    play_s: float = 0.0
    problem: str = ""


def try_environment(
    target: str, settings: Mapping[str, Any], *, row: Mapping[str, Any], prompt: str, answers: Sequence[str]
) -> Trial:
    """Start `FILE[:NAME]`, begin it twice, and play one episode. Raises ConfigError for a wrong target."""
    uses = target if ":" in target or target in TOOLS else _names(Path(target))
    config = EnvironmentConfig(uses=uses, **settings)
    trial = Trial(uses if isinstance(uses, str) else ", ".join(uses))
    messages = ({"role": "user", "content": prompt},)

    async def play(played: Environments) -> None:
        try:
            started_s = time.perf_counter()
            await played.start()
            trial.start_s = time.perf_counter() - started_s
            trial.description, trial.schemas = played.description, played.schemas
            await require_same_start(played, Prompt(token_ids=(), text=prompt, row=row, messages=messages))
            talk, started_s = _ScriptedTalk(answers or ANSWERS, trial.spoken), time.perf_counter()
            trial.outcome = await played.play(talk, row, prompt=messages, seed=SEED, episode=0)
            trial.play_s = time.perf_counter() - started_s
        finally:
            await played.close()

    try:
        asyncio.run(play(Environments(config)))
    except EnvironmentFault as fault:
        trial.problem = str(fault)
    return trial


class _ScriptedTalk:
    """Calls each tool that it is given once with example arguments, and then gives the answers in turn."""

    def __init__(self, answers: Sequence[str], spoken: list[tuple[str, str]]) -> None:
        """Write what is said into `spoken`."""
        self._answers = itertools.cycle(answers)
        self._left = TURNS
        self.spoken = spoken
        self._shown = 0
        self._called = False

    async def chat(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = (), **limits: Any
    ) -> Answer:
        for message in messages[self._shown :]:
            if message["role"] != "assistant":
                self.spoken.append((str(message["role"]), str(message.get("content"))))
        self._shown = len(messages)
        calls: tuple[ToolCall, ...] = ()
        if tools and not self._called:
            self._called = True
            functions = [tool["function"] for tool in tools]
            calls = tuple(
                ToolCall(id=f"call-{n}", name=one["name"], arguments=example(one["parameters"]))
                for n, one in enumerate(functions)
            )
        return self._answer(calls)

    async def complete(self, text: str, **limits: Any) -> Answer:
        self.spoken.append(("environment", text))
        return self._answer(())

    def score_turn(self, reward: float | None, state: int | None = None) -> None:
        """Show the reward of the last turn."""
        if reward is not None:
            self.spoken.append(("reward", f"{reward:g}"))

    def _answer(self, calls: tuple[ToolCall, ...]) -> Answer:
        if not self._left:
            raise BudgetSpent("turns")
        self._left -= 1
        answer = Answer(text="" if calls else next(self._answers), tool_calls=calls)
        said = [f"{one.name}({json.dumps(one.arguments)})" for one in calls] or [answer.text]
        self.spoken += [("model", text) for text in said]
        return answer


def _names(file: Path) -> str | tuple[str, ...]:
    """What a file without a name means: its one class or rollout, else all functions, which are tools."""
    try:
        body = ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"{file}: {error}; name a Python file as FILE or FILE:NAME") from error
    public = [one for one in body if not getattr(one, "name", "_").startswith("_")]
    classes = [one.name for one in public if isinstance(one, ast.ClassDef)]
    rollouts = [one.name for one in public if is_rollout(one)]
    tools = [one.name for one in public if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    if len(classes + rollouts) > 1 or not (classes or tools):
        found = f"{file} has the classes {classes}, rollouts {rollouts} and functions {tools}"
        raise ConfigError(f"{found}; say which one: {file}:NAME")
    if alone := classes + rollouts:
        return f"{file}:{alone[0]}"
    return tuple(f"{file}:{name}" for name in tools)
