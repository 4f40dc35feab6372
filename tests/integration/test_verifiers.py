"""A taskset of verifiers 0.4, played by the library itself, in a Python of its own that pip makes."""

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.environments.base import Answer, ToolCall
from tests.support import libraries
from tests.support.libraries import ROOT, called, last, packages_of, play, played, python_with
from tests.support.talks import ScriptedTalk

TASKSET = Path(libraries.__file__).with_name("verifiers_sums.py")
TASK = {"a": 2, "b": 5, "prompt": "2 + 5?", "system_prompt": "Answer with a number."}
REFUSED = """
import json, sys
from asyncrl.addons.adapters.verifiers import environment
said = []
for name in sys.argv[1:]:
    try:
        environment(name)
    except (ImportError, TypeError, ValueError) as error:
        said.append(str(error))
print(json.dumps(said))
"""
pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("verifiers") / "venv"
    python = python_with(directory, ["verifiers==0.4.0"], ["verifiers.v1"])
    packages = Path(packages_of(python))
    shutil.copy(TASKSET, packages)
    alone = "import verifiers.v1 as vf\nfrom verifiers_sums import *\n"
    (packages / "vf_two.py").write_text(
        f"{alone}class Two(vf.SingleAgentEnv): ...\n__all__ = ['Sums', 'Two']\n"
    )
    (packages / "vf_boxed.py").write_text(
        f"{alone}import verifiers_sums\nverifiers_sums.SumTask.NEEDS_CONTAINER = True\n__all__ = ['Sums']\n"
    )
    return python


def test_the_library_scores_and_stops_the_episode(python: Path) -> None:
    unknown = Answer(text="", tool_calls=(ToolCall(id="1", name="sub", arguments="{a"),))
    # The task's own stop condition refuses the turn after this one.
    stop = Answer(text="stop", tool_calls=unknown.tool_calls)
    scripts = {"right": ["7"], "wrong": [unknown, "8"], "cut": [unknown], "stopped": [stop, "7"], "late": []}
    talks = {name: ScriptedTalk(script) for name, script in scripts.items()}
    talks["cut"], talks["late"] = ScriptedTalk([unknown], max_turns=1), ScriptedTalk([], max_turns=0)
    games = [(talk, {"task": TASK, "answer": "7"}, 0) for talk in talks.values()]
    faulty = [
        (ScriptedTalk(["boom"]), {"task": TASK}, 0),
        (ScriptedTalk([]), {"task": TASK | {"a": -1}}, 0),
        (ScriptedTalk([]), {"task": TASK | {"a": "x"}}, 0),
    ]
    uses = "verifiers:verifiers_sums"
    *outcomes, raised, unprepared, unread = asyncio.run(
        played(uses, *games, *faulty, faults=True, python=python)
    )
    assert [(one.reward, one.finish_reason) for one in outcomes] == [
        (2.0, "stop"), (0.0, "stop"), (0.0, "turns"), (0.0, "stop"), (None, "turns")
    ]  # fmt: skip
    assert outcomes[0].parts == {"right": 2.0, "long": 0.0}
    assert outcomes[0].metrics == {"turns": 1.0, "tool_calls": 0.0}
    system, user = talks["right"].shown[0]
    assert (system["role"], system["content"]) == ("system", "Answer with a number.")
    assert (user["role"], user["content"]) == ("user", "2 + 5?")
    assert last(talks["wrong"].shown[1]) == "error: there is no tool sub; the tools are none"
    assert len(talks["stopped"].shown) == 1, "the second turn was refused"
    assert "verifiers_sums failed: TaskError: " in str(raised) and "ValueError: boom" in str(raised)
    assert "verifiers_sums failed: TaskError: task setup: OSError: no table" in str(unprepared)
    assert "validation error for SumData" in str(unread)


def test_tools_have_the_state_of_the_episode_and_interceptors_act(python: Path) -> None:
    script = [called("add", a=2, b=5), called("add", a=1000, b=5), called("add", a="x"), "7"]
    outcome, talk = play(
        'verifiers:verifiers_sums?task={"with_tools":true}', script, {"task": TASK}, python=python
    )
    seen = [last(shown) for shown in talk.shown[1:]]
    assert seen[:2] == ["7, and the task is 2 + 5", "too big"] and "valid integer" in seen[2]
    assert outcome.reward == 2.0 - 0.5 and outcome.metrics == {"turns": 4.0, "tool_calls": 1.0}
    [tool] = talk.tools[0]
    assert tool["function"]["name"] == "add" and tool["function"]["parameters"]["required"] == ["a", "b"]


def test_rows_of_a_taskset_are_played(python: Path) -> None:
    status, said = dataset(
        "verifiers:verifiers_sums?count=3", "--size", "2", "--seed", "1", "--python", python
    )
    rows = [json.loads(line) for line in said.splitlines()]
    assert status == 0 and len(rows) == 2 and [row["task"]["a"] for row in rows] != [0, 1], said
    assert [row["prompt"][1]["content"] for row in rows] == [f"{row['task']['a']} + 5?" for row in rows]
    talks = [ScriptedTalk([str(row["task"]["a"] + 5)]) for row in rows]
    games = [(talk, row | {"prompt": "unused"}, 0) for talk, row in zip(talks, rows, strict=True)]
    outcomes = asyncio.run(played("verifiers:verifiers_sums", *games, python=python))
    assert [one.reward for one in outcomes] == [2.0, 2.0]
    assert [talk.shown[0] for talk in talks] == [row["prompt"] for row in rows]
    status, said = dataset("verifiers:no_such_tasks", "--python", python)
    assert status == 2 and "taskset 'no_such_tasks' not found" in said and "Traceback" not in said


def test_what_is_not_played_is_refused_at_the_start(python: Path) -> None:
    remote = 'task={"with_tools":true,"tools":{"runtime":{"type":"prime"}}}'
    says = {
        "verifiers_sums?cout=3": "cout",
        "no_such_tasks": "taskset 'no_such_tasks' not found",
        "vf_two": "has an environment of its own, Two; allowed are",
        f"verifiers_sums?{remote}": "its Calculator runs in prime; allowed are",
        "vf_boxed": "SumTask needs a container; allowed are",
    }
    done = subprocess.run(
        [str(python), "-c", REFUSED, *says], capture_output=True, text=True, timeout=200, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == len(says)
    for text, expected in zip(found, says.values(), strict=True):
        assert expected in text, text


def dataset(*arguments: object) -> tuple[int, str]:
    command = [sys.executable, "-m", "asyncrl.cli.main", "dataset", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=ROOT)
    return done.returncode, done.stdout + done.stderr
