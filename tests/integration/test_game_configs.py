"""The shipped configs of games: a few steps of each through store, engine, environment and learner."""

from pathlib import Path

import pytest
import yaml

from asyncrl.commands.down import processes_of
from examples import pupils
from tests.support.whole_run import rows, start

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
CONFIGS = Path(__file__).parents[2] / "configs"
STEPS = 3


@pytest.mark.parametrize(
    ("game", "engine", "most_turns"), [("guess", "transformers", 5), ("calculator", "vllm", 2)]
)
def test_a_game_is_played_and_trained(tmp_path, monkeypatch, game, engine, most_turns):
    monkeypatch.setattr(pupils, "GAMES", 200)
    monkeypatch.setattr(pupils.Adder, "asks", 1.0)  # else so few steps would not see the calculator's answer
    made, run = tmp_path / "made", tmp_path / "runs" / game
    pupils.make_pupil(game, made, pupils.Size(layers=1, steps=100), lambda line: None)
    values = {
        "extends": str(CONFIGS / f"{game}.yaml"),
        "run": {"root": str(run.parent)},
        "model": {"path": str(made / "model")},
        "data": {"train": str(made / "train.jsonl")},
        "batch": {"groups": 4, "group_size": 4},
        "learner": {"steps": STEPS},
        "generator": {"engine": engine, "count": 1, "max_running": 16},
    }
    if game == "calculator":
        values["data"]["eval"] = str(made / "test.jsonl")
        values["eval"] = {"every": STEPS, "prompts": 8}
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(values))
    up = start(config)
    try:
        assert up.wait(500) == 0, (tmp_path / "up.out").read_text()[-3000:]
    finally:
        for process in processes_of(run):
            process.kill()
    trained = [row for row in rows(run) if "time/step" in row]
    assert [row["step"] for row in trained] == [*range(1, STEPS + 1)]
    for row in trained:
        assert row["groups/trained"] == 4 and row["buffer/audit_mismatch"] == row["environment/replays"] == 0
        assert 1 < row["episodes/turns_mean"] <= row["episodes/turns_max"] <= most_turns
        assert 0 <= row["reward/environment/mean"] == row["reward/mean"] <= 1
    # Later steps may train tokens of older weights.
    assert trained[0]["mismatch/abs_log_ratio/max"] < 1e-3, "engine and learner disagree about a token"
    assert trained[-1]["weights/version"] == STEPS
