"""Environments of other libraries, each played for real in a Python of its own: made by pip, beside ours.

The libraries of one Python share one environment of pip, which is made once per session.
"""

import asyncio
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from asyncrl.addons.adapters.base import split_options
from asyncrl.config.environment_section import EnvironmentConfig
from asyncrl.environments.environments import Environments
from asyncrl.environments.named import load_target
from asyncrl.errors import EnvironmentFault
from asyncrl.sandbox.box import Box
from tests.support.environments import calls
from tests.support.libraries import ROOT, called, last, play, played, python_with
from tests.support.talks import ScriptedTalk
from tests.support.waiting import HANG, has_ended, wait_until, wait_until_ended

PROBLEM = Box()._view.problem()
pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@pytest.fixture(scope="session")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with the libraries that live beside vLLM."""
    directory = tmp_path_factory.mktemp("beside") / "venv"
    packages = ["reasoning-gym==0.1.25", "gymnasium==1.4.0", "textarena==0.7.4"]
    return python_with(directory, packages, ["reasoning_gym", "gymnasium", "textarena"])


def chain_sum(shown: list[dict]) -> str:
    """The answer to a sum: the oracle of the task."""
    return f"It is <answer>{eval(re.search(r'problem: ([-+ 0-9]+)=', shown[0]['content'])[1])}</answer>"


def test_reasoning_gym(beside: Path) -> None:
    command = [str(beside), "-c", "from asyncrl.cli.main import main; main()", "dataset"]
    made = subprocess.run(
        [*command, "reasoning_gym:chain_sum", "--size", "2", "--seed", "5"],
        capture_output=True, text=True, timeout=100, check=True, cwd=ROOT,
    )  # fmt: skip
    rows = [json.loads(line) for line in made.stdout.splitlines()]
    assert len(rows) == 2 and all(row["entry"]["question"] in row["prompt"] for row in rows)
    made = subprocess.run(
        [*command, "reasoning_gym:arc_agi", "--size", "2"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert made.returncode == 2 and "JSON does not keep; take data.train: seeds:N" in made.stderr, made.stderr

    tries = iter(["1000000", None])
    right, again, other, of_row = (ScriptedTalk(chain_sum) for _ in range(4))
    second = ScriptedTalk(lambda shown: next(tries) or chain_sum(shown))
    wrong = ScriptedTalk(["7000", "8000", "<answer>nine</answer>"])
    games = [(right, 3), (again, 3), (other, 4), (second, 5), (wrong, 6)]
    uses = "reasoning_gym:chain_sum?attempts=3&max_terms=2"
    playing = played(uses, *((talk, {}, seed) for talk, seed in games), (of_row, rows[1], 0), python=beside)
    outcomes = asyncio.run(playing)
    assert [one.reward for one in outcomes[:4]] == [1.0] * 4 and outcomes[5].reward == 1.0
    assert outcomes[4].reward is not None and outcomes[4].reward < 0.5
    assert [len(talk.shown) for talk, _ in games] == [1, 1, 1, 2, 3]
    assert "Try again" in last(second.shown[1])
    assert right.shown == again.shown != other.shown, "the task comes from the seed"
    assert last(of_row.shown[0]) == rows[1]["prompt"], "or from the row"


def test_gymnasium(beside: Path) -> None:
    lake = "gymnasium:FrozenLake-v1?is_slippery=false&render_mode=ansi"
    outcome, talk = play(lake, ["no action", *(f"I go {way}" for way in (1, 1, 2, 2, 1, 2))], python=beside)
    assert (outcome.reward, outcome.finish_reason) == (1.0, "stop")
    assert "from 0 to 3" in last(talk.shown[0]) and "[S]FFF" in last(talk.shown[0])
    assert "found no action" in last(talk.shown[1]) and "(Down)" in last(talk.shown[2])
    outcome, talk = play(lake, ["3", "no action", "1", "3", "1", "2"], python=beside)  # at last into a hole
    states = [state for _, state in talk.rewards]
    assert len({*states[:3]}) == 1 and states[3] == states[5] not in states[:3], "places, not what was shown"
    assert states[4] == states[0]
    assert (outcome.reward, outcome.finish_reason) == (0.0, "stop")
    outcome, talk = play(
        "gymnasium:Pendulum-v1?max_episode_steps=2", ["[0.5]", "[9, 9]", "[-1]"], python=beside
    )
    assert outcome.finish_reason == "turns" and outcome.reward < 0
    assert len(talk.shown) == 3 and "found no action" in last(talk.shown[2])

    tried = """
import numpy as np
from gymnasium import spaces
from asyncrl.addons.adapters.gymnasium import read_action
grid, whole = spaces.Box(-1.0, 1.0, (2, 2), np.float32), spaces.MultiDiscrete([2, 3])
for space, said in ((grid, "so [[0.5, 0], [0, 1]]!"), (grid, "[x] [0.5, 0, 0, 1]"), (whole, "[1, 2] [it is]"),
                    (whole, "[0.5, 1.7]"), (whole, "[[1]"), (grid, "[" * 3000), (grid, "none")):
    action = read_action(space, said)
    print(None if action is None else action.tolist())
"""
    done = subprocess.run([str(beside), "-c", tried], capture_output=True, text=True, check=True, cwd=ROOT)
    grid = "[[0.5, 0.0], [0.0, 1.0]]"
    assert done.stdout.splitlines() == [grid, grid, "[1, 2]", "None", "None", "None", "None"]


def test_textarena(beside: Path) -> None:
    moves = ("A C", "A B", "C B", "A C", "B A", "B C", "A C")
    outcome, talk = play("textarena:TowerOfHanoi-v0", [f"[{move}]" for move in moves], python=beside)
    assert (outcome.reward, outcome.finish_reason) == (1.0, "stop")
    assert "Tower of Hanoi with 3 disks" in last(talk.shown[0])
    assert "Tower of Hanoi" not in last(talk.shown[1]) and "You moved disk 1 from A to C" in last(
        talk.shown[1]
    )
    assert "[A C]" not in last(talk.shown[1]), "the model's own move is in the conversation already"
    outcome, _ = play("textarena:TowerOfHanoi-v0", ["I resign"] * 5, python=beside)
    assert outcome.reward == 0.0
    with pytest.raises(EnvironmentFault, match="number of players has to be 2"):
        play("textarena:TicTacToe-v0", [], python=beside)


def test_gem(tmp_path: Path, beside: Path) -> None:
    """GEM pins other versions of what vLLM and the other libraries need."""
    python = python_with(tmp_path / "venv", ["gem-llm==0.1.0"], ["gem"], base=beside)
    low, high = 1, 10

    def bisect(shown: list[dict]) -> str:
        nonlocal low, high
        if hint := re.search(r"is (lower|higher) than (\d+)", last(shown)):
            low, high = (low, int(hint[2]) - 1) if hint[1] == "lower" else (int(hint[2]) + 1, high)
        return f"\\boxed{{{(low + high) // 2}}}"

    outcome, talk = play("gem:game:GuessTheNumber-v0-easy", bisect, python=python)
    assert outcome.reward is not None and outcome.reward > 0.5 and "Guess The Number" in last(talk.shown[0])


SHOWN = [{"role": "user", "content": "?"}]
SERVER = '''
import os, time
from mcp.server import MCPServer

server, calls = MCPServer("shop"), 0

@server.tool()
def add(a: int, b: int = 2, unit: str | None = None) -> str:
    """Add two numbers.

    Args:
        a: the first number
    """
    global calls
    calls += 1
    return f"{a + b} {unit or ''} in call {calls}"

@server.tool()
def refuse(text: str) -> str:
    """Refuse."""
    raise ValueError(text)

@server.tool()
def end() -> str:
    """End the server."""
    os._exit(3)

@server.tool()
def wait(note: str) -> str:
    """Write the process id into a file, and wait."""
    with open(note, "w") as file: file.write(str(os.getpid()))
    HANG
    return ""

server.run()
'''.replace("HANG", HANG)


def test_the_tools_of_an_mcp_server(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    uses, row = f"mcp:{sys.executable} {tmp_path / 'server.py'}", {"prompt": "Add."}
    script = [
        called("add", a=1),
        called("add", a=1, b=5, unit="kg"),
        called("refuse", text="no"),
        called("add", a="x"),
    ]
    talk, other = ScriptedTalk([*script, "done"]), ScriptedTalk([called("end")])
    with pytest.raises(EnvironmentFault, match=r"the server .* is lost"):
        asyncio.run(played(uses, (talk, row, 0), (other, row, 0)))
    assert [last(shown) for shown in talk.shown[1:3]] == ["3  in call 1", "6 kg in call 2"]
    assert "error" in last(talk.shown[3]).lower() and "a must be an integer" in last(talk.shown[4])
    tools = {tool["function"]["name"]: tool["function"] for tool in talk.tools[0]}
    assert tools["add"]["description"] == "Add two numbers.\n\nArgs:\n    a: the first number"
    parameters = tools["add"]["parameters"]
    assert parameters["required"] == ["a"]
    assert parameters["properties"]["unit"]["anyOf"] == [{"type": "string"}, {"type": "null"}]
    servers = [one.info["cmdline"] or [] for one in psutil.process_iter(["cmdline"])]
    assert not [words for words in servers if str(tmp_path / "server.py") in words], (
        "they end with their episode"
    )


@pytest.mark.parametrize(
    ("server", "says"),
    [
        ("no-such-server --port 1", "no program `no-such-server`; write `mcp:COMMAND`, or `mcp:http://"),
        ("", "no program ``; write `mcp:COMMAND`"),
        (f"{sys.executable} -c 'raise SystemExit(\"no shop\")'", "gives no tools .*it last printed: no shop"),
        ("http://127.0.0.1:1/mcp", "gives no tools .*onnect"),
    ],
)
def test_an_mcp_server_that_cannot_be_used_is_named(server: str, says: str) -> None:
    with pytest.raises(EnvironmentFault, match=f"(?s){says}"):
        play(f"mcp:{server}", [])


# A server without a library, so that it can say what no library says. Its argument is what is odd about it.
ODD_SERVER = """
import json, sys

odd = sys.argv[1]
SCHEMA = {"type": "object", "required": ["from"], "properties": {
    "from": {"type": ["integer", "null"]}, "max-results": {"type": "integer"}, "self": {"type": "string"},
    "unit": {"enum": [{"of": "mass"}, {"of": "time"}]}, "name": {}, "arguments": True}}
NAMES = ["reset", "_serve", "server", "__init__", "step", "close", "reward", "get_reward", "done", "__tools__"]

def answer(method, params):
    if method == "initialize":
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}},
                "serverInfo": {"name": "odd", "version": "1"}}
    if method == "tools/list":
        more = {"nextCursor": "more"} if odd == "endless" else {}
        return {"tools": [{"name": name, "inputSchema": SCHEMA} for name in NAMES], **more}
    if method == "tools/call":
        text = f"{params['name']} of {json.dumps(params['arguments'])}"
        return {"content": text if odd == "no MCP" else [{"type": "text", "text": text}]}
    return {}

for line in sys.stdin:
    request = json.loads(line)
    if "id" in request:
        result = answer(request["method"], request.get("params") or {})
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)
"""


def odd_server(tmp_path: Path, odd: str) -> str:
    (tmp_path / "odd.py").write_text(ODD_SERVER)
    return f"mcp:{sys.executable} {tmp_path / 'odd.py'} '{odd}'"


def test_names_and_arguments_of_an_mcp_server_are_json_and_not_python(tmp_path: Path) -> None:
    """Those of the adapter's own methods are only tools, and the schema is the server's."""
    names = ["reset", "_serve", "server", "__init__", "step", "close", "reward", "get_reward", "done"]
    given = {"from": None, "max-results": 3, "self": "s", "unit": {"of": "time"}, "name": "n", "arguments": 1}
    script = [calls((name, given)) for name in (*names, "__tools__")]
    script += [called("step", **{"from": "x"}), called("step", **{"from": 1, "unit": {"of": "x"}})]
    talk = ScriptedTalk([*script, "done"])
    [outcome] = asyncio.run(played(odd_server(tmp_path, ""), (talk, {"prompt": "?"}, 0)))
    shown = [last(one) for one in talk.shown[1:]]
    assert shown[:-2] == [f"{name} of {json.dumps(given)}" for name in (*names, "__tools__")]
    assert "from must be an integer or a null" in shown[-2] and "unit must be one of" in shown[-1]
    parameters = talk.tools[0][0]["function"]["parameters"]
    assert list(parameters["properties"]) == list(given) and parameters["required"] == ["from"]
    assert parameters["properties"]["from"] == {"type": ["integer", "null"]}
    assert (outcome.reward, outcome.metrics["tools/invalid"]) == (None, 2.0)


def test_a_reply_that_is_no_mcp_is_a_fault_and_not_the_models_mistake(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"tool `step` raised ConnectionError: .* no answer of MCP"):
        play(odd_server(tmp_path, "no MCP"), [called("step", **{"from": 1}), "done"], {"prompt": "?"})


def test_a_server_that_lists_tools_without_an_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="lists tools without an end: 1000 in 100 answers"):
        play(odd_server(tmp_path, "endless"), [])


def test_an_older_mcp_is_named_with_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "asyncrl.addons.adapters.mcp", raising=False)
    monkeypatch.setattr("importlib.metadata.version", lambda package: "2.0.0")
    with pytest.raises(ImportError, match=r"found mcp 2\.0\.0; at least 2\.3 is needed: run `pip install"):
        load_target("mcp:python server.py")


def test_an_mcp_server_that_hangs_or_dies_costs_its_episode(tmp_path: Path) -> None:
    """Also with its worker: each is a fault, no server is left, and the next episode is good."""
    (tmp_path / "server.py").write_text(SERVER)
    config = EnvironmentConfig(uses=f"mcp:{sys.executable} {tmp_path / 'server.py'}", step_s=15)
    note = tmp_path / "pid"

    def victim(name: str) -> psutil.Process:
        server = psutil.Process(int(note.read_text()))
        return server if name == "server" else server.parent()

    async def scenario() -> None:
        environment = Environments(config)
        try:
            await environment.start()
            for name, number, says in (
                ("server", signal.SIGSTOP, "`wait`: took longer than 15 s"),
                ("server", signal.SIGKILL, "is lost"),
                ("worker", signal.SIGKILL, "`wait`: the process died"),
            ):
                note.unlink(missing_ok=True)
                talk = ScriptedTalk([called("wait", note=str(note))])
                playing = asyncio.create_task(environment.play(talk, {}, prompt=SHOWN, seed=0, episode=0))
                while not note.exists() or not note.read_text():
                    await asyncio.wait({playing}, timeout=0.05)
                    assert not playing.done()
                server = victim("server")
                victim(name).send_signal(number)
                with pytest.raises(EnvironmentFault, match=says):
                    await asyncio.wait_for(playing, 30)
                psutil.wait_procs([server], timeout=10)
                assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE
            talk = ScriptedTalk([called("add", a=1), "done"])
            assert (await environment.play(talk, {}, prompt=SHOWN, seed=0, episode=0)).finish_reason == "stop"
        finally:
            await environment.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("uses", ["mcp", "python"])
def test_no_server_and_no_program_is_left_when_the_generator_is_killed(tmp_path: Path, uses: str) -> None:
    if uses == "python" and PROBLEM is not None:
        pytest.skip(str(PROBLEM))
    (tmp_path / "server.py").write_text(SERVER)
    note = tmp_path / "pid"
    call, wanted = ("wait", {"note": str(note)}), f"mcp:{sys.executable} {tmp_path / 'server.py'}"
    if uses == "python":
        call, wanted = (
            ("python", {"code": f"print('begun', flush=True); {HANG}"}),
            "python",
        )
    program = f"""
import asyncio, sys
sys.path.insert(0, {str(ROOT)!r})
from tests.support.environments import calls
from tests.support.libraries import called, played
from tests.support.talks import ScriptedTalk
asyncio.run(played({wanted!r}, (ScriptedTalk([called({call[0]!r}, **{call[1]!r})]), {{"prompt": "?"}}, 0)))
"""
    generator = psutil.Popen([sys.executable, "-c", program])

    def family() -> list[psutil.Process]:
        return generator.children(recursive=True)

    def is_begun() -> bool:
        if uses == "mcp":
            return note.exists() and bool(note.read_text())
        boxes = [one for one in family() if one.name() == "bwrap"]
        return any(len(box.children(recursive=True)) > 1 for box in boxes)

    wait_until(lambda: has_ended(generator) or is_begun())
    found = family()
    assert found
    generator.kill()
    generator.wait(120)
    wait_until_ended(found)


@pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))
def test_the_tool_python() -> None:
    programs = ["print(6 * 7)", "1 / 0", "x = 1", "print('x' * 99999)", "open('/etc/shadow').read()"]
    outcome, talk = play(
        "python", [*(called("python", code=code) for code in programs), "42"], {"prompt": "?"}
    )
    seen = [last(shown) for shown in talk.shown[1:]]
    assert outcome.finish_reason == "stop" and seen[0] == "42" and seen[2] == "the program printed nothing"
    assert seen[1].endswith("ZeroDivisionError: division by zero") and "[cut:" in seen[3]
    assert "FileNotFoundError" in seen[4] or "PermissionError" in seen[4]
    assert [tool["function"]["name"] for tool in talk.tools[0]] == ["python"]


def test_a_library_that_is_missing_is_named_with_the_cure() -> None:
    with pytest.raises(EnvironmentFault, match=r"package gem is not installed; run `pip install gem-llm`"):
        play("gem:game:GuessTheNumber-v0", [])


def test_options_of_a_name_are_json_or_text() -> None:
    assert split_options("A-v0") == ("A-v0", {})
    found = {"a": 1, "b": True, "c": "ansi", "d": [1, 2], "e": "", "f": "x y"}
    assert split_options("game:B?a=1&b=true&c=ansi&d=[1,2]&e=&f=x+y") == ("game:B", found)
