"""The shape of a model is read once; what was read counts as long as all that it follows from is the same."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.config.sections import LearnerConfig, ModelConfig
from asyncrl.preflight import model_shape
from asyncrl.preflight.model_shape import REMEMBERED, read_trained_shape
from tests.support.models import tiny_qwen2

LEARNER = LearnerConfig()


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelConfig:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    tiny_qwen2(tmp_path / "model")
    return ModelConfig(path=str(tmp_path / "model"))


def remembered() -> list[Path]:
    return sorted((Path.home() / REMEMBERED).glob("*.json"))


def test_it_is_read_once_for_all_that_it_follows_from(model, tmp_path, monkeypatch):
    first = read_trained_shape(model, LEARNER)
    (file,) = remembered()
    read = model_shape._read
    monkeypatch.setattr(model_shape, "_read", lambda *given: pytest.fail("read again"))
    assert read_trained_shape(model, LEARNER) == first
    moved = tmp_path / "moved"
    Path(model.path).rename(moved)
    assert read_trained_shape(model.model_copy(update={"path": str(moved)}), LEARNER) == first
    moved.rename(model.path)
    monkeypatch.setattr(model_shape, "_read", read)
    assert read_trained_shape(model, LEARNER.model_copy(update={"gradient_checkpointing": True})) != first
    assert read_trained_shape(model, None).kept_per_token is None
    config = Path(model.path) / "config.json"
    changed = json.loads(config.read_text()) | {"vocab_size": 777}
    config.write_text(json.dumps(changed))
    assert read_trained_shape(model, LEARNER).vocabulary == 777 != first.vocabulary
    assert len(remembered()) == 4 and file in remembered()


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"parameters": 1, "more": 2}'])
def test_a_damaged_file_is_written_again(model, text):
    first = read_trained_shape(model, LEARNER)
    (file,) = remembered()
    whole = file.read_text()
    file.write_text(text)
    assert read_trained_shape(model, LEARNER) == first
    assert file.read_text() == whole


def test_what_cannot_be_remembered_is_read(model, monkeypatch, tmp_path):
    (tmp_path / "home").write_text("no directory")
    assert read_trained_shape(model, LEARNER).layers
    read_trained_shape(model.model_copy(update={"trust_remote_code": True}), LEARNER)
    assert (tmp_path / "home").is_file()


def test_what_was_read_needs_no_torch(model):
    read_trained_shape(model, LEARNER)
    program = f"""
import sys
from asyncrl.config.sections import LearnerConfig, ModelConfig
from asyncrl.preflight.model_shape import read_trained_shape
assert read_trained_shape(ModelConfig(path={model.path!r}), LearnerConfig()).layers
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
