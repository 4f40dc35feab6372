"""An audit speaks of the store that the run used, or of none."""

import pytest
import yaml

from asyncrl.commands import inspect
from asyncrl.errors import StoreError
from asyncrl.run.directory import RunDirectory


@pytest.mark.parametrize(
    ("configured", "given"), [("redis://127.0.0.1:1/0", None), (None, "redis://127.0.0.1:1/0")]
)
def test_a_store_that_does_not_answer_is_never_replaced_by_an_empty_one(
    tmp_path, monkeypatch, configured, given
):
    config = {
        "run": {"name": "x", "root": str(tmp_path)},
        "model": {"path": "m"},
        "data": {"train": "t"},
        "reward": {"functions": [{"function": "exact_match"}]},
        "store": {"url": configured},
    }
    directory = RunDirectory(tmp_path / "x")
    directory.create(fresh=False)
    directory.config.write_text(yaml.safe_dump(config))

    def refused(*arguments):
        raise StoreError("wrong password")

    monkeypatch.setattr(inspect, "audit_store", refused)
    with pytest.raises(StoreError, match="wrong password"):
        inspect.audit_run(directory.path, given)
    assert not list(directory.path.glob("store/*"))
