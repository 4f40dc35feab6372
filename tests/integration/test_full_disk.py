"""Commands that write to a full or read-only disk give a message with the way out and leave no half file."""

import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import yaml

from asyncrl.cli.after import export
from asyncrl.errors import RunError
from asyncrl.results.compare import compare_runs
from asyncrl.results.run_page import write_report
from asyncrl.run.checkpoint import CheckpointStore
from asyncrl.run.directory import RunDirectory
from examples.pupils import Sums, make_sums
from reliability.crash.small_run import Weights
from tests.support.fake_trainer import save_whole
from tests.support.synthetic_run import SyntheticRun

pytestmark = pytest.mark.integration

TINY = Sums(layers=1, hidden=32, heads=2, intermediate=32, test_rows=16, batch=8, steps=1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "mine"
    synthetic = SyntheticRun(path, generators=1)
    for _ in range(20):
        synthetic.advance()
    directory = RunDirectory(path)
    directory.create(fresh=False)
    directory.draw_secret()
    directory.config.write_text(yaml.safe_dump({"run": {"name": "mine", "root": str(path.parent)}}))
    weights = Weights()
    weights.ids = list(range(100_000))
    store = CheckpointStore(directory.checkpoints, directory.checkpoint_key(), 1)
    save_whole(store, 1, weights, {"version": 1})
    return path


@pytest.fixture(params=["full", "read-only"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A disk of its own with little room left, or none to write on."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", place], capture_output=True, check=False
    ).returncode:
        pytest.skip("mounting a disk needs root")
    try:
        if request.param == "full":
            (place / "ballast").write_bytes(b"x" * 96_000)
        else:
            subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


def test_what_cannot_be_written_is_named_and_leaves_nothing(run, disk, tmp_path):
    before = list(disk.iterdir())
    writers = {
        "model": partial(export, run),
        "report.html": partial(write_report, run),
        "both.html": partial(compare_runs, [run, shutil.copytree(run, tmp_path / "other")]),
        "quickstart": partial(make_sums, settings=TINY, report=str),
    }
    for name, write in writers.items():
        with pytest.raises(
            RunError,
            match=rf"{name} cannot be written: .*(No space|Read-only|os error 28).*; make room there, or",
        ):
            write(disk / name)
        assert list(disk.iterdir()) == before
