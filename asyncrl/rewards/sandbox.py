"""The sandbox of reward workers, for rewards that run programs which the model wrote.

A worker sees the working directory and the directories of reward files, but not the run root, other runs, or
files with private names (`asyncrl.sandbox.bubblewrap`).
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import asyncrl
from asyncrl.config.reward_section import RewardConfig
from asyncrl.sandbox.bubblewrap import Bubblewrap


def reward_sandbox(functions: Sequence[str], run_root: Path) -> Bubblewrap:
    """The sandbox for reward functions as in the config. `run_root` is hidden, except reward files in it."""
    places = [Path(function.rpartition(":")[0]) for function in functions]
    files = [place.absolute() for place in places if place.suffix == ".py" and place.is_file()]
    return Bubblewrap(
        directory=Path.cwd(),
        own=[Path.cwd(), *(file.parent for file in files)],
        packages=[Path(path).absolute() for path in (asyncrl.__path__[0], *sys.path)],
        files=files,
        hidden=[run_root],
    )


def sandbox_of(config: RewardConfig, run_root: Path) -> Bubblewrap | None:
    """The sandbox that the config asks for, if any."""
    if config.sandbox != "bubblewrap":
        return None
    return reward_sandbox([function.function for function in config.functions], run_root)
