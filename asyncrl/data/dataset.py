"""Rows from files or a Hugging Face dataset: mappings from column to value."""

import hashlib
import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain, repeat
from pathlib import Path
from typing import Any

from asyncrl.config.data_section import DataConfig
from asyncrl.config.named_files import SEEDS, WILD, local_files
from asyncrl.data.row_files import FORMATS, Lazy, Row, arrow_rows, read_file, stored
from asyncrl.errors import DataError, install_command

MOST_SEEDS = 1_000_000
# Rows of each source that are looked at before a run begins.
CHECKED = 10_000

Origin = tuple[str, int, Sequence[int] | None]


class Rows(Sequence[Row]):
    """The rows of one dataset, in order. A row is read when it is used, which raises DataError."""

    def __init__(
        self,
        rows: Sequence[Row],
        source: str,
        lines: Sequence[int] | None = None,
        origin: Callable[[int], Origin] | None = None,
    ) -> None:
        """`source` is the origin of the rows in messages; `lines` are their line numbers, if any.

        `origin` gives the name of a row's file, its index there, and the file's line numbers.
        """
        if not rows:
            raise DataError(f"{source} holds no rows; write at least one")
        self._rows, self.source = rows, source
        # Of the rows that were read, those whose last answer `with_messages` took, and the new answers.
        self.taken: Counter[str] = Counter()
        self._origin = origin or (lambda index: (source, index, lines))

    @classmethod
    def joined(cls, parts: Sequence["Rows"], source: str = "data.train") -> "Rows":
        """Return the rows of all parts, in order, with the places that they have there."""
        if len(parts) == 1:
            return parts[0]
        starts = [*accumulate((len(part) for part in parts), initial=0)]

        def at(index: int, read: Callable[["Rows", int], Any]) -> Any:
            part = bisect_right(starts, index) - 1
            return read(parts[part], index - starts[part])

        rows = Lazy(starts[-1], lambda index: at(index, cls.__getitem__), lambda: chain(*parts))
        return cls(rows, source, origin=lambda index: at(index, lambda part, own: part._origin(own)))

    def only(self, indices: Sequence[int], rows: Sequence[Row] | None = None) -> "Rows":
        """Return the rows at these indices, which rise, or `rows` in place of them, with their places."""

        def marks() -> Iterator[bool]:
            before = -1
            for index in indices:
                yield from repeat(False, index - before - 1)
                yield True
                before = index

        found = Lazy(
            len(indices),
            lambda index: self[indices[index]],
            lambda: (row for is_meant, row in zip(marks(), self, strict=False) if is_meant),
        )
        return Rows(rows or found, self.source, origin=lambda index: self._origin(indices[index]))

    def place(self, index: int) -> str:
        """Return the position of the row at `index` (from 0) for messages, counted from 1."""
        name, at, lines = self._origin(index)
        return f"{name}:{lines[at]}" if lines else f"{name}, row {at + 1}"

    def directory(self, index: int) -> Path:
        """Return the directory of the row's file, to which paths in the row are relative."""
        return Path(self._origin(index)[0]).parent

    @property
    def checked(self) -> range:
        """The indices of rows that are looked at before a run begins: all, or `CHECKED` spread over them."""
        return range(0, len(self), -(-len(self) // CHECKED))

    @property
    def fingerprint(self) -> str:
        """Number of rows and a digest of their content in this order, independent of the file's path.

        Of a value that JSON does not have (an image, a date), only the type enters.
        """
        digest = hashlib.blake2b(digest_size=8)
        encode = json.JSONEncoder(default=lambda value: type(value).__name__).encode
        for row in self:
            digest.update(encode(row).encode() + b"\n")
        return f"{len(self)} rows with digest {digest.hexdigest()}"

    def __getitem__(self, index: Any) -> Any:
        return self._rows[range(len(self))[index]]

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
    return f"sources with digest {digest}: {each}"


def fingerprints(train: str, held_out: Sequence[str]) -> str:
    """Return one fingerprint for those of data.train and of each set of data.eval."""
    text = f"{train}, and held out {'; '.join(held_out)}" if held_out else train
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    # A generator's greeting carries texts of at most 300 characters.
    return text if len(text) <= 300 else f"data with digest {digest}: {text[:250]}..."


def load_rows(source: str, split: str = "train") -> Rows:
    """Open a file, the files that a pattern matches, or a Hugging Face dataset, or make rows of `seeds:N`.

    Raises DataError.
    """
    if source.startswith(SEEDS):
        count = source.removeprefix(SEEDS)
        if not re.fullmatch("[1-9][0-9]{0,6}", count) or int(count) > MOST_SEEDS:
            allowed = f"allowed is {SEEDS}N with N from 1 to {MOST_SEEDS:,}, for example {SEEDS}100000"
            raise DataError(f"found {source:.40}; {allowed}")
        made = stored(int(count), lambda start, stop: [{"seed": seed} for seed in range(start, stop)])
        return Rows(made, source)
    if files := local_files(source):
        parts = [Rows(rows, str(path), lines) for path in files for rows, lines in [read_file(path)]]
        return Rows.joined(parts, source)
    path = Path(source)
    is_path = source.endswith(FORMATS) or (source.startswith((".", "/")) and not path.is_dir())
    if is_path or WILD & set(source):
        found = f"dataset {source} does not exist (looked from {Path.cwd()})"
        raise DataError(f"{found}; give a file, a pattern, a directory or a dataset's name")
    # Paths in the rows of a directory are relative to it.
    name = f"{path}/" if path.is_dir() else source
    return Rows(_load_hub(source, split), f"{name} [{split}]")


def _load_hub(source: str, split: str) -> Sequence[Row]:
    try:
        import datasets
    except ImportError as error:
        needed = "so it would be a Hugging Face dataset, which needs the package `datasets`"
        cure = f"run: {install_command('data')}, or give a file"
        raise DataError(f"dataset {source} is not a {', '.join(FORMATS)} file, {needed}; {cure}") from error
    whole, _, revision = source.partition("@")
    name, _, part = whole.partition(":")
    if Path(source).is_dir():  # it may have such a name
        name, part, revision = source, "", ""
    try:
        found = datasets.load_dataset(name, part or None, split=split, revision=revision or None)
    # Unknown names, broken files, loading scripts.
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        said = str(error.__cause__ or error).replace("use `load_from_disk`", "write it by `to_parquet`")
        raise DataError(f"dataset {source}, split `{split}`: {said}") from error
    return arrow_rows(found, source)
