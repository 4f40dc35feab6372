"""Models are exported next to training: it waits for none but the last, and a failure of that is an error."""

import itertools
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from asyncrl.errors import CheckpointError
from asyncrl.launch.same_bytes import STOP
from asyncrl.launch.saving import LeadSaving
from asyncrl.run import exports
from asyncrl.run.exports import Exports
from asyncrl.run.manifest import FileOps
from tests.support.failed_saves import run_on
from tests.support.fake_trainer import FakeTrainer
from tests.support.waiting import LONG_S


class SlowTrainer(FakeTrainer):
    """Writes a model when it is allowed to."""

    def __init__(self, value: str) -> None:
        super().__init__(value)
        self.events: list[str] = []
        self.may_write = threading.Event()

    def save(self, directory: Path) -> None:
        super().save(directory)
        self.events.append("save")

    def export(self) -> Callable[[Path], None]:
        write = super().export()

        def slowly(directory: Path) -> None:
            self.may_write.wait()
            write(directory)
            self.events.append("model")

        return slowly


def slow_run(root: Path, value: str) -> tuple[LeadSaving, SlowTrainer]:
    run, trainer = run_on(root, FileOps(), every=1)[0], SlowTrainer(value)
    run.trainer = trainer  # type: ignore[assignment]
    return run, trainer


def model_of(root: Path, step: int) -> str:
    return (root / f"step-{step:06}" / "hf" / "model.safetensors").read_text()


def test_training_goes_on_while_a_model_is_written_and_the_next_save_waits(tmp_path: Path) -> None:
    run, trainer = slow_run(tmp_path, "one")
    run.checkpoint(1, last=False)
    trainer.value = "two"
    assert run.checkpoints.latest() == tmp_path / "step-000001", "it is saved"
    assert run.checkpoints.latest(exported=True) is None, "and has no model yet"
    with pytest.raises(CheckpointError, match=r"step-000001 has no hf/ yet"):
        run.checkpoints.verify_export(tmp_path / "step-000001")
    second = threading.Thread(target=run.checkpoint, args=(2,), kwargs={"last": False})
    second.start()
    trainer.may_write.set()
    second.join()
    run.finish()
    assert trainer.events == ["save", "model"] * 2, "two copies of the weights are never in memory"
    assert [model_of(tmp_path, step) for step in (1, 2)] == ["one" * 100, "two" * 100]
    assert run.checkpoints.latest(exported=True) == tmp_path / "step-000002"


def test_a_disk_that_hangs_under_a_model_does_not_keep_the_next_steps_from_being_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(exports, "LAST_S", 0.01)
    run, trainer = slow_run(tmp_path, "one")
    run.checkpoint(1, last=False)
    trainer.value = "two"
    run.checkpoint(2, last=False)
    assert run.checkpoints.latest() == tmp_path / "step-000002"
    assert "the export of step 1 takes more than 0.01 s: the next checkpoint gets no model" in caplog.text
    trainer.may_write.set()
    monkeypatch.setattr(exports, "LAST_S", LONG_S)
    run.finish()
    assert trainer.events == ["save", "save", "model"], "two copies of the weights are never in memory"
    run.checkpoint(3, last=False)
    run.finish()
    assert run.checkpoints.latest(exported=True) == tmp_path / "step-000003"


def test_a_stop_waits_for_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, trainer = slow_run(tmp_path, "one")
    finish = Exports.finish
    # If the stop did not wait, the model could not be written.
    monkeypatch.setattr(Exports, "finish", lambda self: (trainer.may_write.set(), finish(self)))
    with pytest.raises(SystemExit, match="143"):
        run.save_and_leave(1, STOP)
    assert model_of(tmp_path, 1) == "one" * 100


def test_a_model_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    run, trainer = slow_run(tmp_path, "one")
    trainer.may_write.set()
    run.checkpoint(1, last=False)
    run.finish()
    trainer.value = "two"
    run.export(1)
    run.finish()
    assert model_of(tmp_path, 1) == "one" * 100


def test_a_model_is_exported_from_a_checkpoint_of_which_another_file_is_damaged(tmp_path: Path) -> None:
    run, trainer = slow_run(tmp_path, "one")
    trainer.may_write.set()
    run.checkpoint(1, last=False)
    run.finish()
    newest = tmp_path / "step-000001"
    (newest / "weights").write_text("torn")
    assert run.checkpoints.latest() is None, "a resume reads that file"
    assert run.checkpoints.latest(exported=True) == newest
    (newest / "hf" / "more.bin").write_text("nobody has written this")
    with pytest.raises(CheckpointError, match=r"hf/more\.bin missing or not in MANIFEST"):
        run.checkpoints.verify_export(newest)
    (newest / "hf" / "more.bin").unlink()
    (newest / "hf" / "model.safetensors").write_text("torn")
    assert run.checkpoints.latest(exported=True) is None


@pytest.mark.parametrize("failures", [0, 1, exports.ATTEMPTS - 1, exports.ATTEMPTS])
def test_a_failed_export_is_tried_again_and_at_last_an_error(
    failures: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(exports, "AGAIN_S", 0.0)
    left, done = [OSError(28, "No space left on device")] * failures, list[int]()

    def export() -> None:
        if left:
            raise left.pop()

    under_way = Exports(done.append)
    under_way.begin(7, export)
    if failures < exports.ATTEMPTS:
        under_way.finish()
        assert done == [7] and caplog.text.count("not exported yet") == min(1, failures)
    else:
        with pytest.raises(
            CheckpointError, match=r"step 7 is saved, but its model is not exported.*No space"
        ):
            under_way.finish()
        assert not done and "step 7 stays without a model" in caplog.text


def test_the_next_save_does_not_wait_for_attempts_that_fail(caplog: pytest.LogCaptureFixture) -> None:
    failed, under_way = threading.Event(), Exports(lambda step: None)

    def export() -> None:
        failed.set()
        raise OSError(5, "the disk is sick")

    under_way.begin(7, export)
    failed.wait()
    under_way.wait()
    assert "step 7 stays without a model" in caplog.text
    under_way.begin(8, lambda: None)
    under_way.finish()


def test_the_end_of_a_run_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(exports, "LAST_S", 2.0)
    monkeypatch.setattr(exports, "time", SimpleNamespace(monotonic=itertools.count().__next__))
    monkeypatch.setattr(exports, "beat", beat := Mock())
    released, under_way = threading.Event(), Exports(lambda step: None)
    with caplog.at_level(logging.WARNING):
        under_way.begin(7, released.wait)
        under_way.finish()
    assert "step 7 takes more than 2 s" in caplog.text
    assert beat.called, "a short control.slow_s does not end the learner in a wait that ends by itself"
    released.set()
    under_way.wait()
