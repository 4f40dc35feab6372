"""`asyncrl environment test` on the files of the guide, and on environments that are wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.sandbox.box import Box
from tests.support.machine import skip_for
from tests.support.pages import ROOT, files
from tests.support.waiting import HANG

pytestmark = pytest.mark.integration

ASYNCRL = [sys.executable, "-m", "asyncrl.cli.main"]


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("project")
    for name, content in files(ROOT / "docs" / "own-environment.md").items():
        (directory / name).write_text(content)
    return directory


def environment_test(project: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [*ASYNCRL, "environment", "test", *arguments],
        cwd=project, capture_output=True, text=True, timeout=200, check=False,
        env=os.environ | {"COLUMNS": "200", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["game.py:Guess", "--answer", "x"], ["a text environment, takes columns seed", "user | Guess a number below 32.", "model | x", "Answer with a number only.", "ended with `turns`, reward 0"]),
        (["calculator.py", "--prompt", "2*3?"], ["tools without a state", '"required": ["a", "b"]', 'model | multiply({"a": 1, "b": 1})', "tool | 1", "ended with `stop`, no reward"]),
        (["shelf.py", "--row", '{"title": "Upper"}'], ["an object with tools, takes columns title", "tool | Upper: text", "ended with `stop`, reward 0.333333"]),
        (["twice.py", "--prompt", "2*3?", "--answer", "6"], ["a rollout, takes columns prompt", "user | Check your answer", "ended with `stop`, reward 2"]),
    ],
)  # fmt: skip
def test_the_environments_of_the_guide_are_played_turn_by_turn(project, arguments, says):
    status, said = environment_test(project, *arguments)
    assert status == 0 and all(text in said for text in says), said


@skip_for(Box()._view.problem())
def test_the_built_in_tool_is_tried_by_its_name(project):
    status, said = environment_test(project, "python", "--prompt", "2*3?")
    assert status == 0 and 'model | python({"code": "text"})' in said and "NameError" in said, said


WRONG = """
import os

class Chance:
    def reset(self): return os.urandom(8).hex()
    def step(self, response): return "", 1.0, True

class Late:
    def reset(self): HANG
    def step(self, response): return "", 1.0, True

class Untyped:
    def reset(self): pass
    def put(self, name): pass
""".replace("HANG", HANG)


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["wrong.py:Chance"], 1, "begin differently with the same seed"),
        (["wrong.py:Late", "--step-s", "0.5"], 1, "`reset`: took longer than 0.5 s and was killed"),
        (["wrong.py:Untyped"], 1, "wrong.py:14: tool `put`: argument `name` has no type"),
        (["wrong.py:Nothing"], 1, "has no function `Nothing`; it has ['Chance', 'Late', 'Untyped']"),
        (["wrong.py"], 2, "has the classes ['Chance', 'Late', 'Untyped']"),
        (["nowhere.py"], 2, "name a Python file as FILE or FILE:NAME"),
        (["wrong.py:Chance", "--row", "[1]"], 2, "a JSON object is allowed"),
    ],
)
def test_what_is_wrong_is_named(project, arguments, status, says):
    (project / "wrong.py").write_text(WRONG)
    found, said = environment_test(project, *arguments)
    assert found == status and says in said, said
