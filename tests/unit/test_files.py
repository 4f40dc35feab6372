"""What is written durably is there after a loss of power: operations traced in a real process, and what a
disk keeps of them."""

import errno
import os
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import SafetensorError

from asyncrl.errors import RunError
from asyncrl.files import replace_text
from asyncrl.run.directory import write_directory
from reliability.crash.file_trace import COMPILER, Disk, Operation, Tree, record

pytestmark = pytest.mark.skipif(
    COMPILER is None, reason="no C compiler for the shim that records operations on files"
)

BEGIN = "import sys; from pathlib import Path; from asyncrl.files import *; root = Path(sys.argv[1]);"


def traced(tmp_path: Path, statements: str) -> list[Operation]:
    """What Python statements do to files below `root`."""
    (tmp_path / "root").mkdir()
    argv = [sys.executable, "-c", f"{BEGIN}{statements}", str(tmp_path / "root")]
    return record(argv, tmp_path / "root", tmp_path, timeout_s=60)


def left_by(disk: Disk) -> Iterator[Tree]:
    """What a loss of power may leave."""
    yield disk.after_power_loss(strict=True)
    yield disk.after_power_loss(strict=False)
    yield from (disk.after_mixed_power_loss(random.Random(seed)) for seed in range(20))


def replaced_twice(tmp_path: Path, *, durable: bool) -> tuple[list[Operation], list[set[bytes | None]]]:
    """The operations, and what the file may hold after each of them."""
    writes = [
        f"replace_text(root / 'file', {text!r}, durable={durable})" for text in ("old text", "new text")
    ]
    operations, disk, held = traced(tmp_path, "; ".join(writes)), Disk(), []
    for operation in operations:
        disk.apply(operation)
        held.append({tree.get("file") for tree in left_by(disk)})
    return operations, held


def test_a_file_that_is_replaced_durably_is_the_old_or_the_new_one_after_a_loss_of_power(tmp_path):
    operations, held = replaced_twice(tmp_path, durable=True)
    temporary = operations[0].path
    once = [("c", temporary), ("w", temporary), ("f", temporary), ("r", temporary), ("f", "")]
    assert [(operation.kind, operation.path) for operation in operations] == once * 2
    assert set().union(*held[:4]) == {None, b"old text"}
    assert held[4] == {b"old text"}, "whoever called has been told that it is there"
    assert set().union(*held[4:9]) == {b"old text", b"new text"}
    assert held[9] == {b"new text"}


def test_one_that_is_not_may_be_torn(tmp_path):
    _, held = replaced_twice(tmp_path, durable=False)
    found = set().union(*held)
    assert {None, b"", b"new "} < found and any(b"\0" in (content or b"") for content in found), (
        "the oracle notices"
    )


def test_a_directory_that_is_made_with_those_above_it_stays(tmp_path):
    operations = traced(tmp_path, "make_private(root / 'runs' / 'mine'); replace_text(root / 'end', 'of it')")
    disk = Disk()
    for operation in operations[:-3]:
        disk.apply(operation)
    assert operations[-3].path.startswith(".end.")
    assert all(tree == {"runs": None, "runs/mine": None} for tree in left_by(disk))
    assert (tmp_path / "root" / "runs" / "mine").stat().st_mode & 0o777 == 0o700


def test_a_tree_that_is_copied_and_synced_stays_whole(tmp_path):
    copy = (
        "import shutil; (root / 'a' / 'b').mkdir(parents=True); (root / 'a' / 'b' / 'c').write_text('c'); "
        "sync_below(root)"
    )
    disk = Disk()
    for operation in traced(tmp_path, copy):
        disk.apply(operation)
    assert all(tree == {"a": None, "a/b": None, "a/b/c": b"c"} for tree in left_by(disk))


def test_a_directory_that_is_written_aside_is_whole_or_not_there(tmp_path):
    fill = "with write_directory(root / 'model') as at: (at / 'a').write_text('text'); (at / 'b').mkdir()"
    operations, disk = (
        traced(tmp_path, f"\nfrom asyncrl.run.directory import write_directory\n{fill}"),
        Disk(),
    )
    held: list[set[tuple[str, ...]]] = []
    for operation in operations:
        disk.apply(operation)
        held.append(
            {tuple(sorted(name for name in tree if name.startswith("model"))) for tree in left_by(disk)}
        )
        assert all(tree.get("model/a") in (None, b"text") for tree in left_by(disk))
    whole = ("model", "model/a", "model/b")
    assert set().union(*held) == {(), whole} and held[-1] == {whole}


def test_an_attempt_to_write_a_directory_that_fails_leaves_what_was_there(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / ".writing-model").mkdir()
    (tmp_path / ".writing-model" / "rest").touch()
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for error in (full, shutil.Error([("from", "to", str(full))]), SafetensorError("no space")):
        with pytest.raises(RunError, match=r"model cannot be written: .*[Nn]o space.*; make room there"):  # noqa: SIM117
            with write_directory(tmp_path / "model") as writing:
                assert list(writing.iterdir()) == []
                raise error
        assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_file_that_cannot_be_replaced_is_named_as_people_know_it(tmp_path):
    (tmp_path / "file").mkdir()
    with pytest.raises(OSError, match=r"file'$") as refusal:
        replace_text(tmp_path / "file", "text")
    assert refusal.value.filename == str(tmp_path / "file") and len(list(tmp_path.iterdir())) == 1
