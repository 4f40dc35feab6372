"""Whole runs whose reward depends on what an image shows: they learn only if both sides see the images."""

import json
from pathlib import Path

import pytest
import yaml

from tests.support.vlm_models import picture, tiny_idefics3
from tests.support.whole_run import processes_of, rows, start

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

REWARD = """\
def letter(prompt, response, answer, **row):
    return (response.count(answer) - response.count('ab'.replace(answer, ''))) / 4
"""


SPOILS = """\
def letter(prompt, response, images, **row):
    with open("{}/" + images[0], "ab") as file:
        file.write(b"x")
    return 0.0
"""


def task(directory: Path, engine: str, **sections: object) -> Path:
    """Red pictures want an `a`, blue ones a `b`: without the picture the mean reward is 0, at most it is 2."""
    tiny_idefics3(directory / "model")
    (directory / "rewards.py").write_text(REWARD)
    lines = []
    for number in range(24):
        picture(directory / f"{number}.png", (255, 0, 0) if number % 2 else (0, 0, 255))
        lines.append({"prompt": "which?", "images": [f"{number}.png"], "answer": "a" if number % 2 else "b"})
    (directory / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    values = {
        "run": {"name": "images", "root": str(directory / "runs")},
        "model": {"path": str(directory / "model"), "dtype": "float32", "chat_template": True},
        "data": {"train": str(directory / "train.jsonl"), "images_key": "images"},
        "reward": {"functions": [{"function": f"{directory}/rewards.py:letter"}]},
        "batch": {"groups": 8, "group_size": 8},
        "sampling": {"max_prompt_tokens": 48, "max_response_tokens": 8},
        "staleness": {"max_lag": 1},
        "learner": {"steps": 20, "device": "cpu", "threads": 1, "optimizer": {"lr": 5e-3}},
        "generator": {"engine": engine, "count": 1, "threads": 1, "max_running": 32, "kv_cache_gib": 0.25},
        "checkpoint": {"every": 20},
    }
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(values | sections))
    return path


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_a_run_learns_to_tell_what_an_image_shows(tmp_path: Path, engine: str) -> None:
    path = task(tmp_path, engine)
    process, run = start(path), tmp_path / "runs" / "images"
    try:
        assert process.wait(timeout=800) == 0, (tmp_path / "up.out").read_text()[-3000:]
    finally:
        for left in processes_of(run):
            left.kill()
    steps = [row for row in rows(run) if "reward/mean" in row]
    # No policy that is blind has more than chance gives to 64 answers; a single step may fall back.
    rewards = [row["reward/mean"] for row in steps]
    assert rewards[0] < 0.5 and max(rewards) > 1.5, rewards
    assert all(row["weights/probe_max"] <= 1e-4 for row in steps if "weights/probe_max" in row)


def test_an_image_that_changes_under_a_run_ends_it_and_is_named(tmp_path: Path) -> None:
    """A reward function changes the bytes of the picture, after the generator has read it."""
    path = task(tmp_path, "transformers")
    (tmp_path / "rewards.py").write_text(SPOILS.format(tmp_path))
    process, run = start(path), tmp_path / "runs" / "images"
    try:
        assert process.wait(timeout=300) != 0
    finally:
        for left in processes_of(run):
            left.kill()
    said = (tmp_path / "up.out").read_text()
    assert "image_changed" in said and "train.jsonl:" in said, said[-3000:]
    assert not [row for row in rows(run) if "reward/mean" in row]
