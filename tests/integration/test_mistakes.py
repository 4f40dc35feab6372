"""A user's mistakes on the real command line: a message that says what to do, status 2, no traceback."""

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.command import ASYNCRL
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
