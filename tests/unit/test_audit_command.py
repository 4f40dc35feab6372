"""An audit speaks of the store that the run used, or of none."""

import pytest
import yaml

from asyncrl.commands import inspect
from asyncrl.errors import RunError, StoreError
from asyncrl.run.directory import RunDirectory
from asyncrl.run.lock import RunLock


def unanswered(path, monkeypatch, url=None):
    """Return a run whose store refuses."""
    config = {
        "run": {"name": "x", "root": str(path)},
        "model": {"path": "m"},
        "data": {"train": "t"},
        "reward": {"functions": [{"function": "exact_match"}]},
        "store": {"url": url},
    }
    directory = RunDirectory(path / "x")
    directory.create(fresh=False)
    directory.config.write_text(yaml.safe_dump(config))

    def refused(*arguments):
        raise StoreError("wrong password")

    monkeypatch.setattr(inspect, "_audit_store", refused)
    return directory


@pytest.mark.parametrize(
    ("configured", "given"), [("redis://127.0.0.1:1/0", None), (None, "redis://127.0.0.1:1/0")]
)
def test_a_store_that_does_not_answer_is_never_replaced_by_an_empty_one(
    tmp_path, monkeypatch, configured, given
):
    directory = unanswered(tmp_path, monkeypatch, configured)
    with pytest.raises(StoreError, match="wrong password"):
        inspect.audit_run(directory.path, given)
    assert not list(directory.path.glob("store/*"))


@pytest.mark.parametrize("name", ["supervisor_lock", "driver_lock"])
def test_the_data_of_a_run_that_is_up_gets_no_second_server(tmp_path, monkeypatch, name):
    directory = unanswered(tmp_path, monkeypatch)
    with (
        RunLock(getattr(directory, name)),
        pytest.raises(RunError, match=r"wrong password; .* is up, .*asyncrl down"),
    ):
        inspect.audit_run(directory.path, None)
    assert not list(directory.path.glob("store/*"))


def test_no_run_starts_while_an_audit_has_its_data_open(tmp_path, monkeypatch):
    directory = unanswered(tmp_path, monkeypatch)

    def opened(*_, **__):
        with pytest.raises(RunError, match="this run is held by"):
            RunLock(directory.supervisor_lock)
        raise StoreError("seen")

    monkeypatch.setattr(inspect, "own_store", opened)
    with pytest.raises(StoreError, match="seen"):
        inspect.audit_run(directory.path, None)
    RunLock(directory.supervisor_lock).release()
