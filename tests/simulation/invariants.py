"""What must hold after every call of the store, read from the store's own keys and from what the world knows."""

from typing import Any

from asyncrl.buffer.ledger import Ledger, next_chain
from asyncrl.buffer.redis import PLACES

from .store import OOM, Data, SortedSet
from .violation import Violation

NEEDS_MEMORY = {"lease", "offer", "put"}
"""Everything else frees memory, or is needed by what does."""
RUN = "run"
KEYS = {place: f"{{{RUN}:train}}:{place}".encode() for place in PLACES}
NUMBERS = [place for place in PLACES if place in ("meta", "totals")]
OF_A_LEARNER = {"take", "reject", "commit", "version", "close"}


def require(holds: bool, message: str, *found: object) -> None:
    if not holds:
        raise Violation(f"{message}: {found}")


class Lane:
    """The keys of a lane, read as Python values."""

    def __init__(self, data: Data) -> None:
        self._data = data
        self._keys = KEYS

    def _ids(self, place: str, kind: type) -> set[int]:
        return set(map(int, self._data.look(self._keys[place], kind)))

    def __getattr__(self, place: str) -> Any:
        kinds = {"leased": SortedSet, "deadlines": SortedSet, "reissue": SortedSet, "ready": SortedSet, "done": set}
        return self._ids(place, kinds.get(place, dict))

    def number(self, name: str) -> int:
        """A number that the lane keeps, 0 before it is written."""
        kept = (self._data.look(self._keys[place], dict) for place in NUMBERS)
        return int(next((values[name.encode()] for values in kept if name.encode() in values), b"0"))

    def text(self, name: str) -> str:
        return str(self._data.look(self._keys["meta"], dict).get(name.encode(), b"").decode())

    @property
    def frames(self) -> dict[int, bytes]:
        return {int(i): frame for i, frame in self._data.look(self._keys["frames"], dict).items()}

    @property
    def takes(self) -> dict[int, tuple[str, str, tuple[int, ...]]]:
        """number -> (previous, chain, ids)"""
        found = {}
        for number, text in self._data.look(self._keys["takes"], dict).items():
            previous, chain, _, *ids = text.decode().split()
            found[int(number)] = (previous, chain, tuple(map(int, ids)))
        return found

    @property
    def anchor(self) -> int:
        return min(self.leased | self.reissue | {self.number("issued") + 1})

    @property
    def places_in_use(self) -> set[str]:
        return {place for place, key in self._keys.items() if key in self._data.keys}


def check_state(lane: Lane, strays: set[int]) -> None:
    """Every issued id is in one place, every group has its frame, the takes are a chain, the bytes add up.

    Args:
        strays: ids whose frame came with a call that found no functions; a recovery clears them up.
    """
    issued, watermark, frames, takes = lane.number("issued"), lane.number("watermark"), lane.frames, lane.takes
    leased, taken = lane.leased, [i for _, _, ids in takes.values() for i in ids]
    places = [*range(1, watermark + 1), *lane.done, *leased, *lane.reissue, *lane.ready, *taken]
    require(len(places) == issued and set(places) == set(range(1, issued + 1)), "an id is lost or in two places",
            issued, watermark, sorted(places))  # fmt: skip
    require(leased == lane.deadlines == lane.holders, "leases disagree", leased, lane.deadlines, lane.holders)
    stored = lane.ready | set(taken)
    require(stored <= frames.keys(), "a group has no frame", stored - frames.keys())
    require(frames.keys() - stored <= strays, "a frame belongs to no group", frames.keys() - stored)
    counted = sum(len(frames[i]) for i in stored)
    require(lane.number("bytes") == counted, "bytes do not add up", lane.number("bytes"), counted)
    number, chain = lane.number("committed"), None
    for n in sorted(takes):
        previous, after, ids = takes[n]
        require(n == number + 1 and chain in (None, previous), "takes are no chain", n, number, takes)
        require(after == next_chain(previous, ids), "a take's hash is wrong", n)
        number, chain = n, after
    require(number == lane.number("last"), "the last take is not there", number, lane.number("last"))
    require(chain in (None, lane.text("chain")), "the chain ends elsewhere", chain, lane.text("chain"))


def check_call(
    lane: Lane, name: str, arguments: tuple[bytes, ...], reply: Any, *, credit: int, durable: int, assigned: bool
) -> None:
    """What one call may have done.

    Args:
        credit: highest id that any learner was allowed to open.
        durable: takes in the oldest kept checkpoint.
        assigned: this call assigned a take.
    """
    if reply == OOM:
        require(name in NEEDS_MEMORY, "refused for lack of memory, which it would have freed", name)
        return
    if name in OF_A_LEARNER and reply[0] == b"OK":
        known = (lane.number("epoch"), lane.text("owner"))
        require(known == (int(arguments[0]), arguments[1].decode()), "a fenced learner had an effect", name, known, arguments[:2])
    if name == "lease":
        require(all(int(i) <= credit for i in reply[3]), "leased beyond the credit", reply[3], credit)
        require(lane.number("limit") <= credit, "the limit is beyond the credit", lane.number("limit"), credit)
    if name == "commit" and reply[0] == b"OK" and reply[1] > 0:
        require(int(arguments[2]) <= durable, "forgotten before it was durable", arguments[2], durable)
    if name == "take" and assigned:
        ids = [int(i) for i in reply[2]]
        window = int(arguments[5])
        require(ids == sorted(ids) and ids[-1] < lane.anchor + window, "taken beyond the window", ids, lane.anchor, window)
        require(min(lane.ready, default=ids[-1] + 1) > ids[-1], "younger groups were taken first", ids, lane.ready)
    if name == "recover":
        above = set(map(int, arguments[7].split()))
        found = (lane.number("watermark"), lane.done)
        require(found == (int(arguments[6]), above), "the store disagrees with the ledger it was given", found, arguments[6:])


def check_lineage(
    history: list[dict[str, Any]], ledger: Ledger, produced: dict[int, set[str]], *, groups: int, max_age: int
) -> None:
    """The weights of a checkpoint: every id once, only what was sampled for it and in time, and the ledger says the same."""
    replayed, trained = Ledger(), 0
    for step, entry in enumerate(history):
        require(entry["version"] == step, "a step is missing or repeated", entry["version"], step)
        require(len(entry["trained"]) == groups, "a step has another size", entry)
        for ids in entry["takes"]:
            replayed.consume(tuple(ids))  # refuses an id that comes twice
        ids_in_step = [i for i, *_ in entry["trained"] + entry["rejected"]]
        require(
            sorted(ids_in_step) == sorted(i for ids in entry["takes"] for i in ids),
            "a step's ids are not those of its takes",
            entry,
        )
        for ticket_id, sample, oldest in entry["trained"]:
            age = step - oldest
            require(0 <= age <= max_age, "a group is older than the bound, or younger than its learner", step, ticket_id)
            require(sample in produced.get(ticket_id, ()), "trained on what nobody sampled for it", ticket_id, sample)
        trained += len(entry["trained"])
    same = ("watermark", "above", "takes", "chain")
    require(
        all(getattr(replayed, name) == getattr(ledger, name) for name in same), "ledger and weights disagree", replayed, ledger
    )
    require(
        trained == ledger.trained and ledger.consumed == trained + ledger.total_rejected, "the ledger's sums are wrong", ledger
    )


def check_nothing_is_left(lane: Lane) -> None:
    """After everything issued was consumed and committed."""
    allowed = {*NUMBERS, "counters", "requests", "dead_letters"}
    require(lane.places_in_use <= allowed, "keys are left behind", lane.places_in_use - allowed)
    require(lane.number("bytes") == 0, "bytes are left behind", lane.number("bytes"))
