"""How a role process ends: what a restart would only repeat has a status of its own."""

import asyncio
import sys

import pytest

from asyncrl import errors
from asyncrl.hosting.machine import Machine
from asyncrl.hosting.memory_use import ModelShape
from asyncrl.launch import generator_process, roles, scorer_process
from tests.support.task_config import config_of
from tests.support.waiting import turns


async def in_tasks(*failures: Exception) -> None:
    """Fail with all of them at the same time, in tasks of a group within a group."""

    async def fail(error: Exception) -> None:
        raise error

    async with asyncio.TaskGroup() as outer:
        for error in failures[1:]:
            outer.create_task(fail(error))
        async with asyncio.TaskGroup() as inner:
            inner.create_task(fail(failures[0]))


def status_after(error: Exception, monkeypatch: pytest.MonkeyPatch, *, tasks: bool = False) -> int:
    monkeypatch.setattr(roles, "die_with_parent", lambda pid: None)
    monkeypatch.setattr(roles, "refuse_pickles_from_wires", lambda: None)  # it would last
    monkeypatch.setattr(roles.signal, "signal", lambda *_: None)

    def role() -> None:
        if not tasks:
            raise error
        with errors.ungrouped():
            asyncio.run(in_tasks(error))

    with pytest.raises(SystemExit) as ended:
        roles.run_role(role)
    return ended.value.code


@pytest.mark.parametrize(
    "error",
    [
        errors.ConfigError,
        errors.ForeignRunError,
        errors.StoreRefused,
        errors.ControlRefused,
        errors.BufferFenced,
        errors.UpdatesRefused,
    ],
)
def test_what_a_restart_would_repeat_is_not_restarted(error, monkeypatch):
    assert status_after(error("why"), monkeypatch) == roles.USER_ERROR


@pytest.mark.parametrize(
    "error", [errors.StoreError, errors.ControlError, errors.TransferError, errors.BufferGap]
)
def test_what_may_pass_is_restarted(error, monkeypatch):
    assert status_after(error("why"), monkeypatch) == 1


@pytest.mark.parametrize("error", [errors.EngineError, errors.CheckpointError])
def test_what_is_likely_to_come_again_is_restarted_and_counted(error, monkeypatch):
    assert status_after(error("why"), monkeypatch) == roles.FAULT_FOUND


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.ControlRefused, roles.USER_ERROR),
        (errors.StoreError, 1),
        (errors.EngineError, roles.FAULT_FOUND),
    ],
)
def test_an_error_of_a_task_ends_a_role_like_any_other(error, status, monkeypatch, caplog):
    assert status_after(error("why"), monkeypatch, tasks=True) == status
    assert "why" in caplog.text and "ExceptionGroup" not in caplog.text


def test_of_several_errors_the_others_are_notes_and_causes_stay():
    first, second = errors.EngineError("first"), errors.StoreError("second")
    first.__cause__ = KeyError("cause")
    with pytest.raises(errors.AsyncRLError) as raised, errors.ungrouped():
        asyncio.run(in_tasks(first, second))
    assert {str(raised.value)} | {note.rpartition(": ")[2] for note in raised.value.__notes__} == {
        "first",
        "second",
    }
    assert isinstance(first.__cause__, KeyError)


def test_a_fault_among_the_errors_is_not_hidden():
    with pytest.raises(ExceptionGroup) as raised, errors.ungrouped():
        asyncio.run(in_tasks(ZeroDivisionError(), errors.StoreError("second")))
    assert raised.value.subgroup(ZeroDivisionError) is not None
    with errors.ungrouped():
        asyncio.run(turns(1))


@pytest.mark.parametrize("fails", ["engine", "endpoint"])
def test_a_dead_engine_of_a_scorer_is_the_error_of_its_process(tmp_path, monkeypatch, fails):
    answers = [0.5]

    async def score(ids: list[int]) -> float:
        if not answers and fails == "engine":
            raise errors.EngineError("the engine is dead")
        return answers.pop() if answers else 0.5

    monkeypatch.setattr(scorer_process, "open_classifier", lambda *_, **__: score)
    asks = {"function": "model_score", "params": {"scorer": "rm"}}
    config = config_of(
        reward={"functions": [asks]}, scorers={"rm": {"model": "rm"}}, learner={"device": "cpu"}
    )
    place = tmp_path if fails == "engine" else tmp_path / "no directory"
    with pytest.raises(errors.EngineError if fails == "engine" else errors.ControlError):
        asyncio.run(scorer_process._score(config, "rm", f"ipc://{place}/socket"))


def test_a_scorer_that_its_share_does_not_hold_is_not_started_again(monkeypatch):
    monkeypatch.setattr(generator_process, "is_installed", lambda: True)
    machine = Machine(memory_bytes=1 << 30, gpu_bytes=(1 << 30,))
    monkeypatch.setattr(generator_process, "this_machine", lambda device: machine)
    sizes = {"layers": 1, "hidden": 1, "intermediate": 1, "query": 1, "kv": 1, "vocabulary": 1}
    shapes = {"large": ModelShape(parameters=1 << 30, **sizes)}
    monkeypatch.setattr(generator_process, "read_model", lambda model: (None, shapes[model.path]))
    asks = {"function": "model_score", "params": {"scorer": "rm"}}
    config = config_of(
        reward={"functions": [asks]}, scorers={"rm": {"model": "large"}}, learner={"device": "cpu"}
    )
    with pytest.raises(errors.DataError, match=r"large needs more than its share of a GPU, 20%; .*`gpus`"):
        asyncio.run(scorer_process._score(config, "rm", "ipc://none", 0.2, is_shared=True))


def test_code_that_exits_is_a_fault_and_a_stop_passes():
    with (
        pytest.raises(errors.RunError, match=r"ended its process: SystemExit: 0 \(.*test_roles\.py"),
        roles.no_exit(),
    ):
        sys.exit(0)
    with pytest.raises(SystemExit, match="143"), roles.no_exit():
        sys.exit(143)
