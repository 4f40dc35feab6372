"""`asyncrl scale`: changes the number of generators. The command writes it, and the supervisor follows."""

import contextlib
import json
import logging
import re
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Self

from asyncrl.cluster.plans import GENERATORS
from asyncrl.errors import RunError
from asyncrl.files import read_record, replace_text
from asyncrl.hosting.children import ProcessSpec
from asyncrl.hosting.supervisor import Supervisor
from asyncrl.run.directory import RunDirectory, find_run
from asyncrl.run.lock import is_locked

log = logging.getLogger(__name__)

PREFIX = "g"
MOST = 1024  # generators on one host: a larger number is a typing error
FOLLOW_S = 60.0  # seconds that the supervisor has to start or drain generators


class Scaled:
    """The generators of one supervisor. `asyncrl scale` works while this context manager is open."""

    def __init__(
        self,
        supervisor: Supervisor,
        make: Callable[[int, int, Collection[str]], ProcessSpec],
        path: Path,
        kept: Path,
        *,
        prefix: str = PREFIX,
        each: int = 1,
    ) -> None:
        """Start as many generators as the file at `path` says, with `each` of them in what `make` describes.

        `make(index, number, names running)` raises RunError without room. `kept` has the next start's number.
        """
        self._supervisor, self._make, self._path, self._kept = supervisor, make, path, kept
        self._prefix, self._each = prefix, each
        self._wanted = self._configured = 0
        self._started: set[str] = set()

    def begin(self, count: int) -> None:
        """Start `count` generators, or as many as an earlier start with that `count` was scaled to.

        With 0, generators join by themselves and scaling is refused.
        """
        self._configured = count
        if count:
            of = (read_record(self._kept) or {}).get("of")
            kept = _read_wanted(self._kept) if of == count else None
            self._grow(min(count, kept or count), is_extra=False)
            if kept is None:  # the config has changed, and counts
                _forget(self._kept)
            elif kept > count:
                self._write(kept)

    def tend(self) -> None:
        """Follow the number in the file, and correct it if a generator could not be started."""
        staying = [name for name, stays in self._supervisor.names.items() if stays and name in self._started]
        if len(staying) < self._wanted:  # the supervisor has given up an extra generator
            self._write(len(staying))
            self._wanted = len(staying)
        written = _read_wanted(self._path)
        wanted = None if written is None else written // self._each
        if wanted is None and self._wanted:
            self._write(self._wanted)
        if wanted is None or wanted == self._wanted:
            return
        log.info("generators: %d -> %d", self._wanted, wanted)
        if wanted > self._wanted:
            try:
                self._grow(wanted, is_extra=True)
            except RunError as error:
                log.warning("%s", error)
                self._write(self._wanted, refused=str(error))
                return
        else:
            for name in sorted(staying, key=_index)[wanted:]:
                self._supervisor.drain(name)
            self._wanted = wanted
        replace_text(self._kept, json.dumps({"generators": wanted, "of": self._configured}))

    def __enter__(self) -> Self:
        _forget(self._path)  # a run that was killed may have left the file
        return self

    def __exit__(self, *_: object) -> None:
        _forget(self._path)

    def _write(self, wanted: int, refused: str = "") -> None:
        _write_wanted(self._path, wanted * self._each, refused=refused, each=self._each)

    def _grow(self, wanted: int, *, is_extra: bool) -> None:
        taken = self._supervisor.names  # with the names of generators that are leaving
        free = (index for index in range(2 * MOST) if f"{self._prefix}{index}" not in taken)
        specs: list[ProcessSpec] = []
        for _ in range(wanted - self._wanted):
            running = {*taken, *(spec.name for spec in specs)}
            specs.append(replace(self._make(next(free), wanted, running), is_extra=is_extra))
        for spec in specs:
            self._supervisor.add(spec)
            self._started.add(spec.name)
        self._wanted = wanted


def scale_run(change: str, run: Path | None) -> tuple[int, int, list[str], list[str]]:
    """Write the wanted number of generators and wait until that many run. Raises RunError.

    Return the number before, the wanted one, and the names of those that started and of those that left.
    """
    directory = find_run(run)
    found = re.fullmatch(r"generators=([+-]?)(\d+)", change)
    if found is None:
        allowed = "generators=+2 (more), generators=-1 (fewer) or generators=4 (that many)"
        raise RunError(f"found `{change}`; allowed is {allowed}")
    now = _read_wanted(directory.scale)
    if now is None or not (is_locked(directory.driver_lock) or directory.supervisor()):
        raise RunError(
            f"{directory.path} starts no generators here now: `asyncrl up` does; with `asyncrl learner`, or "
            "from another host, they join with `asyncrl generator --count N`"
        )
    wanted = {"": 0, "+": now, "-": now}[found[1]] + int(found[2]) * (-1 if found[1] == "-" else 1)
    each = (read_record(directory.scale) or {}).get("each", 1)
    if not each <= wanted <= MOST or wanted % each:
        hosts = f", in steps of the {each} of a host" if each > 1 else ""
        raise RunError(f"{change} would make {wanted} of {now}; allowed is {each} to {MOST}{hosts}")
    before = _running(directory)
    _write_wanted(directory.scale, wanted, each=each)
    until_s = time.monotonic() + FOLLOW_S
    while len(after := _running(directory)) * each != wanted:
        if refused := (read_record(directory.scale) or {}).get("refused"):
            raise RunError(f"{change}: {refused}")
        if time.monotonic() > until_s:
            found_now = f"{len(after)} generators run after {FOLLOW_S:.0f} s instead of {wanted}"
            raise RunError(f"{found_now}; see {directory.logs / 'supervisor.jsonl'}")
        time.sleep(0.1)
    started = [f"{name}{after[name]}" for name in sorted(after.keys() - before.keys(), key=_index)]
    return now, wanted, started, sorted(before.keys() - after.keys(), key=_index)


def _running(directory: RunDirectory) -> dict[str, str]:
    """Return the generators that run, or the hosts for them, by name, with what to say of those that wait."""
    if is_locked(directory.driver_lock):
        said = {"running": "", "pending": " when there is a host for it"}
        found = (read_record(directory.hosts) or {}).items()
        hosts = {name: one["phase"] for name, one in found if name.startswith(GENERATORS)}
        return {name: said[phase] for name, phase in hosts.items() if phase in said}
    return {name: "" for name in directory.children() if re.fullmatch(rf"{PREFIX}\d+", name)}


def _forget(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _index(name: str) -> int:
    return int(re.sub(r"\D", "", name))


def _read_wanted(path: Path) -> int | None:
    """Return the wanted number of generators; None if the file is missing or has no valid number."""
    wanted = (read_record(path) or {}).get("generators")
    return wanted if isinstance(wanted, int) and 1 <= wanted <= MOST else None


def _write_wanted(path: Path, count: int, *, refused: str = "", each: int = 1) -> None:
    """Write the wanted number of generators, of which a host has `each`, and why another was `refused`."""
    more = ({"each": each} if each > 1 else {}) | ({"refused": refused} if refused else {})
    replace_text(path, json.dumps({"generators": count} | more))
