"""Environments of a test: a file of user code, played in real processes, of which none is left."""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import psutil

from asyncrl.config.environment_section import EnvironmentConfig
from asyncrl.environments.base import Answer, Outcome, ToolCall
from asyncrl.environments.environments import Environments
from tests.support.talks import ScriptedTalk

EPISODE_S = 30.0


def children() -> set[psutil.Process]:
    """The processes below this one that run, of this test or of another."""
    return {one for one in psutil.Process().children(recursive=True) if one.status() != "zombie"}


def fork_server() -> psutil.Process:
    """The fork server of the only environment."""
    # A process that has just died has no command line, for which `as_dict` gives None.
    lines = {one: str(one.as_dict(["cmdline"])["cmdline"]) for one in psutil.Process().children()}
    [server] = [one for one, line in lines.items() if "asyncrl.environments" in line]
    return server


@contextlib.asynccontextmanager
async def environment(tmp_path, code: str, names: str, **settings: Any):
    """The environment of `names` in a file with this code; several names are a list of tools."""
    file = tmp_path / "mine.py"
    file.write_text(code)
    uses = [f"{file}:{name}" for name in names.split()]
    played = Environments(EnvironmentConfig(uses=uses[0] if len(uses) == 1 else tuple(uses), **settings))
    before = children()
    try:
        await played.start()
        yield played
    finally:
        await played.close()
        assert children() <= before, "processes of an environment are left"


async def play(
    played: Environments, talk: ScriptedTalk, row: Mapping[str, Any] | None = None, *, prompt: Any = "", seed: int = 0, episode: int = 0
) -> Outcome:  # fmt: skip
    """One episode, which may not take longer than `EPISODE_S`."""
    async with asyncio.timeout(EPISODE_S):
        return await played.play(talk, row or {}, prompt=prompt, seed=seed, episode=episode)


def calls(*wanted: tuple[str, Any]) -> Answer:
    """An answer that calls tools: pairs of name and arguments."""
    listed = [ToolCall(id=f"call-{n}", name=name, arguments=given) for n, (name, given) in enumerate(wanted)]
    return Answer(text="", tool_calls=tuple(listed))
