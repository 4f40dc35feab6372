"""Reads one file of rows: JSON lines, JSON, CSV or parquet; JSON lines and CSV also with gzip.

JSON lines and parquet stay on disk, and each row is parsed when it is used. A file that cannot be read
completely is an error that names the line: with fewer rows, the sample plan would be another.
"""

import csv
import errno
import gzip
import json
import os
import shutil
import tempfile
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import Any, BinaryIO

from asyncrl.errors import DataError, RowsChanged, install_command
from asyncrl.files import CURES

Row = Mapping[str, Any]
# Arrow's and numpy's names of floats of less than 64 bits.
NARROW = {"float": "float32", "halffloat": "float16"}
FORMATS = (".jsonl", ".json", ".csv", ".parquet", ".jsonl.gz", ".csv.gz")
# Characters of a value in a CSV file; the default of the library is less than a long prompt.
LONGEST_FIELD = (1 << 31) - 1
LINE = "found `{found}`; every line must be one JSON object; correct it"
# Rows that are read together when all are.
BATCH = 1024
FULL = (errno.ENOSPC, errno.EDQUOT)


class Lazy(Sequence[Row]):
    """Rows that are read when they are used: one by its index, or all in order."""

    def __init__(self, size: int, one: Callable[[int], Row], every: Callable[[], Iterator[Row]]) -> None:
        """Take the number of rows, and how they are read."""
        self._size, self._one, self._every = size, one, every

    def __getitem__(self, index: Any) -> Any:
        """Return one row, by an index from 0."""
        return self._one(index)

    def __iter__(self) -> Iterator[Row]:
        return self._every()

    def __len__(self) -> int:
        return self._size


def stored(size: int, read: Callable[[int, int], Iterable[Row]]) -> Lazy:
    """Return rows that `read` reads, from one index up to another."""
    starts = range(0, size, BATCH)
    every = lambda: (row for start in starts for row in read(start, min(start + BATCH, size)))  # noqa: E731
    return Lazy(size, lambda index: next(iter(read(index, index + 1))), every)


def read_file(path: Path) -> tuple[Sequence[Row], Sequence[int] | None]:
    """Return the rows of a file, and the line in which each begins, if its format has lines.

    Raises DataError, also when a row is used that is malformed.
    """
    suffixes = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
    try:
        match suffixes.removesuffix(".gz") if suffixes in FORMATS else None:
            case ".jsonl":
                return _read_jsonl(path)
            case ".csv":
                rows = _read_csv(path)
                return [*rows.values()], [*rows]
            case ".json":
                return _read_json(path), None
            case ".parquet":
                return _read_parquet(path), None
    except OSError as error:
        cure = CURES[errno.EMFILE] if error.errno == errno.EMFILE else "give a readable file"
        if error.errno in FULL:
            cure = f"free space for its copy, in {tempfile.gettempdir()} (TMPDIR) or HF_DATASETS_CACHE"
        raise DataError(f"dataset {path} cannot be read: {error.strerror or error}; {cure}") from error
    allowed = f"allowed are {', '.join(FORMATS)}; convert the file"
    raise DataError(f"{path}: found the suffix `{suffixes}`; {allowed}")


def _opened(path: Path) -> BinaryIO:
    """Open a file; one with gzip is unpacked into a temporary file, where rows have places."""
    if path.suffix != ".gz":
        return path.open("rb")
    file = tempfile.TemporaryFile()  # noqa: SIM115 - rows are read from it
    try:
        with gzip.open(path) as packed:
            shutil.copyfileobj(packed, file)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        file.seek(0)
        cure = "make the file again with gzip, or give it unpacked"
        raise DataError(f"{path}:{len([*file]) + 1}: not a whole gzip file ({error}); {cure}") from error
    file.seek(0)
    return file


def _read_jsonl(path: Path) -> tuple[Lazy, Sequence[int]]:
    file, place = _opened(path), 0
    # Bytes before each row, and at last the size of the file; the number of the line in which it begins.
    starts, lines = array("q"), array("q")
    state = _state(file)
    for number, line in enumerate(file, start=1):
        if not line.isspace():
            starts.append(place)
            lines.append(number)
        place += len(line)
    starts.append(place)

    def read(start: int, stop: int) -> Iterator[Row]:
        if _state(file) != state:
            cure = "restore it, or go on by `asyncrl down` and `asyncrl up` if only its date is another"
            raise RowsChanged(f"{path} changed while a process reads rows from it; {cure}")
        span = os.pread(file.fileno(), starts[stop] - starts[start], starts[start])
        found = (line for line in span.split(b"\n") if line.strip())
        for index, (number, line) in enumerate(zip(lines[start:stop], found, strict=True), start):
            # A program that writes a key twice does so in many rows, and to look at each would slow every
            # reading.
            pairs = _object if index < BATCH else None
            yield _as_row(_parse(line, f"{path}:{number}", LINE, pairs), f"{path}:{number}")

    return stored(len(lines), read), lines


def _state(file: BinaryIO) -> tuple[int, int]:
    found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns


def _read_csv(path: Path) -> dict[int, Row]:
    """Return the rows of a file whose first row names the columns, by their lines; every value is text."""
    csv.field_size_limit(LONGEST_FIELD)
    lines = enumerate(_opened(path), start=1)
    reader = csv.reader((_text(line, path, number) for number, line in lines), strict=True)
    header: list[str] = []
    rows: dict[int, Row] = {}
    while True:
        number = reader.line_num + 1
        try:
            values = next(reader, None)
        except csv.Error as error:
            cure = 'put a value with commas, quotes or line ends into "...", and double a quote in it'
            raise DataError(f"{path}:{number}: not CSV ({error}); {cure}") from error
        if values is None:
            return rows
        if not header:
            header = values
            if values and ("" in header or len({*header}) < len(header)):
                found = f"found the columns {', '.join(f'`{name}`' for name in header)}"
                cure = "the first row names the columns; give each a name of its own"
                raise DataError(f"{path}:{number}: {found}; {cure}")
        elif values:
            if len(values) != len(header):
                found = f"found {len(values)} values for {len(header)} columns ({', '.join(header)})"
                raise DataError(f'{path}:{number}: {found}; put a value with commas into "..."')
            rows[number] = dict(zip(header, values, strict=True))


def _read_json(path: Path) -> list[Row]:
    allowed = "a .json dataset is one array of objects; a .jsonl dataset has one object per line; correct it"
    rows = _parse(path.read_bytes(), str(path), allowed, _object)
    if not isinstance(rows, list):
        raise DataError(f"{path}: found a JSON {type(rows).__name__}; {allowed}")
    return [_as_row(row, f"{path}, row {index}") for index, row in enumerate(rows, start=1)]


def _text(line: bytes, path: Path, number: int) -> str:
    try:
        # Some programs mark a file as UTF-8 at its beginning.
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}:{number}: found bytes that are not UTF-8; save the file as UTF-8") from error


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises KeyError for a key that is there twice, of which `json` takes the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise KeyError(next(name for name in names if names.count(name) > 1))
    return found


def _parse(content: bytes, where: str, expected: str, pairs: Callable[[Any], Any] | None = None) -> Any:
    try:
        return json.loads(content, object_pairs_hook=pairs)
    except KeyError as error:
        found = f"found the key `{error.args[0]}` twice in one object, of which the last one counted so far"
        raise DataError(f"{where}{_row(content)}: {found}; remove the earlier one") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: found bytes that are not UTF-8; save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        shown = content.strip()[:80].decode("utf-8", "replace")
        raise DataError(f"{where}: not JSON ({error}); {expected.format(found=shown)}") from error


def _row(content: bytes) -> str:
    """Name the first row of a JSON array that has a key twice in one object; empty if it is no array."""
    text, number = content.decode(json.detect_encoding(content)).lstrip(), 0
    if not text.startswith("["):
        return ""
    decoder, at = json.JSONDecoder(object_pairs_hook=_object), 1
    with suppress(KeyError):
        while True:
            number += 1
            while text[at].isspace() or text[at] == ",":
                at += 1
            _, at = decoder.raw_decode(text, at)
    return f", row {number}"


def _as_row(row: object, where: str) -> Row:
    if not isinstance(row, dict):
        found = f"found a JSON {type(row).__name__}, `{str(row)[:80]}`"
        raise DataError(f"{where}: {found}; a row is an object with columns; correct it")
    return row


def _read_parquet(path: Path) -> Sequence[Row]:
    try:
        import datasets
        from pyarrow.parquet import read_metadata
    except ImportError as error:
        raise DataError(f"{path}: reading parquet needs datasets; run: {install_command('data')}") from error
    try:
        datasets.disable_progress_bars()
        is_empty = not read_metadata(path).num_rows
        # A name may hold what is a pattern to `datasets`.
        return [] if is_empty else arrow_rows(datasets.Dataset.from_parquet(escape(str(path))), str(path))
    except (ValueError, datasets.exceptions.DatasetGenerationError) as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in FULL:
            raise error.__cause__ from None
        cure = "write texts, numbers, lists and structs, or give a JSON or JSONL file"
        raise DataError(f"{path}: not a parquet file of rows ({error.__cause__ or error}); {cure}") from error


def arrow_rows(dataset: Any, source: str) -> Lazy:
    """Return the rows of a `datasets.Dataset`, which are in a memory-mapped file; messages name `source`."""
    # As Arrow: `datasets` would decode each image.
    found = dataset.with_format("arrow")
    # The loader of `datasets` keeps values of several types as JSON.
    kept = {one.name: one.type for one in dataset.features.arrow_schema}
    kinds = {name: kind for name, kind in kept.items() if "arrow.json" in str(kind) or "float" in str(kind)}

    def parsed(row: Row) -> Row:
        row = with_sparse_messages(row)
        return {**row, **{name: _parsed(row[name], kind) for name, kind in kinds.items()}}

    def read(start: int, stop: int) -> Iterator[Row]:
        try:
            return map(parsed, found[start:stop].to_pylist())
        except (ValueError, OverflowError) as error:
            where = f"{source}, rows {start + 1} to {stop}"
            raise DataError(f"{where}: found what no Python value is ({error}); correct it") from error

    return stored(len(found), read)


def _parsed(value: Any, kind: Any) -> Any:
    """Return a value of an Arrow type with the JSON in it parsed; what is no JSON stays text.

    A float has the digits that its own width needs: 0.1 in 32 bits is not 0.10000000149011612.
    """
    if isinstance(value, dict):
        return {name: _parsed(one, kind.field(name).type) for name, one in value.items()}
    if isinstance(value, list):
        return [_parsed(one, kind.value_type) for one in value]
    if isinstance(value, float) and str(kind) in NARROW and not value.is_integer():
        import numpy as np

        return float(str(np.dtype(NARROW[str(kind)]).type(value)))
    with suppress(ValueError, RecursionError):
        return json.loads(value) if isinstance(value, str) and "arrow.json" in str(kind) else value
    return value


def with_sparse_messages(row: Row) -> Row:
    """Return the row with chat messages without nulls: a column of Arrow gives each message all keys."""
    return {
        name: _sparse(value)
        if isinstance(value, list) and all(isinstance(one, dict) and "role" in one for one in value)
        else value
        for name, value in row.items()
    }


def _sparse(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _sparse(one) for name, one in value.items() if one is not None}
    return [_sparse(one) for one in value] if isinstance(value, list) else value
