"""The Python interface, up to the process that it starts: tests/integration/test_api.py starts one."""

import ast
import datetime
import functools
import importlib
import inspect
import subprocess
import sys
import threading
import time
from decimal import Decimal
from enum import Enum, IntEnum
from pathlib import Path

import numpy as np
import pytest
import yaml
from datasets import Dataset

import asyncrl
from asyncrl import api
from asyncrl.config.data_section import EvalSet
from asyncrl.config.load import load_config, read_draft
from asyncrl.config.resolved import eval_digest
from asyncrl.config.schema import Config
from asyncrl.data.dataset import load_rows
from asyncrl.errors import CodeChanged
from asyncrl.rewards import builtin
from asyncrl.run.directory import RunDirectory
from asyncrl.run.given import importable, write_reward, write_rows
from asyncrl.run.starts import unchanged
from asyncrl.telemetry.jsonl import Lines
from asyncrl.telemetry.status import write_status
from tests.support.telemetry_records import snapshot

LEAST = {"model": {"path": "m"}, "data": {"train": "d"}, "run": {"name": "a"}}


def reward_here(prompt, response, **row):
    return 1.0


def test_importing_the_package_loads_nothing_heavy():
    check = (
        "import sys, asyncrl; sys.exit(any(name in sys.modules for name in ('torch', 'yaml', 'pydantic', "
        "'redis')))"
    )
    assert subprocess.run([sys.executable, "-c", check], timeout=60, check=False).returncode == 0


def test_the_public_names_are_few_and_each_says_what_it_is():
    imports = [
        one for one in ast.walk(ast.parse(inspect.getsource(asyncrl))) if isinstance(one, ast.ImportFrom)
    ]
    seen_by_tools = {one.names[0].asname: one.module for one in imports if one.names[0].asname}
    assert seen_by_tools == asyncrl._MODULES | {"__version__": "asyncrl.version"}
    assert len(asyncrl.__all__) <= 40
    for name in asyncrl.__all__:
        public = getattr(asyncrl, name)
        assert public.__module__ == asyncrl._MODULES[name] and len(public.__doc__.split()) > 1, name
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = asyncrl.trian


def test_a_dictionary_becomes_the_file_that_says_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("b.yaml").touch()
    reward = {"functions": [{"function": builtin.gsm8k}, {"function": builtin.exact_match, "weight": 2}]}
    path = api._as_file(
        {
            "run": {"name": "a", "root": Path("x/y")},
            "reward": reward,
            "extends": ["b.yaml", "algorithms/dapo.yaml"],
        },
        tmp_path,
    )
    assert yaml.safe_load(path.read_text()) == {
        "run": {"name": "a", "root": "x/y"},
        "reward": {
            "functions": [
                {"function": "asyncrl.rewards.builtin:gsm8k"},
                {"function": "asyncrl.rewards.builtin:exact_match", "weight": 2},
            ]
        },
        "extends": [str(tmp_path / "b.yaml"), "algorithms/dapo.yaml"],
    }


class Text(str, Enum):  # noqa: UP042 - `str` of it is not its text
    SMALL = "small"


class Number(IntEnum):
    TWO = 2


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("1e5", "1e5"), ("0o17", "0o17"), ("yes", "yes"), ("...", "..."), ("a: b", "a: b"),
        ("\U0001f44d+", "\U0001f44d+"), ("a\u2028b\x85", "a\u2028b\x85"), ("two\nlines", "two\nlines"), ("", ""),
        (np.float64(1e-6), 1e-6), (np.int64(3), 3), ([np.float32(0.5), None], [0.5, None]),
        (Text.SMALL, "small"), ([Number.TWO], [2]), ({Text.SMALL: True}, {"small": True}), (datetime.date(2026, 1, 2), "2026-01-02"),
    ],
)  # fmt: skip
def test_values_of_python_reach_the_run_as_they_are(given, read, tmp_path):
    path = api._as_file({"reward": {"functions": [{"function": "regex", "params": {"x": given}}]}}, tmp_path)
    [override] = api._given(RunDirectory(tmp_path), None, None, {"function": "regex", "params": {"x": given}})
    for overrides in ([], [override]):
        draft = read_draft(Config, path, overrides)
        assert draft.root.plain()["reward"]["functions"] == [{"function": "regex", "params": {"x": read}}]


@pytest.mark.parametrize("value", [{1, 2}, Decimal("0.5"), object(), b"x", 1j])
def test_a_value_that_yaml_lacks_is_refused_with_its_key(value, tmp_path):
    with pytest.raises(asyncrl.ConfigError, match=r"^config\.model\.path: found .*convert it$"):
        api._as_file({"model": {"path": [value]}}, tmp_path)


def test_a_model_may_be_a_member_of_an_enumeration(tmp_path):
    assert api._given(RunDirectory(tmp_path), Text.SMALL, Text.SMALL, None) == [
        "model.path=small",
        "data.train=small",
    ]


@functools.wraps(reward_here)
def wrapped(prompt, response, **row):
    return 2.0 * reward_here(prompt, response)


@pytest.mark.parametrize("function", [lambda prompt, response: 1.0, Path("a").exists, wrapped])
def test_a_function_that_no_other_process_finds_is_refused(function, tmp_path):
    with pytest.raises(asyncrl.ConfigError, match="give a reward as `reward=`, or write the function into"):
        api._as_file({"reward": {"functions": [{"function": function}]}}, tmp_path)


def closure(weight):
    def scaled(prompt, response, answer):
        return weight * (response == answer)

    return scaled


class Scaled:
    def __call__(self, prompt, response, answer):
        return 2.0 * (response == answer)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda prompt, response, answer: 2.0 * (response == answer), "reward"),
        (closure(2.0), "scaled"),
        (Scaled(), "reward"),
        (functools.partial(closure(2.0)), "reward"),
    ],
)
def test_a_reward_of_this_process_is_the_same_in_one_that_has_never_seen_it(function, name, tmp_path):
    given = write_reward(function, RunDirectory(tmp_path / "run"))
    program = "import sys; from asyncrl.plugins import load; print([load(sys.argv[1])('', *a) for a in ('ab', 'aa')])"
    command = [sys.executable, "-c", program, given]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "[0.0, 2.0]\n", done.stderr
    assert given.rpartition(":")[2] == name


@pytest.mark.parametrize(
    ("place", "names"),
    [
        ("work", ("alone:score", "bare.inner:score", "whole.inner:score")),
        ("elsewhere", ("{}/alone.py:score", None, None)),
    ],
)
def test_a_reward_next_to_a_script_is_named_as_other_processes_find_it(place, names, tmp_path, monkeypatch):
    """A module, one of a package, and one of a package without `__init__.py`."""
    files, work = tmp_path / place, tmp_path / "work"
    for name in ("alone.py", "bare/inner.py", "whole/__init__.py", "whole/inner.py"):
        (files / name).parent.mkdir(parents=True, exist_ok=True)
        (files / name).write_text("def score(prompt, response): return 2.0")
    work.mkdir(exist_ok=True)
    monkeypatch.chdir(work)
    monkeypatch.syspath_prepend(files)
    for module, expected in zip(("alone", "bare.inner", "whole.inner"), names, strict=True):
        function = importlib.import_module(module).score
        named = importable(function)
        assert named == (expected and expected.format(files))
        given = named or write_reward(function, RunDirectory(tmp_path / "run"))
        command = [
            sys.executable,
            "-P",
            "-c",
            f"from asyncrl.plugins import load; print(load({given!r})('', ''))",
        ]
        assert (
            subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout == "2.0\n"
        )
    for module in ("alone", "bare.inner", "bare", "whole.inner", "whole"):
        del sys.modules[module]


def test_a_changed_reward_is_another_file_and_a_file_that_changes_is_found(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    once, again, other = (write_reward(closure(weight), directory) for weight in (1.0, 1.0, 2.0))
    assert once == again != other and (directory.given.stat().st_mode & 0o777) == 0o700
    configs = [
        Config.model_validate({**LEAST, "reward": {"functions": [{"function": one}]}})
        for one in (once, other, "boxed")
    ]
    # The name of a function is that of its evaluation, as for one of a user's file.
    digests = [eval_digest(config, EvalSet(path="held-out.jsonl")) for config in configs]
    assert digests[0] == digests[1] != digests[2]
    require = unchanged(configs[0])
    require()
    Path(once.rpartition(":")[0]).write_text("def scaled(prompt, response, answer): return 0.0")
    with pytest.raises(CodeChanged, match=r"reward-\w+.py changed while this generator runs"):
        require()


def test_rows_are_read_back_as_they_were_given(tmp_path):
    rows = [
        {"prompt": "é\u2028", "n": 1, "x": [1.5, None], "m": {"a": True}},
        {"prompt": "b", "n": 2, "x": [], "m": {}},
    ]
    arrays = [{**row, "n": np.int64(row["n"]), "x": np.array(row["x"], dtype=float)} for row in rows[1:]]
    for given, expected in (
        (rows, rows),
        (iter(rows), rows),
        (Dataset.from_list(rows[1:]), rows[1:]),
        (arrays, rows[1:]),
    ):
        file = write_rows(given, RunDirectory(tmp_path / "run"))
        read = list(load_rows(str(file)))
        assert [{key: value for key, value in row.items() if value != {}} for row in read] == [
            {key: value for key, value in row.items() if value != {}} for row in expected
        ]


def test_messages_of_a_data_set_have_no_nulls_as_from_its_parquet_file(tmp_path):
    def call(name, **arguments):
        return [{"role": "assistant", "content": "", "tool_calls": [{"name": name, "arguments": arguments}]}]

    rows = [{"prompt": call("add", a=1), "note": None}, {"prompt": call("look", place="attic"), "note": "x"}]
    given = Dataset.from_list(rows)
    given.to_parquet(tmp_path / "rows.parquet")
    file = write_rows(given, RunDirectory(tmp_path / "run"))
    assert list(load_rows(str(file))) == list(load_rows(str(tmp_path / "rows.parquet"))) == rows


LOCK = threading.Lock()


def locked(prompt, response):
    with LOCK:
        return 1.0


class Main:
    pass


locked.__module__ = Main.__module__ = "__main__"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data": [{"prompt": "a"}, 1]}, "row 2 is int `1`; a row is a dict"),
        ({"data": {"prompt": ["a"]}}, r"row 1 is str `prompt`.*to_dict\('records'\)"),
        ({"data": [{"prompt": "a", "x": {1}}]}, "row 1 has set `.1.` in column `x`; JSON holds"),
        ({"reward": 3}, "found int `3`; give a function"),
        ({"reward": Main}, "found type .*of a class give an object"),
        ({"reward": lambda x: 1.0}, r"`reward` takes \(x\); allowed is \(prompt, response"),
        (
            {"reward": locked},
            r"`locked` \(it uses `LOCK`\) cannot be pickled .*_thread.lock.*within the function",
        ),
        ({"reward": lambda prompt, response, lock=LOCK: 1.0}, "`reward` cannot be pickled .*_thread.lock"),
    ],
)
def test_what_cannot_be_given_is_said_before_anything_starts(given, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(asyncrl.ConfigError, match=f"(?s){message}"):
        asyncrl.start(**given)
    assert not list(tmp_path.rglob("*.yaml"))


def test_fresh_keeps_what_the_config_names_and_removes_what_an_earlier_start_gave(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    old, new = (write_reward(closure(weight), directory) for weight in (1.0, 2.0))
    # Left by a start that found a mistake.
    directory.require_run()
    directory.create(fresh=True, config=f"reward: {{functions: [{new}]}}")
    assert [Path(name.rpartition(":")[0]).exists() for name in (old, new)] == [False, True]


def test_each_step_since_the_start_is_reported_once_in_order_and_none_is_lost_by_an_error(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.create(fresh=False)
    lines = Lines(directory.metrics / "learner.jsonl")
    lines.write([{"step": 1, "time": time.time() - 60, "time/step": 1.0, "reward/mean": 0.1}])
    run, seen = api.Run(directory), []
    now_s = time.time() - 3600  # the clock was set back
    lines.write(
        [
            {"step": step, "time": now_s, "time/step": 1.0, "reward/mean": step / 10}
            for step in (2, 3, 2, 3, 4)
        ]
    )
    lines.write(
        [{"step": 4, "time": now_s, "time/checkpoint": 1.0}, {"step": 0, "time": now_s, "eval/accuracy": 1.0}]
    )

    def see(step, metrics):
        seen.append((step, metrics["reward/mean"]))
        if step == 3:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run.wait(on_step=see)
    run.wait(on_step=see)
    run.wait(on_step=see)
    assert seen == [(2, 0.2), (3, 0.3), (4, 0.4)]


@pytest.mark.parametrize(
    ("state", "stopping", "fails"),
    [
        *(("training", False, True), ("training", True, False), ("failed", True, True)),
        *(("stopped", False, False), (None, False, True), (None, True, False)),
    ],
)
def test_a_run_without_a_last_state_has_failed_unless_it_was_to_stop(state, stopping, fails, tmp_path):
    """Its supervisor was killed, so its lock is free; a stop is killed if it takes too long.

    A learner that could not load has written no state.
    """
    directory = RunDirectory(tmp_path)
    directory.create(fresh=False)
    directory.supervisor_lock.touch()
    if state:
        write_status(directory.status, snapshot(state=state, step=4))
    if stopping:
        directory.stopping.touch()
    if fails:
        with pytest.raises(asyncrl.RunError, match="the run failed; see its logs"):
            api.Run(directory).wait()
    else:
        ended = api.Result(directory=directory.path, is_finished=False, step=4 if state else 0)
        assert api.Run(directory).wait() == ended


def test_a_mistake_is_told_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(asyncrl.ConfigError, match="model: found nothing; it is needed"):
        asyncrl.start({"run": {"name": "a"}})
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_not_there_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(asyncrl.RunError, match="no run found at runs"):
        asyncrl.open()


def test_a_run_is_found_after_the_working_directory_has_changed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory = RunDirectory(Path("runs/a"))
    directory.create(fresh=False)
    run = api.Run(directory)
    monkeypatch.chdir("/")
    Lines(tmp_path / directory.metrics / "learner.jsonl").write(
        [{"step": 1, "time": 1.0, "reward/mean": 0.5}]
    )
    assert run.metrics()[1]["reward/mean"] == 0.5 and run.directory == tmp_path / "runs/a"


def test_metrics_are_in_the_order_of_their_steps(tmp_path):
    """An evaluation is logged after later steps."""
    directory = RunDirectory(tmp_path)
    directory.create(fresh=False)
    steps = [{"step": step, "time": 1.0, "reward/mean": 0.5} for step in (1, 2)]
    Lines(directory.metrics / "learner.jsonl").write([*steps, {"step": 0, "eval/accuracy": 0.5}])
    assert list(api.Run(directory).metrics()) == [0, 1, 2]


# What the command does in place of a supervisor, with the run's lock as LOCK.
FAILS = "print('the port is taken'); sys.exit(2)"
IS_KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
IS_STARTING = "print('a warning', flush=True)\nwith RunLock(LOCK): signal.pause()"


def started(tmp_path, monkeypatch, program, **sections):
    """Start a run whose supervisor is this program."""
    directory = RunDirectory(tmp_path / "runs" / "a")
    begin = "import os, signal, sys; from pathlib import Path; from asyncrl.run.lock import RunLock\n"
    code = (
        f"{begin}LOCK = Path({str(directory.supervisor_lock)!r})\nLOCK.parent.mkdir(parents=True)\n{program}"
    )
    monkeypatch.setattr(api, "module_argv", lambda *arguments: [sys.executable, "-c", code])
    monkeypatch.setattr(
        api, "validated_config", lambda path, overrides, **options: load_config(path, overrides)
    )
    run = {"name": "a", "root": tmp_path / "runs"}
    return api.start({**LEAST, "run": run, "reward": {"functions": ["math"]}, **sections})


def test_a_supervisor_that_cannot_start_is_an_error_with_the_end_of_its_output(tmp_path, monkeypatch):
    with pytest.raises(asyncrl.RunError, match="the port is taken"):
        started(tmp_path / "a", monkeypatch, FAILS)
    with pytest.raises(asyncrl.RunError, match="ended with status -9 and no output"):
        started(tmp_path / "b", monkeypatch, IS_KILLED)


def test_a_run_that_is_still_starting_is_stopped(tmp_path, monkeypatch):
    run = started(tmp_path, monkeypatch, IS_STARTING)
    assert run.is_up
    assert run.stop() == api.Result(directory=run.directory, is_finished=False, step=0)
    assert not run.is_up


def test_a_run_that_is_up_is_not_started_a_second_time(tmp_path, monkeypatch):
    run = started(tmp_path, monkeypatch, IS_STARTING)
    monkeypatch.setattr(api, "_Process", None)
    with pytest.raises(asyncrl.RunError, match=f"{run.directory} is up; `asyncrl.open`"):
        api.start(
            {**LEAST, "run": {"name": "a", "root": tmp_path / "runs"}, "reward": {"functions": ["math"]}}
        )
    assert run.is_up
    run.stop()


@pytest.mark.parametrize(("kind", "job"), [("kubernetes", ""), ("slurm", ""), ("slurm", "7")])
def test_a_run_that_only_begins_later_is_not_started(kind, job, tmp_path, monkeypatch):
    """In a job of Slurm `asyncrl up` waits for its end, and elsewhere it has gone once the job is submitted."""
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.chdir(tmp_path)
    sections = {"cluster": {"kind": kind}, "generator": {"count": 1}}
    if job:
        started(tmp_path, monkeypatch, IS_STARTING, **sections).stop()
    else:
        with pytest.raises(asyncrl.ConfigError, match=f"cluster.kind: found {kind}, .*; call `asyncrl up`"):
            started(tmp_path, monkeypatch, IS_STARTING, **sections)
