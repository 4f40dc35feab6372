"""What a process does to files, written down while it runs, and every state that a crash in between may
leave.

`record` runs a command under `file_trace.c`. `Disk` replays the operations one by one and can be asked at any
point what is there after the process died (everything up to that point), or after the machine lost its power:

    strict   only what was fsynced: content of files, and entries of directories
    torn     all entries, but content that was not fsynced is cut in half: what file systems with delayed allocation leave
    mixed    of each change of a directory or of a content since its last fsync, chance decides whether the disk has it
"""

import os
import random
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_suffix(".c")
COMPILER = shutil.which("cc") or shutil.which("gcc")


class Operation(NamedTuple):
    """One change; see `file_trace.c`."""

    kind: str
    path: str
    other: str
    number: int
    data: bytes


def record(
    command: Sequence[str], root: Path, work: Path, *, timeout_s: float, children: bool = False
) -> list[Operation]:
    """Run `command` and return what it did below `root`, relative to it. Raises CalledProcessError when it
    fails.

    With `children` also what the processes did that it started, in the order in which it happened.
    """
    assert COMPILER is not None, "a C compiler is needed"
    library, trace = work / "file_trace.so", work / "trace"
    subprocess.run(
        [COMPILER, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl", "-lpthread"], check=True
    )
    root = root.resolve()
    settings = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    settings |= {"TRACE_CHILDREN": "1"} if children else {}
    environment = (
        os.environ | settings | {"LD_PRELOAD": str(library), "TRACE_ROOT": str(root), "TRACE_LOG": str(trace)}
    )
    subprocess.run(command, check=True, env=environment, timeout=timeout_s, stdout=subprocess.DEVNULL)
    return list(_parse(trace.read_bytes(), str(root)))


def _parse(data: bytes, root: str) -> Iterator[Operation]:
    at = 0

    def take(size: int) -> bytes:
        nonlocal at
        at += size
        return data[at - size : at]

    while at < len(data):
        kind = take(1).decode()
        path, other = (take(*struct.unpack("<I", take(4))).decode() for _ in range(2))
        number, size = struct.unpack("<qq", take(16))
        yield Operation(
            kind,
            path.removeprefix(root).lstrip("/"),
            other.removeprefix(root).lstrip("/"),
            number,
            take(size),
        )


@dataclass(slots=True, eq=False)
class File:
    """Content now, and what is durable of it."""

    content: bytes = b""
    durable: bytes = b""

    def sync(self) -> None:
        """What it holds is durable."""
        self.durable = self.content

    def write(self, kind: str, number: int, data: bytes) -> None:
        """Create, truncate or write; see `file_trace.c`."""
        if kind == "w":
            self.content = (
                self.content[:number].ljust(number, b"\0") + data + self.content[number + len(data) :]
            )
        elif kind == "t":
            self.content = self.content[:number].ljust(number, b"\0")
        elif number:
            self.content = b""


Entries = dict[str, "File | Directory"]


@dataclass(slots=True, eq=False)
class Directory:
    """Entries now, and those that are durable."""

    entries: Entries = field(default_factory=dict)
    durable: Entries = field(default_factory=dict)
    pending: list[dict[str, "File | Directory | None"]] = field(default_factory=list)
    """What led from the durable entries to those of now; None for one that went."""

    def change(self, **entries: "File | Directory | None") -> None:
        """Takes effect at once, is durable after `sync`. File systems make a change wholly or not at all."""
        self.pending.append(entries)
        _change(self.entries, entries)

    def sync(self) -> None:
        """All that was changed is durable."""
        self.durable = dict(self.entries)
        self.pending.clear()

    def some(self, rng: random.Random) -> Entries:
        """What a disk may have: each change or not."""
        found = dict(self.durable)
        for change in self.pending:
            if rng.random() < 0.5:
                _change(found, change)
        return found


def _change(entries: Entries, change: Mapping[str, "File | Directory | None"]) -> None:
    for name, node in change.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


Tree = dict[str, bytes | None]
"""Content by relative path; None is a directory."""


class Disk:
    """The files below one directory."""

    def __init__(self) -> None:
        self.root = Directory()

    def apply(self, operation: Operation) -> None:
        """One more operation."""
        kind, path, other, number, data = operation
        if not path:
            self.root.sync()
            return
        parent, name = self.parent(path)
        match kind:
            case "m":
                parent.change(**{name: Directory()})
            case "u" | "d":
                parent.change(**{name: None})
            case "r":
                target, new_name = self.parent(other)
                node = parent.entries[name]
                if target is parent:
                    parent.change(**{name: None, new_name: node})
                else:
                    parent.change(**{name: None})
                    target.change(**{new_name: node})
            case "f":
                parent.entries[name].sync()
            case _:
                if name not in parent.entries:
                    parent.change(**{name: File()})
                file = parent.entries[name]
                assert isinstance(file, File), path
                file.write(kind, number, data)

    def after_death(self) -> Tree:
        """The process is gone, the kernel is not."""
        return dict(_walk(self.root, "", lambda directory: directory.entries, lambda file: file.content))

    def after_power_loss(self, *, strict: bool) -> Tree:
        """The kernel is gone too."""
        if strict:
            return dict(_walk(self.root, "", lambda directory: directory.durable, lambda file: file.durable))
        return dict(_walk(self.root, "", lambda directory: directory.entries, _torn))

    def after_mixed_power_loss(self, rng: random.Random) -> Tree:
        """Some of what was not synced is there."""
        return dict(
            _walk(self.root, "", lambda directory: directory.some(rng), lambda file: _some(file, rng))
        )

    def parent(self, path: str) -> tuple[Directory, str]:
        """The directory that holds `path`, and the name in it."""
        *parents, name = path.split("/")
        node: File | Directory = self.root
        for parent in parents:
            assert isinstance(node, Directory)
            node = node.entries[parent]
        assert isinstance(node, Directory)
        return node, name


def _torn(file: File) -> bytes:
    return file.content if file.content == file.durable else file.content[: len(file.content) // 2]


def _some(file: File, rng: random.Random) -> bytes:
    """The old content, the new one, nothing, a part of the new one, or zeros where it was not written."""
    if file.content == file.durable:
        return file.content
    cut = rng.randrange(len(file.content) + 1)
    part = file.content[:cut]
    return rng.choice([file.durable, file.content, b"", part, part.ljust(len(file.content), b"\0")])


def _walk(
    directory: Directory,
    prefix: str,
    entries: Callable[[Directory], Entries],
    content: Callable[[File], bytes],
) -> Iterator[tuple[str, bytes | None]]:
    for name, node in entries(directory).items():
        if isinstance(node, File):
            yield prefix + name, content(node)
        else:
            yield prefix + name, None
            yield from _walk(node, f"{prefix}{name}/", entries, content)


def tree_of(directory: Path) -> Tree:
    """What really lies there."""
    found = [path for path in directory.rglob("*") if not path.is_socket()]
    return {str(path.relative_to(directory)): None if path.is_dir() else path.read_bytes() for path in found}


def torn_writes(operation: Operation) -> list[Operation]:
    """The first half of a write: the process may die in it."""
    if operation.kind != "w" or len(operation.data) < 2:
        return []
    return [operation._replace(data=operation.data[: len(operation.data) // 2])]


class Copy:
    """A tree on the real disk, changed as little as possible from one state to the next."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True)
        self._tree: Tree = {}

    def become(self, tree: Tree) -> bool:
        """Make the directory hold `tree`; False when it did already."""
        gone = [
            path
            for path in self._tree
            if path not in tree or (self._tree[path] is None) != (tree[path] is None)
        ]
        for path in sorted(gone, reverse=True):
            (self.directory / path).rmdir() if self._tree[path] is None else (self.directory / path).unlink()
            del self._tree[path]
        new = [path for path in sorted(tree) if path not in self._tree or self._tree[path] != tree[path]]
        for path in new:
            content = tree[path]
            (self.directory / path).mkdir() if content is None else (self.directory / path).write_bytes(
                content
            )
        self._tree = tree
        return bool(gone or new)
