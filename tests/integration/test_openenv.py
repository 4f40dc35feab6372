"""Environments behind a real server of OpenEnv, which pip brings into a Python of its own."""

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.errors import EnvironmentFault
from tests.support import libraries
from tests.support.libraries import called, last, play, played, python_with
from tests.support.talks import ScriptedTalk

SERVER = Path(libraries.__file__).with_name("openenv_server.py")
pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server."""
    directory = tmp_path_factory.mktemp("openenv") / "venv"
    python = python_with(directory, ["openenv==0.10.0"], ["openenv.core.env_server"])
    process = subprocess.Popen([str(python), str(SERVER)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait(120)


def test_an_action_with_one_text_is_the_answer(server: str) -> None:
    first, second = ScriptedTalk(["hello", "bye"]), ScriptedTalk(["bye"])
    # The server has one session, so the second episode needs that of the first.
    outcomes = asyncio.run(played(f"openenv:{server}/echo", (first, {}, 1), (second, {}, 1)))
    assert [one.reward for one in outcomes] == [8.0, 3.0]
    assert [last(shown) for shown in first.shown] == ["I repeat.", "hello"]


def test_a_server_without_a_free_session_is_a_fault(server: str) -> None:
    async def both() -> list:
        uses = f"openenv:{server}/echo"
        second = asyncio.Event()

        async def other() -> None:
            with pytest.raises(EnvironmentFault, match=r"CAPACITY_REACHED.*max_concurrent_envs"):
                await played(uses, (ScriptedTalk(["bye"]), {}, 1))
            second.set()

        class Slow(ScriptedTalk):
            async def chat(self, messages, *, tools=()):
                if not second.is_set():
                    await other()
                return await super().chat(messages, tools=tools)

        return await played(uses, (Slow(["bye"]), {}, 1))

    assert [one.reward for one in asyncio.run(both())] == [3.0]


def test_other_actions_are_json_and_a_refused_one_is_an_observation(server: str) -> None:
    guesses = [f'I say {{"number": {number}}}' for number in range(1, 6)]
    script = ["I say 4", '{"number": "four"}', *guesses]
    outcome, talk = play(f"openenv:{server}/guess", script, {"high": 5}, seed=1)
    assert (outcome.reward, outcome.finish_reason) == (1.0, "stop")
    shown = [last(shown) for shown in talk.shown]
    assert '"number": {' in shown[0] and '{"hint": "from 1 to 5", "tries": 0}' in shown[0]
    assert "found no action" in shown[1] and "number: Input should be a valid integer" in shown[2]
    assert len(shown) == 4 and shown[3] == '{"hint": "higher", "tries": 1}', "2 comes from the seed 1"


def test_tools_of_a_server_are_those_of_the_model(server: str) -> None:
    script = [called("buy", what="tea"), called("buy", what="air"), called("buy", what="tea", count=2)]
    outcome, talk = play(f"openenv:{server}/shop", script, {"prompt": "Buy three."})
    assert (outcome.reward, outcome.finish_reason) == (1.0 + 1.0 + 3.0, "stop")
    assert last(talk.shown[1]) == "1 tea, 1 in all" and "air is free" in last(talk.shown[2])
    [tool] = talk.tools[0]
    assert tool["function"]["name"] == "buy" and tool["function"]["parameters"]["required"] == ["what"]


def test_a_server_that_raises_or_ends_is_a_fault(server: str) -> None:
    uses = f"openenv:{server}/guess"
    with pytest.raises(EnvironmentFault, match="EXECUTION_ERROR: unlucky"):
        play(uses, ['{"number": 13}'])
    with pytest.raises(EnvironmentFault, match=r"the server .* is lost"):
        play(uses, ['{"number": 99}'])
    with pytest.raises(EnvironmentFault, match="Connection refused"):
        play(uses, [])
