"""Pythons with libraries that pip brings, and episodes of their environments with a scripted model."""

import asyncio
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.environment_section import EnvironmentConfig
from asyncrl.environments.base import Answer, Outcome, ToolCall
from asyncrl.environments.environments import Environments
from asyncrl.errors import EnvironmentFault
from tests.support.environments import children
from tests.support.talks import ScriptedTalk

ROOT = Path(__file__).parents[2]
# Limits in seconds for pip, and for the imports afterwards.
INSTALL_S, IMPORT_S = 250.0, 120.0
# Limit in seconds for an episode to end. Some start servers of tools, which import a large library.
EPISODE_S = 180.0


def packages_of(python: Path) -> str:
    """Where pip of a virtual environment installs."""
    place = str(python.parents[1])
    return sysconfig.get_path("purelib", vars={"base": place, "platbase": place})


def python_with(
    directory: Path, packages: Sequence[str], imports: Sequence[str], *, base: Path | None = None
) -> Path:
    """A virtual environment on top of ours and of `base`, so that pip brings only what is missing."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    python = directory / "bin" / "python"
    ours = [str(ROOT), *(path for path in sys.path if Path(path).name == "site-packages")]
    Path(packages_of(python), "ours.pth").write_text(
        "\n".join([*([packages_of(base)] if base else []), *ours])
    )
    # One connection that hangs does not take all of the time.
    pip = ["pip", "install", "-q", "--disable-pip-version-check", "--timeout", "10", "--retries", "1"]
    attempt([str(python), "-m", *pip, *packages], INSTALL_S)
    attempt([str(python), "-c", f"import {', '.join(imports)}"], IMPORT_S)
    return python


@contextmanager
def with_bitsandbytes(directory: Path) -> Iterator[None]:
    """Let this process, and those that begin within, import bitsandbytes, which computes on CPUs too."""
    python = python_with(directory, ["--no-deps", "bitsandbytes==0.50.2"], ["bitsandbytes"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", packages_of(python), prepend=":")
        patch.setattr(sys, "path", [*sys.path, packages_of(python)])
        yield


def attempt(command: list[str], limit_s: float) -> None:
    """Run a command that brings a library: without it a test has not passed, so it fails, and says why."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        pytest.fail(f"not done within {limit_s:g} s: {' '.join(command)}")
    if done.returncode:
        pytest.fail(f"failed: {' '.join(command)}: {done.stderr[-500:]}")


async def played(
    uses: str, *games: tuple[ScriptedTalk, dict, int], faults: bool = False, **settings
) -> list[Outcome]:
    """Play one episode after the other, each with a talk, a row and a seed; `faults` are returned, too."""
    environment = Environments(EnvironmentConfig(uses=uses, step_s=30, **settings))
    found: list[Any] = []
    try:
        await environment.start()
        for talk, row, seed in games:
            prompt = [{"role": "user", "content": row["prompt"]}] if "prompt" in row else []
            playing = environment.play(talk, row, prompt=prompt, seed=seed, episode=0)
            try:
                found.append(await asyncio.wait_for(playing, EPISODE_S))
            except EnvironmentFault as fault:
                if not faults:
                    raise
                found.append(fault)
    finally:
        await environment.close()
    return found


def play(
    uses: str, script: Callable | list, row: dict | None = None, *, seed: int = 3, **settings
) -> tuple[Outcome, ScriptedTalk]:
    """Play one episode, and see that no process is left."""
    before, talk = children(), ScriptedTalk(script)
    [outcome] = asyncio.run(played(uses, (talk, row or {}, seed), **settings))
    assert children() <= before
    return outcome, talk


def last(shown: list[dict]) -> str:
    """The text of the last message."""
    return shown[-1]["content"]


def called(name: str, **arguments: object) -> Answer:
    """An answer that calls a tool."""
    return Answer(text="", tool_calls=(ToolCall(id="1", name=name, arguments=arguments),))
