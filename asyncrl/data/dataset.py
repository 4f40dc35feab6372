"""Rows from JSONL, JSON or parquet files or a Hugging Face dataset: mappings from column to value.

A file that cannot be read completely is an error that names the line: with fewer rows, the sample plan would
be another.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, overload

from asyncrl.config.data_section import DataConfig
from asyncrl.errors import DataError
from asyncrl.extras import install_command

Row = Mapping[str, Any]
FORMATS = (".jsonl", ".json", ".parquet")
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
        self._lines = lines

    def place(self, index: int) -> str:
        """Return the position of the row at `index` (from 0) for messages, counted from 1."""
        return f"{self.source}:{self._lines[index]}" if self._lines else f"{self.source}, row {index + 1}"

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
    def _train(self) -> tuple[int, str]:
        rows = load_rows(self._data.train, self._data.split)
        return len(rows), rows.fingerprint

    @property
    def train_rows(self) -> int:
        """Number of rows in data.train."""
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


def load_rows(source: str, split: str = "train") -> Rows:
    """Read a JSONL, JSON or parquet file, or `split` of a Hugging Face dataset, or make rows of `seeds:N`.

    Raises DataError.
    """
    if source.startswith(SEEDS):
        return Rows(_seeds(source), source)
    path = Path(source)
    if not path.is_file():
        if path.suffix in FORMATS or (source.startswith((".", "/")) and not path.is_dir()):
            found = f"dataset {source} does not exist (looked from {Path.cwd()})"
            raise DataError(f"{found}; give a file, a directory or a dataset's name")
        return Rows(_load_hub(source, split), f"{source} [{split}]")
    try:
        match path.suffix:
            case ".jsonl":
                return _read_jsonl(path)
            case ".json":
                return Rows(_read_json(path), str(path))
            case ".parquet":
                return Rows(_read_parquet(path), str(path))
    except OSError as error:
        raise DataError(f"dataset {path} cannot be read: {error.strerror}; give a readable file") from error
    raise DataError(f"dataset {path} has the suffix `{path.suffix}`; supported are {', '.join(FORMATS)}")


def _seeds(source: str) -> list[Row]:
    count = source.removeprefix(SEEDS)
    if not re.fullmatch("[1-9][0-9]{0,6}", count) or int(count) > MOST_SEEDS:
        allowed = f"allowed is {SEEDS}N with N from 1 to {MOST_SEEDS:,}, for example {SEEDS}100000"
        raise DataError(f"found {source:.40}; {allowed}")
    return [{"seed": seed} for seed in range(int(count))]


def _read_jsonl(path: Path) -> Rows:
    rows: dict[int, Row] = {}
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                shown = line.strip()[:80].decode("utf-8", "replace")
                row = _parse(
                    line,
                    f"{path}:{number}",
                    f"found `{shown}`; every line must be one JSON object; correct it",
                )
                rows[number] = _as_row(row, f"{path}:{number}")
    return Rows([*rows.values()], str(path), [*rows])


def _read_json(path: Path) -> list[Row]:
    allowed = "a .json dataset is one array of objects; a .jsonl dataset has one object per line; correct it"
    rows = _parse(path.read_bytes(), str(path), allowed)
    if not isinstance(rows, list):
        raise DataError(f"{path}: found a JSON {type(rows).__name__}; {allowed}")
    return [_as_row(row, f"{path}, row {index}") for index, row in enumerate(rows, start=1)]


def _parse(text: bytes, where: str, expected: str) -> Any:
    try:
        return json.loads(text)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: found bytes that are not UTF-8; save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error}); {expected}") from error


def _as_row(row: object, where: str) -> Row:
    if not isinstance(row, dict):
        found = f"found a JSON {type(row).__name__}, `{str(row)[:80]}`"
        raise DataError(f"{where}: {found}; a row is an object with columns; correct it")
    return row


def _read_parquet(path: Path) -> list[Row]:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError as error:
        raise DataError(f"{path}: reading parquet needs pyarrow; run: {install_command('data')}") from error
    try:
        rows: list[Row] = [_with_sparse_messages(row) for row in parquet.read_table(path).to_pylist()]
    except ArrowInvalid as error:
        cure = "give a parquet, JSON or JSONL file"
        raise DataError(f"{path}: not a parquet file ({error}); {cure}") from error
    return rows


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
    return [_with_sparse_messages(row) for row in rows]


def _with_sparse_messages(row: Row) -> Row:
    """The row with chat messages without nulls: a column of Arrow gives each message the keys of all."""
    return {name: _sparse(value) if _is_chat(value) else value for name, value in row.items()}


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) and "role" in one for one in value)


def _sparse(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _sparse(one) for name, one in value.items() if one is not None}
    return [_sparse(one) for one in value] if isinstance(value, list) else value
