"""Rows from files or a Hugging Face dataset: mappings from column to value."""

import hashlib
import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import overload

from asyncrl.config.data_section import DataConfig
from asyncrl.config.named_files import WILD, local_files
from asyncrl.data.row_files import FORMATS, Row, read_file, with_sparse_messages
from asyncrl.errors import DataError
from asyncrl.extras import install_command

# Begins a source of rows `{seed: 0}`, `{seed: 1}`, ... for environments that make their tasks.
SEEDS, MOST_SEEDS = "seeds:", 1_000_000


class Rows(Sequence[Row]):
    """The rows of one dataset, in order."""

    def __init__(self, rows: Sequence[Row], source: str, lines: Sequence[int] | None = None) -> None:
        """`source` is the origin of the rows in messages; `lines` are their line numbers, if any."""
        if not rows:
            raise DataError(f"{source} holds no rows; write at least one")
        self._rows = rows
        self.source = source
        # Index of the first row of each file, its name, and its line numbers.
        self._files = [(0, source, lines)]

    @classmethod
    def joined(cls, parts: Sequence["Rows"], source: str = "data.train") -> "Rows":
        """Return the rows of all parts, in order, with the places that they have there."""
        if len(parts) == 1:
            return parts[0]
        rows = cls([row for part in parts for row in part], source)
        starts = accumulate((len(part) for part in parts), initial=0)
        rows._files = [
            (start + at, name, lines)
            for start, part in zip(starts, parts, strict=False)
            for at, name, lines in part._files
        ]
        return rows

    def first(self, limit: int | None) -> "Rows":
        """Return the first rows, at most so many; None keeps all."""
        rows = Rows(self._rows[:limit], self.source)
        rows._files = [file for file in self._files if file[0] < len(rows)]
        return rows

    def _file(self, index: int) -> tuple[str, int, Sequence[int] | None]:
        """Return the name of the file with the row, the row's index there, and the file's line numbers."""
        start, name, lines = self._files[bisect_right(self._files, index, key=itemgetter(0)) - 1]
        return name, index - start, lines

    def place(self, index: int) -> str:
        """Return the position of the row at `index` (from 0) for messages, counted from 1."""
        name, at, lines = self._file(index)
        return f"{name}:{lines[at]}" if lines else f"{name}, row {at + 1}"

    def directory(self, index: int) -> Path:
        """Return the directory of the row's file, to which paths in the row are relative."""
        return Path(self._file(index)[0]).parent

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


class DataFiles:
    """Number and fingerprint of the rows that a config names.

    Each file is read once, when its property is first used; that raises DataError. No row is kept.
    """

    def __init__(self, data: DataConfig) -> None:
        self._data = data

    @property
    def train(self) -> str:
        """Fingerprint of data.train."""
        return self._train[1]

    @cached_property
    def _train(self) -> tuple[list[int], str]:
        rows = load_train(self._data)
        return [len(part) for part in rows], fingerprint_of(self._data, rows)

    @property
    def train_rows(self) -> list[int]:
        """Number of rows in each source of data.train."""
        return self._train[0]

    @property
    def held_out_rows(self) -> int:
        """Number of rows in data.eval; 0 without one."""
        return self._held_out[0] if self._held_out else 0

    @property
    def fingerprint(self) -> str:
        """Fingerprint of both, which must be the same in generators."""
        return fingerprints(self.train, self._held_out and self._held_out[1])

    @cached_property
    def _held_out(self) -> tuple[int, str] | None:
        if self._data.eval is None:
            return None
        rows = load_rows(self._data.eval, self._data.eval_split)
        return len(rows), rows.fingerprint


def load_train(data: DataConfig) -> list[Rows]:
    """Return the rows of each source of data.train. Raises DataError."""
    return [load_rows(source.path, data.split).first(source.limit) for source in data.train]


def load_rows(source: str, split: str = "train") -> Rows:
    """Read a file, all files that a pattern matches, or `split` of a Hugging Face dataset, or make `seeds:N`.

    Raises DataError.
    """
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
