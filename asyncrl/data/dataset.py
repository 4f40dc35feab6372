"""Rows from files or a Hugging Face dataset: mappings from column to value."""

import hashlib
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import overload

from asyncrl.config.data_section import DataConfig
from asyncrl.config.named_files import WILD, local_files
from asyncrl.data.row_files import FORMATS, Row, read_file, with_sparse_messages
from asyncrl.errors import DataError
from asyncrl.extras import install_command

# Begins a source of rows `{seed: 0}`, `{seed: 1}`, ... for environments that make their tasks.
SEEDS, MOST_SEEDS = "seeds:", 1_000_000

Origin = tuple[str, int, Sequence[int] | None]


class Rows(Sequence[Row]):
    """The rows of one dataset, in order."""

    def __init__(self, rows: Sequence[Row], source: str, lines: Sequence[int] | None = None) -> None:
        """`source` is the origin of the rows in messages; `lines` are their line numbers, if any."""
        if not rows:
            raise DataError(f"{source} holds no rows; write at least one")
        self._rows = rows
        self.source = source
        # Index of a row -> the name of its file, its index there, and the file's line numbers.
        self._origin: Callable[[int], Origin] = lambda index: (source, index, lines)

    @classmethod
    def joined(cls, parts: Sequence["Rows"], source: str = "data.train") -> "Rows":
        """Return the rows of all parts, in order, with the places that they have there."""
        if len(parts) == 1:
            return parts[0]
        rows = cls([row for part in parts for row in part], source)
        starts = [*accumulate((len(part) for part in parts), initial=0)]

        def origin(index: int) -> Origin:
            part = bisect_right(starts, index) - 1
            return parts[part]._origin(index - starts[part])

        rows._origin = origin
        return rows

    def only(self, indices: Sequence[int]) -> "Rows":
        """Return these rows, with the places that they have here."""
        rows = Rows([self._rows[index] for index in indices], self.source)
        rows._origin = lambda index: self._origin(indices[index])
        return rows

    def place(self, index: int) -> str:
        """Return the position of the row at `index` (from 0) for messages, counted from 1."""
        name, at, lines = self._origin(index)
        return f"{name}:{lines[at]}" if lines else f"{name}, row {at + 1}"

    def directory(self, index: int) -> Path:
        """Return the directory of the row's file, to which paths in the row are relative."""
        return Path(self._origin(index)[0]).parent

    @property
    def fingerprint(self) -> str:
        """Number of rows and a digest of their content in this order, independent of the file's path.

        Of a value that JSON does not have (an image, a date), only the type enters.
        """
        digest = hashlib.blake2b(digest_size=8)
        for row in self._rows:
            digest.update(json.dumps(row, default=lambda value: type(value).__name__).encode() + b"\n")
        return f"{len(self)} rows with digest {digest.hexdigest()}"

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)


def fingerprint_of(data: DataConfig, train: Sequence[Rows]) -> str:
    """Return the fingerprint of data.train: that of its rows or, of several sources, also of their shares."""
    systems = [source.system for source in data.train]
    if systems == [None]:
        return train[0].fingerprint
    found = [[rows.fingerprint, str(share)] for rows, share in zip(train, data.shares, strict=True)]
    digest = hashlib.blake2b(json.dumps([found, systems]).encode(), digest_size=8).hexdigest()
    each = ", ".join(f"{share} of {len(rows)} rows" for rows, share in zip(train, data.shares, strict=True))
    # A message may cut off the end.
    return f"sources with digest {digest}: {each}"


def fingerprints(train: str, held_out: str | None) -> str:
    """Return one fingerprint for the fingerprints of data.train and, if there is one, data.eval."""
    return train if held_out is None else f"{train}, and held out {held_out}"


def load_train(data: DataConfig) -> list[Rows]:
    """Return the rows of each source of data.train. Raises DataError."""
    return [load_rows(source.path, data.split, source.limit) for source in data.train]


def load_rows(source: str, split: str = "train", limit: int | None = None) -> Rows:
    """Return the rows of a source, at most the first `limit`. Raises DataError."""
    rows = _read(source, split)
    return rows if limit is None else rows.only(range(min(limit, len(rows))))


def _read(source: str, split: str) -> Rows:
    """Read a file, the files that a pattern matches, or a Hugging Face dataset, or make rows of `seeds:N`."""
    if source.startswith(SEEDS):
        return Rows(_seeds(source), source)
    if files := local_files(source):
        parts = [Rows(rows, str(path), lines) for path in files for rows, lines in [read_file(path)]]
        return Rows.joined(parts, source)
    path = Path(source)
    is_path = source.endswith(FORMATS) or (source.startswith((".", "/")) and not path.is_dir())
    if is_path or WILD & set(source):
        found = f"dataset {source} does not exist (looked from {Path.cwd()})"
        raise DataError(f"{found}; give a file, a pattern, a directory or a dataset's name")
    return Rows(_load_hub(source, split), f"{source} [{split}]")


def _seeds(source: str) -> list[Row]:
    count = source.removeprefix(SEEDS)
    if not re.fullmatch("[1-9][0-9]{0,6}", count) or int(count) > MOST_SEEDS:
        allowed = f"allowed is {SEEDS}N with N from 1 to {MOST_SEEDS:,}, for example {SEEDS}100000"
        raise DataError(f"found {source:.40}; {allowed}")
    return [{"seed": seed} for seed in range(int(count))]


def _load_hub(source: str, split: str) -> Sequence[Row]:
    try:
        import datasets
    except ImportError as error:
        needed = "so it would be a Hugging Face dataset, which needs the package `datasets`"
        cure = f"run: {install_command('data')}, or give a file"
        raise DataError(f"dataset {source} is not a {', '.join(FORMATS)} file, {needed}; {cure}") from error
    name, _, part = source.partition(":")
    try:
        # As Arrow: `datasets` would decode each image.
        rows = datasets.load_dataset(name, part or None, split=split).with_format("arrow")[:].to_pylist()
    except (OSError, ValueError) as error:  # unknown names, unknown splits, broken files
        raise DataError(f"dataset {source}, split `{split}`: {error}") from error
    return [with_sparse_messages(row) for row in rows]
