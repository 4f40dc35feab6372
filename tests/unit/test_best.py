"""The checkpoint with the best value is kept and named, and a run ends when a metric says so."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.checkpoint_section import CheckpointConfig, StopConfig
from asyncrl.config.sections import LearnerConfig
from asyncrl.data.data_files import DataFiles
from asyncrl.errors import CheckpointError, RunError
from asyncrl.launch.saving import open_judged
from asyncrl.results.export import saved_export
from asyncrl.run.best import Judged, read_best, read_ended, why_ended
from asyncrl.run.checkpoint import CheckpointStore
from asyncrl.run.directory import RunDirectory
from asyncrl.run.saved import LearnerState, Saved, nothing_left
from asyncrl.telemetry.status import StatusSnapshot, write_status
from tests.support.fake_trainer import KEY, FakeTrainer, save_whole
from tests.support.task_config import config_of

METRIC = "eval/accuracy"
ROUND = {"eval/reward_mean": 0.5, METRIC: 0.5}


def opened(root: Path, key: bytes = KEY, stop: dict[str, Any] | None = None, **checkpoint: Any) -> Any:
    """The checkpoints of a run with metrics, after a start."""
    store, settings = CheckpointStore(root, key, 2), CheckpointConfig(every=1, **checkpoint)
    learner = LearnerConfig(stop_when=StopConfig(metric=METRIC, **stop) if stop else None)
    judged = Judged(learner, settings, root, store.steps, {})
    store.keeps = judged.keeps
    return store, judged


def save(store: CheckpointStore, judged: Judged, step: int) -> int:
    oldest = save_whole(store, step, FakeTrainer("weights"), {"version": step})
    judged.saved()
    return oldest


@pytest.mark.parametrize("best_is", ["highest", "lowest"])
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("seed", range(5))
def test_the_best_of_all_saved_steps_stays_through_restarts(
    tmp_path: Path, best_is: str, late: int, seed: int
) -> None:
    """A value comes before its checkpoint, as that of a step, or after it, as that of an evaluation."""
    values = {step: random.Random(seed).choice((0.1, 0.5, 0.7)) + step % 7 / 50 for step in range(1, 13)}
    values[4] = float("nan")
    for step in range(1, 13):
        if step in (1, 5, 9):
            store, judged = opened(tmp_path, best=METRIC, best_is=best_is, keep_every=5)
        if not late:
            judged.see({METRIC: values[step]}, step)
        oldest = save(store, judged, step)
        assert oldest == max(1, step - 1), "the store does not wait for what lasts"
        if late:
            judged.see({METRIC: values[step]}, step)
        if step == 10:
            store.load(FakeTrainer())
    known = {step: value for step, value in values.items() if step != 4}
    best = (max if best_is == "highest" else min)(known, key=lambda step: known[step])
    found = read_best(tmp_path)
    assert found is not None and (found["step"], found["value"]) == (best, values[best])
    save(store, judged, 13)
    assert store.steps() == {5, 10, 12, 13, best}


def test_a_value_that_comes_after_its_checkpoint_has_gone_is_said_and_not_the_best(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, judged = opened(tmp_path, best=METRIC)
    for step in (1, 2, 3):
        save(store, judged, step)
    judged.see({METRIC: 0.9}, 1)
    assert read_best(tmp_path) is None and "set a higher checkpoint.keep" in caplog.text
    judged.see({METRIC: 0.2}, 2)
    assert read_best(tmp_path)["step"] == 2  # type: ignore[index]
    caplog.clear()
    save(store, judged, 5)
    judged.see({METRIC: 0.9}, 4)  # whose save failed
    assert not caplog.messages


def test_a_best_checkpoint_that_is_gone_is_the_best_no_more(tmp_path: Path) -> None:
    store, judged = opened(tmp_path, best=METRIC)
    judged.see({METRIC: 0.9}, 1)
    save(store, judged, 1)
    (tmp_path / "step-000001").rename(tmp_path / "rejected-step-000001")
    store, judged = opened(tmp_path, best=METRIC)
    judged.see({METRIC: 0.3}, 2)
    store.save(2, FakeTrainer("weights"), {"version": 2})
    judged.saved()
    assert read_best(tmp_path)["step"] == 2  # type: ignore[index]


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("is_damaged", [False, True])
def test_what_was_best_and_why_it_ended_go_with_their_steps(
    tmp_path: Path, step: int, is_damaged: bool
) -> None:
    store, judged = opened(tmp_path, best=METRIC)
    for saved in (1, 2):
        judged.see({METRIC: 0.1 * saved}, saved)
        save(store, judged, saved)
    (tmp_path / "ENDED").write_text('{"step": 2, "record": {"worse": 1}}')
    if is_damaged and step == 1:
        (tmp_path / "step-000002" / "state.json").unlink()
    elif not is_damaged:
        store.go_back(step)
    store.load(FakeTrainer())
    assert (read_best(tmp_path) is None) == (step == 1) == (read_ended(tmp_path, 2) == {})


def test_values_of_an_evaluation_that_was_changed_are_not_compared(tmp_path: Path) -> None:
    directory, state = RunDirectory(tmp_path), LearnerState()
    directory.create(fresh=False)
    learner = {"steps": 9, "stop_when": {"metric": METRIC, "patience": 1}}
    checkpoint = {"best": METRIC, "every": 1}
    file = tmp_path / "held-out.jsonl"
    data = {"train": "x", "eval": str(file)}
    sections = {"data": data, "checkpoint": checkpoint, "learner": learner}
    warm = {"every": 1, "temperature": 1.0}
    two, four = (config_of(**sections, eval=warm | {"samples": samples}) for samples in (2, 4))

    def judge(config: Any) -> Judged:
        return open_judged(config, DataFiles(config), store, directory.checkpoints, state)

    steps = ((1, two, "easy", 0.9, 1), (2, two, "easy", 0.1, 1), (3, four, "easy", 0.1, 3))
    for step, config, rows, value, best in (*steps, (4, four, "hard", 0.0, 4)):
        file.write_text(json.dumps({"prompt": rows}))
        store = CheckpointStore(directory.checkpoints, KEY, 2)
        judged = judge(config)
        judged.see({METRIC: value}, step)
        save(store, judged, step)
        state = LearnerState(stop=judged.state())
        assert read_best(directory.checkpoints)["step"] == state.stop["step"] == best  # type: ignore[index]
        if step == 2:
            judged.ended(2)
            saved = Saved(directory.checkpoints, {"version": 2}, is_exported=True)
            assert nothing_left(two, directory, saved) == "", "its last evaluation is left"
            numbers: Any = {
                "step": 2,
                "total_steps": 9,
                "version": 2,
                "started_at": 1,
                "updated_at": 2,
                "pid": 1,
            }
            write_status(directory.status, StatusSnapshot(run="r", state="finished", **numbers))
            assert "has ended after step 2" in nothing_left(two, directory, saved)
            assert nothing_left(four, directory, saved) == ""
            file.write_text(json.dumps({"prompt": "hard"}))
            assert nothing_left(two, directory, saved) == ""
    # Earlier releases saved the digest alone, or nothing.
    state.stop["asked"] = state.stop["asked"].partition(" ")[0]
    assert judge(four).state()["step"] == 4 and judge(two).state()["step"] == -1
    del state.stop["asked"]
    assert judge(four).state()["step"] == 4


@pytest.mark.parametrize(
    ("metrics", "metric", "is_missed"),
    [
        (ROUND, "eval/maj@8", True),
        ({"eval/math/reward_mean": 0.5}, "eval/math/maj@8", True),
        ({"time/step": 1.0, "reward/mean": 0.5}, "policy/entropy", True),
        (ROUND, "policy/entropy", False),
        ({"time/step": 1.0}, "eval/maj@8", False),
        ({"eval/dead_groups": 8.0}, METRIC, False),
    ],
)
def test_a_metric_that_a_step_lacks_is_said_once_and_later_ones_are_judged(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    metrics: dict[str, float],
    metric: str,
    is_missed: bool,
) -> None:
    for key, judged in (
        ("checkpoint.best", opened(tmp_path, best=metric)[1]),
        (
            "learner.stop_when.metric",
            Judged(
                LearnerConfig(stop_when=StopConfig(metric=metric, patience=1)),
                CheckpointConfig(),
                tmp_path,
                set,
                {},
            ),
        ),
    ):
        caplog.clear()
        judged.see(metrics, 1)
        judged.see(metrics, 2)
        said = f"{key} is {metric}, which step 1 does not have; steps without it are not judged"
        assert caplog.messages == [said] * is_missed
        judged.see({**metrics, metric: 0.5}, 3)
        record = judged.state()
        assert not record or (record["step"], record["value"]) == (3, 0.5)


@pytest.mark.parametrize(
    ("stop", "values", "ends_at", "why"),
    [
        (
            {"reaches": 0.5},
            [0.1, 0.4, 0.5, 0.2],
            3,
            "eval/accuracy was 0.5 at step 3, and learner.stop_when.reaches is 0.5",
        ),
        ({"reaches": 0.1, "best_is": "lowest"}, [0.3, 0.2, 0.05], 3, "was 0.05 at step 3"),
        ({"patience": 2}, [0.1, 0.4, 0.4, 0.5, 0.5, 0.2, 0.9], 6, "was 0.5 at step 4, and none of 2 later"),
        ({"patience": 2, "best_is": "lowest"}, [0.5, 0.6, 0.4, float("nan"), 0.4], 5, "was 0.4 at step 3"),
        ({"patience": 1, "reaches": 0.9}, [0.1, 0.9, 0.1], 2, "reaches"),
        ({"patience": 3}, [0.1, 0.1, 0.1], None, ""),
        ({"reaches": 9.0}, [0.1, float("inf")], 2, "at step 2"),
        ({"patience": 1, "best_is": "lowest"}, [float("-inf"), 0.1], 2, "at step 1"),
    ],
)
def test_the_training_ends_at_the_value_or_after_the_patience_also_over_restarts(
    tmp_path: Path, stop: dict[str, Any], values: list[float], ends_at: int | None, why: str
) -> None:
    config, state, ended = StopConfig(metric=METRIC, **stop), dict[str, Any](), None
    for step, value in enumerate(values, 1):
        judged = Judged(LearnerConfig(stop_when=config), CheckpointConfig(), tmp_path, set, state)
        judged.see({METRIC: value}, step)
        state = json.loads(json.dumps(judged.state(), allow_nan=False))  # as a checkpoint keeps it
        if ended is None and why_ended(config, state):
            ended = step
    assert ended == ends_at and why in why_ended(config, state)
    if ended:
        judged.ended(7)
    assert why_ended(config, read_ended(tmp_path, 7)) == why_ended(config, state)
    assert read_ended(tmp_path, 8) == {}, "a later step is not that end"
    assert not why_ended(None, state) and not why_ended(StopConfig(metric="eval/other", reaches=0.0), state)
    assert not why_ended(StopConfig(metric=METRIC, patience=50), state), "another patience goes on"


def test_a_training_that_has_ended_stays_so_if_its_last_checkpoint_is_older_than_the_reason(
    tmp_path: Path,
) -> None:
    def judge(version: int, **stop: Any) -> Judged:
        learner = {"steps": 9, "stop_when": {"metric": METRIC, **stop}}
        config = config_of(data={"train": "x", "eval": str(file)}, learner=learner)
        state = LearnerState(version=version, stop=before)
        store = CheckpointStore(tmp_path, KEY, 2)
        return open_judged(config, DataFiles(config), store, tmp_path, state)

    file, before = tmp_path / "held-out.jsonl", dict[str, Any]()
    file.write_text('{"prompt": "1"}')
    judged = judge(4, reaches=0.5)
    judged.see({METRIC: 0.1}, 2)
    before = judged.state()
    judged.see({METRIC: 0.9}, 4)
    judged.ended(4)
    assert judge(4, reaches=0.5).why_ended() == judged.why_ended() != ""
    assert judge(5, reaches=0.5).state() == judge(4, reaches=1.0).state() == before, (
        "step 4 is evaluated again"
    )


def test_the_best_is_exported_if_it_is_whole(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.create(fresh=False)
    directory.config.write_text("run: {name: run}\n")
    directory.draw_secret()
    store, judged = opened(directory.checkpoints, directory.checkpoint_key(), best=METRIC)
    with pytest.raises(RunError, match=r"has no best checkpoint; checkpoint.best names its metric"):
        saved_export(directory, best=True)
    for step in (1, 2, 3, 4):
        judged.see({METRIC: 0.9 if step == 1 else 0.1}, step)
        save(store, judged, step)
    assert saved_export(directory, best=True) == directory.checkpoints / "step-000001" / "hf"
    assert saved_export(directory) == directory.checkpoints / "step-000004" / "hf"
    best = directory.checkpoints / "step-000001"
    (best / "state.json").write_text("{}")
    assert saved_export(directory, best=True) == best / "hf", "a model needs no other file"
    (best / "hf" / "model.safetensors").write_text("torn")
    with pytest.raises(CheckpointError, match=r"hf/model.safetensors is not what was written"):
        saved_export(directory, best=True)
