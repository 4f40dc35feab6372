"""Reads one file of rows: JSON lines, JSON, CSV or parquet; JSON lines and CSV also with gzip.

A file that cannot be read completely is an error that names the line: with fewer rows, the sample plan would
be another.
"""

import csv
import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncrl.errors import DataError
from asyncrl.extras import install_command

Row = Mapping[str, Any]
FORMATS = (".jsonl", ".json", ".csv", ".parquet", ".jsonl.gz", ".csv.gz")
# Characters of a value in a CSV file; the default of the library is less than a long prompt.
LONGEST_FIELD = (1 << 31) - 1


def read_file(path: Path) -> tuple[list[Row], list[int] | None]:
    """Return the rows of a file, and the line in which each begins, if its format has lines.

    Raises DataError.
    """
    suffixes = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
    try:
        match suffixes.removesuffix(".gz") if suffixes in FORMATS else None:
            case ".jsonl":
                rows = _read_jsonl(path)
                return [*rows.values()], [*rows]
            case ".csv":
                rows = _read_csv(path)
                return [*rows.values()], [*rows]
            case ".json":
                return _read_json(path), None
            case ".parquet":
                return _read_parquet(path), None
    except OSError as error:
        raise DataError(f"dataset {path} cannot be read: {error.strerror}; give a readable file") from error
    allowed = f"allowed are {', '.join(FORMATS)}; convert the file"
    raise DataError(f"{path}: found the suffix `{suffixes}`; {allowed}")


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the number of each line, from 1, and the line."""
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                yield number, line
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        cure = "make the file again with gzip, or give it unpacked"
        raise DataError(f"{path}:{number + 1}: not a whole gzip file ({error}); {cure}") from error


def _read_jsonl(path: Path) -> dict[int, Row]:
    rows: dict[int, Row] = {}
    for number, line in _lines(path):
        if line.strip():
            shown = line.strip()[:80].decode("utf-8", "replace")
            expected = f"found `{shown}`; every line must be one JSON object; correct it"
            rows[number] = _as_row(_parse(line, f"{path}:{number}", expected), f"{path}:{number}")
    return rows


def _read_csv(path: Path) -> dict[int, Row]:
    """Return the rows of a file whose first row names the columns; every value is text."""
    csv.field_size_limit(LONGEST_FIELD)
    reader = csv.reader((_text(line, path, number) for number, line in _lines(path)), strict=True)
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
    rows = _parse(path.read_bytes(), str(path), allowed)
    if not isinstance(rows, list):
        raise DataError(f"{path}: found a JSON {type(rows).__name__}; {allowed}")
    return [_as_row(row, f"{path}, row {index}") for index, row in enumerate(rows, start=1)]


def _text(line: bytes, path: Path, number: int) -> str:
    try:
        # Some programs mark a file as UTF-8 at its beginning.
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}:{number}: found bytes that are not UTF-8; save the file as UTF-8") from error


def _parse(content: bytes, where: str, expected: str) -> Any:
    try:
        return json.loads(content)
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
        return [with_sparse_messages(row) for row in parquet.read_table(path).to_pylist()]
    except ArrowInvalid as error:
        cure = "give a parquet, JSON or JSONL file"
        raise DataError(f"{path}: not a parquet file ({error}); {cure}") from error


def with_sparse_messages(row: Row) -> Row:
    """Return the row with chat messages without nulls: a column of Arrow gives each message all keys."""
    return {name: _sparse(value) if _is_chat(value) else value for name, value in row.items()}


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) and "role" in one for one in value)


def _sparse(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _sparse(one) for name, one in value.items() if one is not None}
    return [_sparse(one) for one in value] if isinstance(value, list) else value
