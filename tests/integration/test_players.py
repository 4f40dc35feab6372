"""The processes of rewards and environment: nothing is left when one of them cannot start."""

import asyncio
import tempfile

import psutil
import pytest

from asyncrl.errors import EnvironmentFault, RewardError
from asyncrl.launch.players import Players
from tests.support.task_config import config_of

pytestmark = pytest.mark.integration
REWARD = "def reward(prompt, response):\n    return 1.0\n"
GAME = "class Game:\n    def reset(self): return ''\n    def step(self, response): return '', 0.0, True\n"
BROKEN = "raise RuntimeError('no license')\n"


@pytest.mark.parametrize(
    ("reward", "game", "kind"), [(BROKEN, GAME, RewardError), (REWARD, BROKEN, EnvironmentFault)]
)
def test_nothing_is_left_of_processes_that_cannot_start(tmp_path, monkeypatch, reward, game, kind):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    (tmp_path / "reward.py").write_text(reward)
    (tmp_path / "game.py").write_text(game)
    config = config_of(
        reward={"functions": [{"function": f"{tmp_path / 'reward.py'}:reward"}]},
        environment={"uses": f"{tmp_path / 'game.py'}:Game"},
    )

    async def start():
        await Players.of(config, tmp_path / "runs").start(None)

    assert_refused(start, scratch, kind, "no license")


def test_tools_without_a_reward_function_are_refused(tmp_path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    config = config_of(reward={"functions": []}, environment={"uses": ["python"]})

    async def start():
        await Players.of(config, tmp_path / "runs").start(None)

    assert_refused(start, scratch, EnvironmentFault, r"nothing scores an episode; name a reward function")


def assert_refused(start, scratch, kind, says):
    before = set(psutil.Process().children())
    with pytest.raises(kind, match=says):
        asyncio.run(start())
    assert set(psutil.Process().children()) <= before and list(scratch.iterdir()) == []
