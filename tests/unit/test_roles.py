"""How a role process ends: what a restart would only repeat has a status of its own."""

import pytest

from asyncrl import errors
from asyncrl.launch import roles


def status_after(error: Exception, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(roles, "die_with_parent", lambda pid: None)
    monkeypatch.setattr(roles, "refuse_pickles_from_wires", lambda: None)  # it would last
    monkeypatch.setattr(roles.signal, "signal", lambda *_: None)

    def role() -> None:
        raise error

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
