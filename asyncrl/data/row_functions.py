"""Filters and maps rows by functions of the user's file, which run in a process of their own.

The process has no secrets, and is killed if it hangs. Each message to it holds rows. Its answer says what
became of each: false if the filter leaves it out, true if it stays as it is, or the row that the map made.

    python -m asyncrl.data.row_functions SOCKET PARENT_PID
"""

import logging
import os
import socket
import sys
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

import msgpack

from asyncrl.config.data_section import DataConfig, DataSource, EvalSet
from asyncrl.data.dataset import Rows, load_rows
from asyncrl.data.reader import with_messages
from asyncrl.data.row_files import Lazy, Row
from asyncrl.errors import DataError, as_unicode
from asyncrl.hosting.processes import die_with_parent, join_outputs
from asyncrl.hosting.progress import beat
from asyncrl.hosting.workers import Worker, as_column, pack, receive
from asyncrl.plugins import described, load

log = logging.getLogger(__name__)

# Rows of a message, and the limit for its answer.
TOGETHER, LIMIT_S = 64, 120.0
# Limit for the process to start and to load the functions.
START_S = 60.0
MAPPED = "a mapping from columns to values of JSON (integers of 64 bits), or bytes"


def load_parts(data: DataConfig, parts: Iterable[DataSource | EvalSet]) -> list[Rows]:
    """Return the rows of each source or set. Raises DataError."""
    # The `limit` of a set counts prompts, so it cuts behind those that are dropped, as `eval.prompts` does.
    cut = (DataSource,) if data.long_prompts == "drop" else (DataSource, EvalSet)
    limits = ((one, one.limit if isinstance(one, cut) else None) for one in parts)
    return [load_part(data.of(one), one.path, data.split_of(one), limit) for one, limit in limits]


def load_part(data: DataConfig, source: str, split: str, limit: int | None = None) -> Rows:
    """Return at most `limit` rows that `data.filter` keeps, as `data.map` and `with_messages` make them.

    Raises DataError that names function and row.
    """
    rows, taken = _chosen(data, source, split, limit), Counter[str]()
    size, made = len(rows), partial(with_messages, data=data, taken=taken)
    found = rows.only(range(size), Lazy(size, lambda index: made(rows[index]), lambda: map(made, rows)))
    found.taken = taken
    return found


def _chosen(data: DataConfig, source: str, split: str, limit: int | None) -> Rows:
    rows = load_rows(source, split)
    if data.filter is None and data.map is None:
        return rows if limit is None else rows.only(range(min(limit, len(rows))))
    kept, starts, file = array("q"), array("q", [0]), tempfile.TemporaryFile()  # noqa: SIM115 - rows stay in it
    most = len(rows) if limit is None else limit
    for index, found in _results(rows, data):
        if len(kept) == most:
            break
        if found is not False:
            kept.append(index)
            starts.append(starts[-1] + (file.write(msgpack.packb(found)) if data.map else 0))
    file.flush()
    if data.filter is not None:
        # Behind the last one of a full number none was looked at.
        looked = f"{kept[-1] + 1 if len(kept) == most else len(rows):,}"
        log.info("%s of %s rows of %s kept by %s", f"{len(kept):,}", looked, rows.source, data.filter)
        if not kept:
            raise DataError(
                f"data.filter: {data.filter} keeps none of the {len(rows):,} rows of {rows.source}"
            )

    def made(index: int) -> Row:
        row: Row = msgpack.unpackb(os.pread(file.fileno(), starts[index + 1] - starts[index], starts[index]))
        return row

    size = len(kept)
    return rows.only(kept, Lazy(size, made, lambda: map(made, range(size))) if data.map else None)


def _results(rows: Rows, data: DataConfig) -> Iterator[tuple[int, Any]]:
    """Yield the index of each row, and what became of it."""
    worker = Worker(__name__)
    try:
        _ask(worker, {"filter": data.filter, "map": data.map}, rows, 0)
        ordered = iter(rows)
        for first in range(0, len(rows), TOGETHER):
            some = [*islice(ordered, TOGETHER)]
            yield from enumerate(_ask(worker, {"rows": some}, rows, first), first)
    finally:
        worker.end()


def _ask(worker: Worker, message: Mapping[str, Any], rows: Rows, first: int) -> list[Any]:
    """Return the answer to a message with the rows from `first` on. Raises DataError."""
    last = first + len(message.get("rows", (0,))) - 1
    limit_s = LIMIT_S if "rows" in message else START_S
    where = f"rows {first + 1} to {last + 1} of {rows.source}, the first at {rows.place(first)}"
    try:
        # A row of JSON may hold half of a surrogate pair.
        packed = msgpack.packb(message, default=as_column, unicode_errors="surrogatepass")
        reply = msgpack.unpackb(worker.ask(packed, limit_s, beat))
    except TimeoutError:
        raise DataError(f"data.filter or data.map took longer than {limit_s:g} s for {where}") from None
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"the process of data.filter and data.map ended at {where} ({error})") from error
    if "error" in reply:
        at = f" at row {first + reply['at'] + 1} ({rows.place(first + reply['at'])})" if "at" in reply else ""
        row = f", `{str(rows[first + reply['at']])[:80]}`" if at else ""
        raise DataError(f"data.{reply['key']}: {reply['error']}{at}{row}; correct the function or the row")
    found: list[Any] = reply["found"]
    return found


def _serve(channel: socket.socket) -> None:
    requests, functions = channel.makefile("rb"), dict[str, Callable[[Row], Any]]()
    for key, name in msgpack.unpackb(receive(requests)).items():
        try:
            functions |= {key: load(name)} if name else {}
        except ImportError as error:
            said = f"{name} cannot be loaded: {as_unicode(str(error))}"
            return channel.sendall(pack({"key": key, "error": said}))
    channel.sendall(pack({"found": []}))
    while True:
        found: list[Any] = []
        hooks = {"unicode_errors": "surrogatepass", "ext_hook": lambda code, digits: int(digits)}
        for row in msgpack.unpackb(receive(requests), **hooks)["rows"]:
            result: Any = True
            for key, function in functions.items():
                name = getattr(function, "__name__", key)
                try:
                    result = function(row)
                    if wrong := _wrong(key, result):
                        raise DataError(wrong)
                except BaseException as error:  # noqa: BLE001 - user code may raise even SystemExit
                    said = str(error) if isinstance(error, DataError) else f"raised {described(error)}"
                    reply = {"key": key, "error": as_unicode(f"`{name}` {said}"[:2000]), "at": len(found)}
                    return channel.sendall(pack(reply))
                if result is False:
                    break
            found.append(result)
        channel.sendall(pack({"found": found}))


def _wrong(key: str, result: Any) -> str:
    """Say what is wrong with a result; empty if nothing is."""
    # The type `bool` of NumPy is another.
    kind = f"{type(result).__module__}.{type(result).__name__}".removeprefix("builtins.")
    if key == "filter":
        return "" if isinstance(result, bool) else f"returned a {kind}; allowed are True and False"
    if not isinstance(result, dict) or not all(isinstance(name, str) for name in result):
        return f"returned a {kind}; allowed is {MAPPED}"
    try:
        msgpack.unpackb(msgpack.packb(result))
    except (TypeError, ValueError, OverflowError) as error:
        return f"returned a row that cannot be stored ({error}); allowed is {MAPPED}"
    return ""


def main() -> None:
    """Serve one process until it closes the channel."""
    die_with_parent(int(sys.argv[2]))
    # What user code prints is for people, and its standard output may be a command's result.
    join_outputs()
    with socket.socket(fileno=int(sys.argv[1])) as channel, suppress(EOFError, ConnectionError):
        _serve(channel)


if __name__ == "__main__":
    main()
