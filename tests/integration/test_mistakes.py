"""A user's mistakes on the real command line: a message that says what to do, status 2, no traceback."""

import json
import logging
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from asyncrl.cli.main import main
from tests.support import mistakes
from tests.support.command import ASYNCRL
from tests.support.model_faults import FAULTS
from tests.support.models import tiny_qwen2

pytestmark = pytest.mark.integration


@pytest.fixture
def values(tmp_path: Path) -> dict:
    tiny_qwen2(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    return {
        "run": {"name": "wrong", "root": str(tmp_path / "runs")},
        "model": {"path": str(tmp_path / "model"), "dtype": "float32"},
        "data": {"train": str(tmp_path / "train.jsonl")},
        "reward": {"functions": [{"function": "arithmetic"}]},
        "sampling": {"max_prompt_tokens": 8, "max_response_tokens": 8},
        "learner": {"device": "cpu"},
    }


def refuse(tmp_path: Path, values: dict, *overrides: str, timeout_s: float = 240.0) -> str:
    """What `asyncrl up` says; it must not start."""
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(values))
    command = [*ASYNCRL, "up", "--plain", "--config", str(config), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_unknown_key_with_a_suggestion(tmp_path, values):
    said = refuse(tmp_path, values | {"batch": {"grups": 4}})
    assert "run.yaml" in said and "grups" in said and "groups" in said


def test_all_mistakes_at_once(tmp_path, values):
    said = refuse(
        tmp_path, values | {"batch": {"group_size": "many"}, "staleness": {"max_lag": -1}}, "learner.stepz=3"
    )
    assert all(word in said for word in ("group_size", "max_lag", "stepz"))


def test_missing_data_file(tmp_path, values):
    assert "nowhere.jsonl" in refuse(tmp_path, values | {"data": {"train": str(tmp_path / "nowhere.jsonl")}})


def test_missing_model(tmp_path, values):
    assert "no-model" in refuse(tmp_path, values, f"model.path={tmp_path}/no-model")


def test_malformed_data_line_with_its_number(tmp_path, values):
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": 1+1=}\n')
    said = refuse(tmp_path, values)
    assert "train.jsonl" in said and "2" in said


def test_reward_function_that_is_not_there(tmp_path, values):
    said = refuse(tmp_path, values | {"reward": {"functions": [{"function": f"{tmp_path}/none.py:reward"}]}})
    assert "none.py" in said


def test_tokens_beyond_the_models_length(tmp_path, values):
    said = refuse(
        tmp_path, values, "sampling.max_response_tokens=5000", "learner.tokens_per_microbatch=20000"
    )
    assert "512" in said


def test_group_of_one_with_grpo(tmp_path, values):
    assert "group_size" in refuse(tmp_path, values | {"batch": {"group_size": 1}})


def test_truncating_sampler(tmp_path, values):
    assert "top_p" in refuse(tmp_path, values, "sampling.top_p=0.9")


def test_a_store_that_is_not_there(tmp_path, values):
    assert "unix:///nowhere.sock" in refuse(tmp_path, values, "store.url=unix:///nowhere.sock")


def test_an_address_of_another_host(tmp_path, values):
    said = refuse(tmp_path, values, "control.bind=tcp://192.0.2.1:5555")
    assert "control.bind is tcp://192.0.2.1:5555" in said and "`ip address` lists them" in said
    assert not (tmp_path / "runs").exists(), "nothing has begun"


# A cure, in the words of our messages; `allowed` alone names what to write.
WAY_OUT = re.compile(
    r"(?:; |: |, or |\(|, |and )(?:set|give|drop|add|write|correct|use|remove|install|delete|lower|raise|choose|copy|"
    r"download|merge|rename|run|save|name|convert|swap|take|put|indent|check|shorten|leave|begin|fill|read|return|did you mean|"
    r"allowed (?:is|are)|known are|it must be)\b|did you mean|in quotes"
)


def verdict(status: int, said: str, named: tuple[str, ...]) -> str:
    """How a mistake was answered: the place and what was found must be named, and a way out."""
    if "Traceback" in said or status not in (0, 2):
        return "traceback"
    if status == 0 and "! " not in said:
        return "silent"
    return "clear" if WAY_OUT.search(said) and all(words in said for words in named) else "weak"


@pytest.fixture
def validated(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Type `asyncrl validate task.yaml ...` in a directory; the verdict and what was said."""
    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    # A thread of an earlier test logs to the output of that test, which is closed, and then to standard error.
    monkeypatch.setattr(logging, "raiseExceptions", False)

    def judge(directory: Path, overrides: tuple[str, ...], named: tuple[str, ...]) -> tuple[str, str]:
        monkeypatch.chdir(directory)
        monkeypatch.setattr(sys, "argv", ["asyncrl", "validate", "task.yaml", *overrides])
        status: object = 0
        try:
            main()
        except SystemExit as left:
            status = left.code or 0
        captured = capsys.readouterr()
        said = captured.out + captured.err
        return verdict(int(str(status)), said, named), said

    yield judge
    signal.signal(signal.SIGINT, handler)


def test_a_project_without_mistakes_is_fine(tmp_path, validated):
    mistakes.project(tmp_path)
    assert validated(tmp_path, (), ())[1] == "task.yaml: fine\n"


@pytest.fixture(scope="module")
def total() -> Iterator[Counter[str]]:
    found: Counter[str] = Counter()
    yield found
    sys.stdout.write(f"all: {found.total()} mistakes, {dict(found)}\n")


@pytest.mark.parametrize("kind", [*mistakes.SLIPS, "model"])
def test_planted_mistakes_are_named_with_a_way_out(kind, tmp_path, validated, total):
    """At least 95 % clearly, and none is passed over in silence."""
    found = {}
    for number, name in enumerate(FAULTS if kind == "model" else mistakes.SLIPS[kind]):
        directory = tmp_path / str(number)
        directory.mkdir()
        mistakes.project(directory)
        if kind == "model":
            damage, named = FAULTS[name]
            damage(directory / "model")
            overrides: tuple[str, ...] = ()
        else:
            slip = mistakes.SLIPS[kind][name]
            named, overrides = slip.named, slip.overrides
            for file, text in slip.files.items():
                (directory / file).write_text(text)
        found[name] = validated(directory, overrides, named)
    counts = Counter(said for said, _ in found.values())
    total.update(counts)

    others = "\n".join(f"{name}: {said}: {text}" for name, (said, text) in found.items() if said != "clear")
    sys.stdout.write(f"{kind}: {len(found)} mistakes, {dict(counts)}\n{others}\n")
    assert counts["clear"] >= 0.95 * len(found) and not counts["silent"] + counts["traceback"], others


def test_there_are_enough_of_them():
    """Without those of the command line, which `test_command_line` has."""
    assert sum(map(len, mistakes.SLIPS.values())) + len(FAULTS) >= 380
