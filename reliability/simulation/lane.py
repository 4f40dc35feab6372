"""The keys of a lane at one moment, as Python values."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

from asyncrl.buffer.redis import PLACES

from .store import Data, SortedSet
from .violation import Violation

RUN = "run"
HOMES = ("leased", "reissue", "ready")
"""Places of an id that are kept as sorted sets."""

Take = tuple[str, str, tuple[int, ...]]
"""(previous, chain, ids)"""


@functools.cache
def keys_of(lane: str) -> dict[str, bytes]:
    return {place: f"{{{RUN}:{lane}}}:{place}".encode() for place in PLACES}


def _values(data: Data, lane: str) -> list[Any]:
    return list(map(data.keys.get, keys_of(lane).values()))


def _texts(value: dict[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): text.decode() for name, text in value.items()}


def _ids(value: Iterable[bytes]) -> set[int]:
    return {int(i) for i in value}


def _requests(value: dict[bytes, bytes]) -> dict[str, tuple[str, set[int]]]:
    found = {}
    for holder, text in value.items():
        request, *ids = text.decode().split()
        found[holder.decode()] = (request, set(map(int, ids)))
    return found


def _takes(value: dict[bytes, bytes]) -> dict[int, Take]:
    found = {}
    for number, text in value.items():
        previous, chain, _, *ids = text.decode().split()
        found[int(number)] = (previous, chain, tuple(map(int, ids)))
    return found


READERS: dict[str, tuple[type, Callable[[Any], Any]]] = {
    "meta": (dict, _texts),
    "totals": (dict, _texts),
    "leased": (SortedSet, _ids),
    "reissue": (SortedSet, _ids),
    "ready": (SortedSet, _ids),
    "deadlines": (SortedSet, lambda value: {int(i): ms for i, ms in value.items()}),
    "holders": (dict, lambda value: {int(i): holder.decode() for i, holder in value.items()}),
    "attempts": (dict, lambda value: {int(i): int(count) for i, count in value.items()}),
    "deaths": (dict, lambda value: {int(i): int(count) for i, count in value.items()}),
    "frames": (dict, lambda value: {int(i): frame for i, frame in value.items()}),
    "requests": (dict, _requests),
    "done": (set, _ids),
    "takes": (dict, _takes),
}
"""place -> its type in the store, and how it is read"""


class Lane:
    """The store may go on, and nobody changes what is in here: Lanes share what they have read."""

    def __init__(self, data: Data, name: str, like: "Lane | None" = None) -> None:
        """Reads only what another Lane lacks: a value of the store that is the same object is unchanged."""
        self._name, keys = name, keys_of(name)
        self._values = dict(zip(keys, _values(data, name), strict=True))
        found = self._read = dict[str, Any]()
        for place, (kind, read) in READERS.items():
            if like is not None and like._values[place] is self._values[place]:
                found[place] = like._read[place]
            else:
                found[place] = read(data.look(keys[place], kind))
        self.meta: dict[str, str] = found["meta"] | found["totals"]
        self.leased: set[int] = found["leased"]
        self.reissue: set[int] = found["reissue"]
        self.ready: set[int] = found["ready"]
        self.deadlines: dict[int, float] = found["deadlines"]
        self.holders: dict[int, str] = found["holders"]
        self.attempts: dict[int, int] = found["attempts"]
        self.deaths: dict[int, int] = found["deaths"]
        self.frames: dict[int, bytes] = found["frames"]
        self.requests: dict[str, tuple[str, set[int]]] = found["requests"]
        """holder -> its last lease request, and the tickets that it got"""
        self.done: set[int] = found["done"]
        self.takes: dict[int, Take] = found["takes"]
        self.taken = [i for _, _, ids in self.takes.values() for i in ids]
        self.watermark, self.issued = self.number("watermark"), self.number("issued")

    def is_still(self, data: Data) -> bool:
        """Whether nothing has happened since."""
        return _values(data, self._name) == list(self._values.values())

    def number(self, name: str) -> int:
        """A number that the lane keeps, 0 before it is written."""
        return int(self.meta.get(name, "0"))

    @property
    def places_in_use(self) -> set[str]:
        return {place for place, value in self._values.items() if value is not None}

    @functools.cached_property
    def learners(self) -> dict[str, str]:
        """What only the learner may change."""
        return {name: value for name, value in self.meta.items() if name not in ("issued", "bytes")}

    @property
    def anchor(self) -> int:
        return min(self.leased | self.reissue | {self.issued + 1})

    def is_done(self, ticket_id: int) -> bool:
        return ticket_id <= self.watermark or ticket_id in self.done

    @functools.cached_property
    def homes(self) -> dict[int, str]:
        """Where each id above the watermark is."""
        found = dict.fromkeys(self.taken, "taken") | dict.fromkeys(self.done, "done")
        for home in HOMES:
            found |= dict.fromkeys(getattr(self, home), home)
        return found


def require(holds: bool, message: str, *found: object) -> None:
    if not holds:
        raise Violation(f"{message}: {found}")
