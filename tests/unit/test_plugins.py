"""One loader for rewards, hooks and functions of the algorithm: a file is one module, whoever names it."""

import os
import pickle
import random
import sys

import pytest

from asyncrl.batch.hooks import Hooks
from asyncrl.config import registry
from asyncrl.config.base import Choice
from asyncrl.errors import ConfigError, RewardError
from asyncrl.plugins import load
from asyncrl.rewards.forms import load_function

SOURCE = """
from __future__ import annotations
from dataclasses import dataclass
from neighbour_of_plugin import START

seen = [START]

@dataclass
class Counting:
    seen_before: int = 0

    def after_step(self, step):
        return {"seen": len(seen)}

def reward(prompt, response):
    seen.append(response)
    return 1.0

def advantage(rewards):
    return seen
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    (tmp_path / "neighbour_of_plugin.py").write_text("START = 7\n")
    path = tmp_path / "plugin_of_mine.py"
    path.write_text(SOURCE)
    yield path
    for name in set(sys.modules) - before:
        if "plugin" in name or str(tmp_path) in name:
            del sys.modules[name]


def test_a_file_with_a_reward_a_hook_and_an_advantage_is_run_once(file, monkeypatch):
    hooks = Hooks.load([Choice(name=f"{file}:Counting")])
    load_function(f"{file}:reward")("p", "r")
    assert hooks.after_step(None) == {"hook/seen": 2.0}
    assert registry.resolve("advantage", f"{file}:advantage", {})(None) == [7, "r"]
    monkeypatch.chdir(file.parent)
    assert load("plugin_of_mine.py:reward") is load("plugin_of_mine:reward") is load(f"{file}:reward")


def test_a_file_is_run_again_after_an_edit(file):
    first = load(f"{file}:advantage")
    file.write_text(f"{SOURCE}\ndef second(rewards):\n    return 2\n")
    os.utime(file, ns=(0, 1))
    assert load(f"{file}:second")(None) == 2
    assert load(f"{file}:second") is load("plugin_of_mine:second") and load(f"{file}:advantage") is not first


def test_what_a_file_defines_can_be_pickled(file):
    counting = load(f"{file}:Counting")
    assert pickle.loads(pickle.dumps(counting(3))) == counting(3)


def test_files_of_one_name_are_two_modules_and_none_replaces_a_library(file):
    other = file.parent / "other"
    other.mkdir()
    sys.modules.pop("colorsys", None)
    for name in ("plugin_of_mine", "random", "colorsys"):
        (other / f"{name}.py").write_text("def reward(prompt, response):\n    return 2.0\n")
    load(f"{file}:reward")
    for name in ("plugin_of_mine", "random", "colorsys"):
        assert load(f"{other}/{name}.py:reward")("p", "r") == 2.0
    assert load(f"{file}:reward")("p", "r") == 1.0
    assert sys.modules["random"] is random
    from colorsys import rgb_to_hsv

    assert rgb_to_hsv(0, 0, 0) == (0, 0, 0)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("x = 1 / 0", r"raised ZeroDivisionError: division by zero \(.*broken_plugin\.py:1\)"),
        ("import sys\nsys.exit()", r"raised SystemExit:  \(.*broken_plugin\.py:2\)"),
        ("class E(Exception):\n  __str__ = None\nraise E", r"raised E, which has no text \(.*:3\)"),
        ("def f(:", r"raised SyntaxError: .*broken_plugin\.py, line 1"),
        (
            "import no_such_neighbour",
            "No module named 'no_such_neighbour'; it must be installed or lie under",
        ),
        ("f = 3", r"has no function `f`, only a value of type int; it has \[\]"),
        ("def g(): ...", r"has no function `f`; it has \['g'\]"),
        (None, r"broken_plugin\.py does not exist \(looked from "),
    ],
)
def test_what_cannot_be_loaded_is_said_alike_to_everybody_and_tried_again(file, source, said):
    broken = file.parent / "broken_plugin.py"
    if source is not None:
        broken.write_text(source)
    for attempt in (
        lambda: load_function(f"{broken}:f"),
        lambda: registry.resolve("kl", f"{broken}:f", {}),
        lambda: Hooks.load([Choice(name=f"{broken}:f")]),
    ):
        with pytest.raises((RewardError, ConfigError), match=said):
            attempt()
    if source != "f = 3" and source != "def g(): ...":
        broken.write_text("def f(): ...")
        assert callable(load(f"{broken}:f"))
