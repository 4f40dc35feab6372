"""A file with user code that changes under a running generator: what was loaded goes on, nothing else starts."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import CodeChanged, EnvironmentFault
from asyncrl.launch.players import Player, Players
from asyncrl.rewards.base import RewardInput
from tests.support.environments import fork_server, play
from tests.support.talks import ScriptedTalk
from tests.support.task_config import config_of
from tests.support.waiting import has_ended, until

pytestmark = pytest.mark.integration

SCORE = "def right(prompt, response): return {}.0\n"
GAME = """
class Game:
    def reset(self): return "?"
    def step(self, response): return "", {}.0, True
"""
SAID = r"{} changed while this generator runs, .* restore the file"


@contextlib.asynccontextmanager
async def players(directory: Path, **sections: Any) -> AsyncIterator[Player]:
    made = Players.of(config_of(**sections), directory)
    player = made.tasks[0]
    for part in (player.scorer, player.environment):
        if part is not None:
            await part.start()
    try:
        yield player
    finally:
        await made.close()


async def changed(
    file: Path, code: str, score: Callable[[], Awaitable[float]], end: Callable[[], Awaitable[None]]
) -> None:
    """Ask for a score as the file changes, a process ends, and the file is restored."""
    assert await score() == 1.0
    file.write_text(code.format(2))
    assert await score() == 1.0
    await end()
    for _ in range(2):
        with pytest.raises(CodeChanged, match=SAID.format(file.name)):
            await score()
    file.write_text(code.format(1))
    assert await score() == 1.0


def test_a_reward_process_that_starts_again_never_scores_with_other_code(tmp_path: Path) -> None:
    file = tmp_path / "score.py"
    file.write_text(SCORE.format(1))

    async def scenario() -> None:
        async with players(tmp_path, reward={"functions": [{"function": f"{file}:right"}]}) as made:
            assert made.scorer is not None

            async def score() -> float:
                [one] = await made.scorer.score([RewardInput(prompt="", response="", row={})])
                return one.total

            async def end() -> None:
                made.scorer._workers[0].kill()

            await changed(file, SCORE, score, end)

    asyncio.run(scenario())


def test_an_environment_that_starts_again_never_plays_with_other_code(tmp_path: Path) -> None:
    file = tmp_path / "game.py"
    file.write_text(GAME.format(1))
    sections = {"environment": {"uses": f"{file}:Game"}, "reward": {"functions": []}}

    async def scenario() -> None:
        async with players(tmp_path, **sections) as made:

            async def score() -> float:
                outcome = await play(made.environment, ScriptedTalk(["go"]))
                return outcome.reward

            async def end() -> None:
                server = fork_server()
                os.kill(server.pid, signal.SIGKILL)
                await until(lambda: has_ended(server))
                # The next episode may be the one that finds it dead.
                with contextlib.suppress(EnvironmentFault, CodeChanged):
                    await score()

            await changed(file, GAME, score, end)

    asyncio.run(scenario())


def test_an_agent_that_changed_scores_no_episode(tmp_path: Path) -> None:
    file = tmp_path / "agent.py"
    file.write_text("")
    sections = {"environment": {"command": [sys.executable, str(file)]}, "reward": {"functions": []}}

    async def scenario() -> None:
        async with players(tmp_path, **sections) as made:
            for code, error in (("", EnvironmentFault), ("pass", CodeChanged), ("", EnvironmentFault)):
                file.write_text(code)
                with pytest.raises(error):
                    await play(made.environment, ScriptedTalk([]))

    asyncio.run(scenario())
