"""What a process does to files, written down while it runs, and every state that a crash in between may leave.

`record` runs a command under `file_trace.c`. `Disk` replays the operations one by one and can be asked at any point what is
there after the process died (everything up to that point), or after the machine lost its power:

    strict   only what was fsynced: content of files, and entries of directories
    torn     all entries, but content that was not fsynced is cut in half: what file systems with delayed allocation leave
"""

import os
import shutil
import struct
import subprocess
from collections.abc import Iterator, Sequence
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


def record(command: Sequence[str], root: Path, work: Path, *, timeout_s: float) -> list[Operation]:
    """Run `command` and return what it did below `root`, relative to it. Raises CalledProcessError when it fails."""
    assert COMPILER is not None, "a C compiler is needed"
    library, trace = work / "file_trace.so", work / "trace"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl", "-lpthread"], check=True)
    root = root.resolve()
    settings = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    environment = os.environ | settings | {"LD_PRELOAD": str(library), "TRACE_ROOT": str(root), "TRACE_LOG": str(trace)}
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
        yield Operation(kind, path.removeprefix(root).lstrip("/"), other.removeprefix(root).lstrip("/"), number, take(size))


@dataclass(slots=True, eq=False)
class File:
    """Content now, and what is durable of it."""

    content: bytes = b""
    durable: bytes = b""


@dataclass(slots=True, eq=False)
class Directory:
    """Entries now, and those that are durable."""

    entries: dict[str, "File | Directory"] = field(default_factory=dict)
    durable: dict[str, "File | Directory"] = field(default_factory=dict)


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
            self.root.durable = dict(self.root.entries)
            return
        parent, name = self.parent(path)
        match kind:
            case "m":
                parent.entries[name] = Directory()
            case "u" | "d":
                del parent.entries[name]
            case "r":
                target, new_name = self.parent(other)
                target.entries[new_name] = parent.entries.pop(name)
            case "f":
                node = parent.entries[name]
                if isinstance(node, File):
                    node.durable = node.content
                else:
                    node.durable = dict(node.entries)
            case _:
                file = parent.entries.setdefault(name, File())
                assert isinstance(file, File), path
                if kind == "w":
                    file.content = file.content[:number].ljust(number, b"\0") + data + file.content[number + len(data) :]
                elif kind == "t":
                    file.content = file.content[:number].ljust(number, b"\0")
                elif number:
                    file.content = b""

    def after_death(self) -> Tree:
        """The process is gone, the kernel is not."""
        return dict(_walk(self.root, "", durable_entries=False, content=lambda file: file.content))

    def after_power_loss(self, *, strict: bool) -> Tree:
        """The kernel is gone too."""
        if strict:
            return dict(_walk(self.root, "", durable_entries=True, content=lambda file: file.durable))
        return dict(_walk(self.root, "", durable_entries=False, content=_torn))

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


def _walk(directory, prefix, *, durable_entries, content):
    for name, node in (directory.durable if durable_entries else directory.entries).items():
        if isinstance(node, File):
            yield prefix + name, content(node)
        else:
            yield prefix + name, None
            yield from _walk(node, f"{prefix}{name}/", durable_entries=durable_entries, content=content)


def tree_of(directory: Path) -> Tree:
    """What really lies there."""
    return {str(p.relative_to(directory)): None if p.is_dir() else p.read_bytes() for p in directory.rglob("*")}


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
        gone = [path for path in self._tree if path not in tree or (self._tree[path] is None) != (tree[path] is None)]
        for path in sorted(gone, reverse=True):
            (self.directory / path).rmdir() if self._tree[path] is None else (self.directory / path).unlink()
            del self._tree[path]
        new = [path for path in sorted(tree) if path not in self._tree or self._tree[path] != tree[path]]
        for path in new:
            content = tree[path]
            (self.directory / path).mkdir() if content is None else (self.directory / path).write_bytes(content)
        self._tree = tree
        return bool(gone or new)
