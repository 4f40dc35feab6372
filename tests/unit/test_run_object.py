"""The Python interface, up to the process that it starts: tests/integration/test_api.py starts one."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import asyncrl
from asyncrl import api
from asyncrl.rewards import builtin


def reward_here(prompt, response, **row):
    return 1.0


def test_importing_the_package_loads_nothing_heavy():
    check = (
        "import sys, asyncrl; sys.exit(any(name in sys.modules for name in ('torch', 'yaml', 'pydantic', "
        "'redis')))"
    )
    assert subprocess.run([sys.executable, "-c", check], timeout=60, check=False).returncode == 0


def test_the_public_names_are_few_and_each_says_what_it_is():
    assert len(asyncrl.__all__) <= 40 and sorted(asyncrl.__all__) == sorted(asyncrl._MODULES)
    for name in asyncrl.__all__:
        public = getattr(asyncrl, name)
        assert public.__module__ == asyncrl._MODULES[name] and len(public.__doc__.split()) > 1, name
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = asyncrl.trian


def test_a_dictionary_becomes_the_file_that_says_the_same(tmp_path):
    reward = {"functions": [{"function": builtin.gsm8k}, {"function": reward_here, "weight": 2}]}
    path = api._as_file(
        {"run": {"name": "a", "root": Path("x/y")}, "reward": reward, "extends": "b.yaml"}, tmp_path
    )
    assert yaml.safe_load(path.read_text()) == {
        "run": {"name": "a", "root": "x/y"},
        "reward": {
            "functions": [
                {"function": "asyncrl.rewards.builtin:gsm8k"},
                {"function": f"{reward_here.__module__}:reward_here", "weight": 2},
            ]
        },
        "extends": [str(Path("b.yaml").absolute())],
    }


@pytest.mark.parametrize("function", [lambda prompt, response: 1.0, Path("a").exists])
def test_a_function_that_no_other_process_finds_is_refused(function, tmp_path):
    with pytest.raises(asyncrl.ConfigError, match="write it into a file"):
        api._as_file({"reward": {"functions": [{"function": function}]}}, tmp_path)


def test_a_mistake_is_told_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(asyncrl.ConfigError, match="model: found nothing; it is needed"):
        asyncrl.start({"run": {"name": "a"}})
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_not_there_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(asyncrl.RunError, match="no run found at runs"):
        asyncrl.open()
