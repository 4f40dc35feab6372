"""The lists of tests/groups.toml: what they name exists, and a group is due when one of its sources changes."""

import ast
import fnmatch
import shutil
import subprocess
import sys

import pytest

from tests.support import groups
from tests.support.groups import GROUPS, PATTERNS, ROOT, files_of, hash_of, is_listed, marks_of, matches
from tests.support.machine import skip_for

PAIRS = [(name, pattern.removeprefix("!")) for name, patterns in PATTERNS.items() for pattern in patterns]


@pytest.mark.parametrize(("name", "pattern"), PAIRS)
def test_a_pattern_names_functions_that_exist(name, pattern):
    """Whoever collects whole directories finds parameters that do not exist, too."""
    file, *classes, function = pattern.split("::") if "::" in pattern else (pattern, "")
    found = [path for path in ROOT.glob(file.partition("[")[0]) if path.is_file()]
    assert found or "*" in file, f"{name}: no file {file}"
    if classes:  # its tests may be those of a contract
        found += ROOT.glob("tests/support/*_contract.py")
    names = {
        node.name
        for path in found
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert not function or fnmatch.filter(names, function.partition("[")[0]), f"{name}: {pattern}"


@pytest.mark.parametrize("name", GROUPS)
def test_every_source_of_a_group_exists(name):
    assert GROUPS[name].keys() == {"tests", "sources"}
    assert name.isidentifier() and files_of(name)


def test_a_test_is_its_file_its_function_and_itself():
    test = "tests/a/test_b.py::test_c[x=1-y]"
    for pattern in (
        "tests/a",
        "tests/a/test_b.py",
        "tests/a/test_b.py::test_c",
        test,
        "*test_b*",
        "!tests/*-y]",
    ):
        assert matches(pattern, test), pattern
    for pattern in ("tests/a/test", "tests/a/test_b.py::test", "tests/a/test_b.py::test_c[x]", "tests/?"):
        assert not matches(pattern, test), pattern
    assert is_listed(["tests/a", "!tests/a/test_b.py", "*[x=1*"], test)
    assert not is_listed(["tests/a", "!*-y]"], test) and not is_listed([], test)


def test_what_is_in_no_list_has_no_mark():
    assert marks_of("tests/integration/test_new.py::test_it") == []
    assert marks_of("tests/integration/test_api.py::test_it") == ["first"]
    assert marks_of("tests/integration/test_vllm_runner.py::test_it") == ["triton_runner", "group"]


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """One with one group."""
    for name in ("test_a.py", "source.py", "other.py"):
        (tmp_path / name).write_text("1\n")
    monkeypatch.setattr(groups, "ROOT", tmp_path)
    monkeypatch.setattr(groups, "PASSED", tmp_path / "groups.lock")
    monkeypatch.setattr(groups, "GROUPS", {"one": {"tests": ["test_a.py::test_it"], "sources": ["so*.py"]}})
    return tmp_path


@pytest.mark.parametrize("changed", ["test_a.py", "source.py", "sources.py", "other.py"])
def test_a_group_is_due_until_it_passes_and_when_a_file_of_it_changes_comes_or_goes(repository, changed):
    assert groups.stale() == ["one"]
    groups.record("one", hash_of("one"))
    assert groups.stale() == []
    (repository / changed).write_text("2\n")
    assert groups.stale() == ([] if changed == "other.py" else ["one"])
    groups.record("one", hash_of("one"))
    (repository / changed).unlink()
    if changed in ("test_a.py", "source.py"):
        (repository / "source_2.py").write_text("1\n")
        (repository / "test_a.py").touch()
    assert groups.stale() == ([] if changed == "other.py" else ["one"])


def test_a_source_that_matches_nothing_is_named(repository):
    (repository / "source.py").unlink()
    with pytest.raises(LookupError, match=r"one: 'so\*\.py' matches no file; correct or delete it"):
        groups.stale()


TESTS = """
import pytest
def test_it(): pass
@pytest.mark.skipif({skipped}, reason="needs x (apt-get install x-utils)")
def test_other(): pass
"""


@pytest.fixture
def clone(tmp_path):
    """A directory with these lists, and what runs pytest there."""
    for name in ("tests", "tests/support"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    shutil.copy(groups.__file__, tmp_path / "tests" / "support")
    (tmp_path / "tests" / "conftest.py").write_text('pytest_plugins = ["tests.support.groups"]')
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "tests" / "groups.toml").write_text(
        'fast = []\nfirst = []\n[one]\ntests = ["tests/test_a.py::test_it", "tests/test_a.py::test_other"]\n'
        'sources = ["pytest.ini"]\n'
    )

    def run(*options):
        command = [sys.executable, "-m", "pytest", "tests", *options]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)

    return tmp_path, run


@pytest.mark.parametrize("skipped", [False, True])
def test_a_group_is_recorded_when_it_passes_as_a_whole(clone, skipped):
    directory, run = clone
    (directory / "tests" / "test_a.py").write_text(TESTS.format(skipped=skipped))
    done = run("--group", "one")
    lock = directory / "tests" / "groups.lock"
    assert (done.returncode, lock.exists()) == ((1, False) if skipped else (0, True)), done.stdout
    if skipped:
        assert "1 of 1 skipped tests run after: apt-get install x-utils" in done.stdout
        assert "one has not passed as a whole: 1 skipped" in done.stdout
    done = run("-m", "not group")
    assert "2 deselected" in done.stdout


@pytest.mark.parametrize("part", [("-k", "it"), ("tests/test_a.py",)])
def test_a_part_of_a_group_is_not_run_as_the_group(clone, part):
    directory, run = clone
    (directory / "tests" / "test_a.py").write_text(TESTS.format(skipped=False))
    assert "records a whole group" in (done := run("--group", "one", *part)).stderr, done.stdout
    assert not (directory / "tests" / "groups.lock").exists()


def test_a_pattern_that_no_test_matches_is_an_error(clone):
    directory, run = clone
    (directory / "tests" / "test_a.py").write_text("def test_another(): pass\n")
    assert "one: 'tests/test_a.py::test_it' matches no test" in (done := run()).stderr, done.stdout


@pytest.mark.parametrize("problem", [None, "", "no bwrap"])
def test_what_ci_installs_is_not_missed_in_silence(monkeypatch, problem):
    monkeypatch.delenv("ASYNCRL_CI", raising=False)
    assert skip_for(problem).args == (bool(problem),)
    name, value = "ASYNCRL_CI", "1"
    assert f"export {name}={value}\n" in (ROOT / ".ci" / "run").read_text()
    monkeypatch.setenv(name, value)
    assert skip_for(problem).args == (False,)
