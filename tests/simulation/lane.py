"""The keys of a lane at one moment, as Python values."""

import functools
from typing import Any

from asyncrl.buffer.redis import PLACES

from .store import Data, SortedSet
from .violation import Violation

RUN = "run"
HOMES = ("leased", "reissue", "ready")
"""Places of an id that are kept as sorted sets."""


@functools.cache
def keys_of(lane: str) -> dict[str, bytes]:
    return {place: f"{{{RUN}:{lane}}}:{place}".encode() for place in PLACES}


class Lane:
    """A copy: the store may go on."""

    def __init__(self, data: Data, name: str) -> None:
        keys = keys_of(name)

        def look(place: str, kind: type) -> Any:
            return data.look(keys[place], kind)

        numbers = look("meta", dict) | look("totals", dict)
        self.meta: dict[str, str] = {name.decode(): value.decode() for name, value in numbers.items()}
        self.leased, self.reissue, self.ready = ({int(i) for i in look(home, SortedSet)} for home in HOMES)
        self.deadlines = {int(i): ms for i, ms in look("deadlines", SortedSet).items()}
        self.holders = {int(i): holder.decode() for i, holder in look("holders", dict).items()}
        self.attempts = {int(i): int(count) for i, count in look("attempts", dict).items()}
        self.frames: dict[int, bytes] = {int(i): frame for i, frame in look("frames", dict).items()}
        self.requests: dict[str, tuple[str, set[int]]] = {}
        """holder -> its last lease request, and the tickets that it got"""
        for holder, text in look("requests", dict).items():
            request, *ids = text.decode().split()
            self.requests[holder.decode()] = (request, set(map(int, ids)))
        self.done = {int(i) for i in look("done", set)}
        self.takes: dict[int, tuple[str, str, tuple[int, ...]]] = {}
        """number -> (previous, chain, ids)"""
        for number, text in look("takes", dict).items():
            previous, chain, _, *ids = text.decode().split()
            self.takes[int(number)] = (previous, chain, tuple(map(int, ids)))
        self.taken = [i for _, _, ids in self.takes.values() for i in ids]
        self.watermark, self.issued = self.number("watermark"), self.number("issued")
        self.places_in_use = {place for place, key in keys.items() if key in data.keys}

    def number(self, name: str) -> int:
        """A number that the lane keeps, 0 before it is written."""
        return int(self.meta.get(name, "0"))

    @property
    def learners(self) -> dict[str, str]:
        """What only the learner may change."""
        return {name: value for name, value in self.meta.items() if name not in ("issued", "bytes")}

    @property
    def anchor(self) -> int:
        return min(self.leased | self.reissue | {self.issued + 1})

    def is_done(self, ticket_id: int) -> bool:
        return ticket_id <= self.watermark or ticket_id in self.done

    def homes(self) -> dict[int, str]:
        """Where each id above the watermark is."""
        found = dict.fromkeys(self.taken, "taken") | dict.fromkeys(self.done, "done")
        for home in HOMES:
            found |= dict.fromkeys(getattr(self, home), home)
        return found


def require(holds: bool, message: str, *found: object) -> None:
    if not holds:
        raise Violation(f"{message}: {found}")
