"""What one call of the store may have done: the lane before and after it, and what the world knows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from asyncrl.buffer.base import DEADLY
from asyncrl.buffer.ledger import next_chain

from . import deaths
from .content import is_good, is_hopeless
from .lane import Lane, require
from .store import OOM

NEEDS_MEMORY = {"lease", "offer", "put"}
"""Everything else frees memory, or is needed by what does."""
OF_A_LEARNER = {"take", "reject", "commit", "version", "close"}
MOVES: dict[str, set[tuple[str, str]]] = {
    "lease": {("new", "leased"), ("reissue", "leased"), ("leased", "reissue")},
    "renew": set(),
    "offer": {("leased", "reissue")},
    "put": {("leased", "ready"), ("reissue", "ready"), ("leased", "reissue")},
    "give_back": {("leased", "reissue")},
    "fail": {("leased", "reissue"), ("leased", "ready")},
    "take": {("ready", "taken"), ("taken", "ready"), ("reissue", "ready"), ("reissue", "taken")},
    "reject": {("taken", "reissue")},
    "commit": {("taken", "done")},
    "revoke": {("leased", "reissue")},
    "version": set(),
    "close": set(),
    "audit": set(),
}
"""RECOVER may do more, see there."""


@dataclass(slots=True, kw_only=True)
class Call:
    """One call that was answered."""

    name: str
    arguments: tuple[str, ...]
    reply: Any
    before: Lane
    after: Lane
    now_ms: int
    """By the store's clock."""
    credit: int
    """Highest id that any learner was allowed to open."""
    durable: set[int]
    """Ids in the ledger of the oldest kept checkpoint; only looked at for COMMIT."""
    answered: set[int] | None
    """What this holder got when it made the same request before and has got nothing else since."""
    max_attempts: int
    max_deaths: int
    max_bytes: int
    name_of: Callable[[int], int]
    """The id that stands in a frame."""
    window: int | None
    """Of the learner that calls; None when it is nobody's."""

    @property
    def moved(self) -> dict[int, tuple[str, str]]:
        """id -> (home before, home after) of those above both watermarks."""
        old, new = self.before.homes, self.after.homes
        lowest = max(self.before.watermark, self.after.watermark if self.name != "commit" else 0)
        found = {}
        for i in {i for i, _ in old.items() ^ new.items()}:
            homes = (
                old.get(i, "done" if self.before.is_done(i) else "new"),
                new.get(i, "done" if self.after.is_done(i) else "new"),
            )
            if homes[0] != homes[1] and i > lowest:
                found[i] = homes
        return found

    def ids(self, text: str) -> set[int]:
        return set(map(int, text.split()))


def check_call(call: Call) -> None:
    """Raises Violation."""
    if call.reply == OOM:
        require(call.name in NEEDS_MEMORY, "refused for lack of memory, which it would have freed", call.name)
        return
    if call.name in OF_A_LEARNER:
        _check_learner(call)
    elif call.name not in ("recover", "revoke"):
        require(
            call.before.learners == call.after.learners,
            "a generator changed what is the learner's",
            call.name,
        )
    if call.name in MOVES:
        _check_moves(call)
    _check_frames(call)
    deaths.check_counts(call)
    CHECKS.get(call.name, lambda call: None)(call)


def _check_learner(call: Call) -> None:
    before, after, status = call.before, call.after, call.reply[0]
    known, mine = (
        (after.number("epoch"), after.meta.get("owner")),
        (int(call.arguments[0]), call.arguments[1]),
    )
    if status in (b"OK", b"WAIT"):
        require(known == mine, "a fenced learner had an effect", call.name, known, mine)
    else:
        require(
            before.learners | {"epoch": ""} == after.learners | {"epoch": ""},
            "a refused call had an effect",
            call.name,
        )
        is_replaced = known[0] > mine[0] or (known[0] == mine[0] and known[1] != mine[1])
        require(
            is_replaced == (status == b"FENCED"),
            "fenced is who was replaced, nobody else",
            call.name,
            status,
            known,
            mine,
        )


def _check_moves(call: Call) -> None:
    """Every id that changed its place was allowed to."""
    moved = call.moved
    for ticket_id, move in moved.items():
        require(move in MOVES[call.name], "an id must not move so", call.name, ticket_id, move)
        if move == ("leased", "reissue"):
            require(
                _may_lose_lease(call, ticket_id), "a lease ended early", call.name, call.arguments, ticket_id
            )
        elif move == ("taken", "ready"):
            require(_may_undo(call, ticket_id), "a take was undone", call.arguments, ticket_id)
        elif call.name == "take" and move[0] == "reissue":
            require(
                deaths.is_given_up(call, ticket_id), "a ticket was given up", ticket_id, call.before.deaths
            )
    for ticket_id in call.before.leased & call.after.leased:
        if _lease(call.before, ticket_id) != _lease(call.after, ticket_id):
            require(
                _may_change_lease(call, ticket_id), "a lease changed", call.name, call.arguments, ticket_id
            )


def _lease(lane: Lane, ticket_id: int) -> tuple[str, float]:
    return lane.holders[ticket_id], lane.deadlines[ticket_id]


def _may_lose_lease(call: Call, ticket_id: int) -> bool:
    holder, ends_ms = _lease(call.before, ticket_id)
    if call.name in ("lease", "offer", "put"):
        return ends_ms <= call.now_ms
    is_named = call.name == "revoke" or ticket_id in call.ids(call.arguments[1])
    return holder == call.arguments[0] and is_named


def _may_undo(call: Call, ticket_id: int) -> bool:
    """A learner with another batch, or with more accepted groups, asks for fewer than one was assigned."""
    number, takes = int(call.arguments[2]), call.before.takes
    is_larger = (
        number in takes
        and takes[number][0] == call.arguments[3]
        and len(takes[number][2]) > int(call.arguments[4])
    )
    return is_larger and any(ticket_id in ids for n, (_, _, ids) in takes.items() if n >= number)


def _may_change_lease(call: Call, ticket_id: int) -> bool:
    holder, ends_ms = _lease(call.before, ticket_id)
    if call.name == "lease":
        return ends_ms <= call.now_ms
    is_renewed = call.after.deadlines[ticket_id] == call.now_ms + int(call.arguments[1])
    return (
        call.name == "renew" and holder == call.arguments[0] == call.after.holders[ticket_id] and is_renewed
    )


def _check_frames(call: Call) -> None:
    """What was stored stays as it is, and every failure counts once."""
    before, after = call.before, call.after
    failed = (
        {int(call.arguments[1 if call.name == "fail" else 4])} if call.name in ("fail", "reject") else set()
    )
    for ticket_id in {*before.ready, *before.taken} & {*after.ready, *after.taken} - failed:
        require(
            before.frames[ticket_id] == after.frames[ticket_id],
            "a stored frame was changed",
            call.name,
            ticket_id,
        )
    for ticket_id, count in after.attempts.items():
        more = count - before.attempts.get(ticket_id, 0)
        require(
            0 <= more <= (ticket_id in failed), "attempts are counted wrongly", call.name, ticket_id, more
        )
        require(count <= call.max_attempts, "sampled more often than allowed", call.name, ticket_id, count)


def _lease_call(call: Call) -> None:
    holder, wanted, lease_ms = call.arguments[0], int(call.arguments[1]), int(call.arguments[2])
    ids, limit = {int(i) for i in call.reply[3]}, call.before.number("limit")
    require(
        call.reply[4].decode() == call.before.meta.get("history", ""), "the history is another", call.reply
    )
    require(limit <= call.credit, "the limit is beyond the credit", limit, call.credit)
    for ticket_id in ids:
        require(call.after.holders.get(ticket_id) == holder, "leased to somebody else", ticket_id, holder)
    expired = {i for i, ends_ms in call.before.deadlines.items() if ends_ms <= call.now_ms}
    require(not expired - ids & call.after.leased, "an expired lease goes on", expired)
    new = {i for i in call.after.leased if i not in call.before.leased or i in expired}
    if call.answered is not None:
        require(
            ids <= call.answered and not new, "the same request got other tickets", ids, new, call.answered
        )
        return
    is_closed = call.before.meta.get("closed") == "1"
    require(ids == new, "what was leased is not what was told", ids, new)
    require(not (is_closed and new), "leased after the end", new)
    require(
        len(ids) <= wanted and max(ids, default=0) <= limit,
        "leased more than asked for, or beyond the limit",
        ids,
        limit,
    )
    require(
        all(call.after.deadlines[i] == call.now_ms + lease_ms for i in ids),
        "a lease ends at another time",
        ids,
    )
    if not is_closed and deaths.check_lease(call, holder, ids):
        return
    left = {i for i in call.after.reissue if i <= limit} - deaths.suspects(call)
    require(
        is_closed or len(ids) == wanted or (not left and call.after.issued >= limit),
        "tickets are withheld",
        ids,
        left,
        limit,
    )
    passed_over = {i for i in left if i < max(ids, default=0)}
    require(not passed_over, "younger tickets were leased first", passed_over, ids)


def _put_call(call: Call) -> None:
    ticket_id, max_bytes = int(call.arguments[0]), int(call.arguments[1])
    is_stored = call.reply == b"stored"
    ready = call.after.ready - call.before.ready
    require(
        ready == ({ticket_id} if is_stored else set()),
        "another group was stored",
        ready,
        call.arguments,
        call.reply,
    )
    _check_outcome(call, ticket_id)
    if is_stored and call.after.number("bytes") > max_bytes:
        require(_is_awaited(call, ticket_id), "stored beyond the cap", ticket_id, call.after.number("bytes"))


def _offer_call(call: Call) -> None:
    _check_outcome(call, int(call.arguments[0]))


def _check_outcome(call: Call, ticket_id: int) -> None:
    """The first group of an issued id is stored, whoever brings it, unless there is no room and the learner
    can go on."""
    outcome, is_there = call.reply.decode(), call.before.homes.get(ticket_id) in ("ready", "taken")
    if call.before.is_done(ticket_id) or is_there:
        require(outcome == "duplicate", "a second group of an id is welcome", ticket_id, outcome)
    elif ticket_id > call.before.issued:
        require(outcome == "unknown", "a group of an id that nobody has", ticket_id, outcome)
    else:
        require(outcome in ("stored", "full"), "the first group of an id is refused", ticket_id, outcome)
        require(
            outcome == "stored" or not _is_awaited(call, ticket_id),
            "a full store refuses what it waits for",
            ticket_id,
        )


def _is_awaited(call: Call, ticket_id: int) -> bool:
    """The learner waits for this group, or for one that nobody has."""
    oldest = min(call.before.anchor, ticket_id)
    is_nobodys = oldest in call.before.reissue or call.before.deadlines.get(oldest, 0) <= call.now_ms
    return call.before.meta.get("starving") == "1" and (oldest == ticket_id or is_nobodys)


def _fail_call(call: Call) -> None:
    ticket_id = int(call.arguments[1])
    count = call.after.attempts.get(ticket_id, 0)
    was_counted = count > call.before.attempts.get(ticket_id, 0)
    is_held = call.before.holders.get(ticket_id) == call.arguments[0]
    require(was_counted == is_held, "a failure of another holder counts, or one's own does not", ticket_id)
    if is_held:
        home = call.after.homes[ticket_id]
        is_last = count == call.max_attempts
        require(
            (home, bool(call.reply)) == ("ready" if is_last else "reissue", is_last),
            "given up early or late",
            home,
            count,
        )


def _take_call(call: Call) -> None:
    number, previous, wanted, window = (
        int(call.arguments[2]),
        call.arguments[3],
        int(call.arguments[4]),
        int(call.arguments[5]),
    )
    require(call.window in (None, window), "another window than the learner's", window, call.window)
    if call.reply[0] in (b"GAP", b"FENCED"):
        return
    is_starving = call.after.meta.get("starving") == "1"
    if call.reply[0] == b"WAIT":
        require(is_starving, "the store does not know that the learner waits", call.arguments)
        return
    ids = [int(i) for i in call.reply[2]]
    assigned = call.after.takes[number]
    require(
        assigned == (previous, call.reply[1].decode(), tuple(ids)),
        "another take was told than is kept",
        assigned,
        call.reply,
    )
    require(number == call.after.number("last") or number in call.before.takes, "a take stands alone", number)
    if call.before.takes.get(number) != assigned:
        require(not is_starving, "the store believes that the learner waits", call.arguments)
        require(len(ids) == wanted, "a take has another size", ids, wanted)
        require(
            ids == sorted(ids) and ids[-1] < call.after.anchor + window,
            "taken beyond the window",
            ids,
            call.after.anchor,
            window,
        )
        require(
            min(call.after.ready, default=ids[-1] + 1) > ids[-1],
            "younger groups were taken first",
            ids,
            call.after.ready,
        )


def _reject_call(call: Call) -> None:
    ticket_id, frame = int(call.arguments[4]), call.before.frames.get(int(call.arguments[4]))
    was_counted = call.after.attempts.get(ticket_id, 0) > call.before.attempts.get(ticket_id, 0)
    is_deadly = call.arguments[6].startswith(DEADLY)  # the world has judged that
    if was_counted and not is_deadly:
        name = call.name_of(ticket_id)
        require(frame is not None and not is_good(name, frame), "a good frame was refused", ticket_id, frame)
    if call.reply[0] == b"OK":
        number, chain = int(call.arguments[2]), call.arguments[3]
        kept = call.after.takes[number]
        told = (call.reply[1].decode(), tuple(map(int, call.reply[2])))
        require(kept[1:] == told, "another take was told than is kept", kept, told)
        # A late duplicate finds the take without the id that was refused after this one.
        whole = {next_chain(kept[0], tuple(sorted({*told[1], i}))) for i in call.before.homes}
        require(chain in {told[0], *whole}, "another take was shortened", number, kept)
        was_there = ticket_id in call.before.takes[int(call.arguments[2])][2]
        require(
            was_counted or not was_there or ticket_id in told[1],
            "a refused frame cost no attempt",
            ticket_id,
            told,
        )
        if was_counted:
            assert frame is not None
            is_last = call.after.attempts[ticket_id] == call.max_attempts or number < call.before.number(
                "last"
            )
            is_last = is_last or is_deadly or is_hopeless(call.name_of(ticket_id), frame)
            require((ticket_id in told[1]) == is_last, "given up early or late", ticket_id, told)


def _commit_call(call: Call) -> None:
    forgotten = {i for i, move in call.moved.items() if move[1] == "done"}
    require(forgotten <= call.durable, "forgotten before it was durable", forgotten - call.durable)
    if call.reply[0] == b"OK":
        require(
            call.reply[1] == len(forgotten),
            "another number of groups was told than forgotten",
            call.reply,
            forgotten,
        )
        require(call.after.number("committed") >= int(call.arguments[2]), "not committed", call.arguments)


def _version_call(call: Call) -> None:
    if call.reply[0] == b"OK":
        for name, told in zip(("version", "limit"), call.arguments[2:4], strict=True):
            grown = max(call.before.number(name), int(told))
            require(
                call.after.number(name) == grown, f"the {name} is another", call.after.number(name), grown
            )
        is_waiting = call.arguments[4] == "1" or call.before.meta.get("starving") == "1"
        require(
            is_waiting == (call.after.meta.get("starving") == "1"),
            "the store does not know who waits",
            call.arguments,
        )


def _recover_call(call: Call) -> None:
    known_epoch, owner, is_first, takes, chain, version, limit, watermark, above, history, _ = call.arguments
    before, after = call.before, call.after
    newest, is_new = before.number("epoch"), before.meta.get("owner") != owner
    is_late = newest > int(known_epoch) or (newest == int(known_epoch) and is_first == "0")
    require(
        (call.reply[0] == b"NEWER") == (is_new and is_late),
        "a late learner took the lane, or a new one did not",
        call.reply,
    )
    if call.reply[0] == b"NEWER":
        is_still = after.learners == before.learners and after.homes == before.homes
        require(is_still and call.reply[1] == newest, "a late learner had an effect", call.arguments)
        return
    require(
        (after.watermark, after.done) == (int(watermark), call.ids(above)),
        "the store disagrees with the ledger",
        call.arguments,
    )
    told = {
        "owner": owner,
        "version": version,
        "limit": limit,
        "history": history,
        "closed": "0",
        "starving": "0",
        "committed": takes,
    }
    require(
        after.learners | told == after.learners, "the store disagrees with the learner", after.learners, told
    )
    newest = int(known_epoch) + 1 if is_new else newest
    require(
        after.number("epoch") == newest == call.reply[1],
        "an epoch comes twice",
        after.number("epoch"),
        newest,
    )
    for ticket_id, (home, now) in call.moved.items():
        is_kept = home in ("new", "done") or now in ("done", "ready")
        require(is_kept, "a recovery threw a group or a lease away", ticket_id, home, now)
    number, previous = int(takes), chain
    while (
        (take := before.takes.get(number + 1))
        and take[0] == previous
        and all(i in after.frames for i in take[2])
    ):
        number, previous = number + 1, take[1]
        require(
            after.takes.get(number) == take, "a take that goes on from the ledger was forgotten", number, take
        )
    require(
        not after.takes or max(after.takes) == number,
        "a take of another history is kept",
        after.takes,
        number,
    )


def _revoke_call(call: Call) -> None:
    require(
        call.arguments[0] not in call.after.holders.values(), "the dead still hold a ticket", call.arguments
    )
    require(
        call.before.learners | {"epoch": ""} == call.after.learners | {"epoch": ""},
        "a revocation changed what is the learner's",
    )


def _close_call(call: Call) -> None:
    require(call.reply[0] != b"OK" or call.after.meta["closed"] == "1", "not closed", call.after.meta)


def _audit_call(call: Call) -> None:
    lane = call.after
    done = lane.watermark + len(lane.done)
    counted = [
        lane.issued,
        len(lane.leased),
        len(lane.reissue),
        len(lane.ready),
        len(lane.taken),
        done,
        lane.number("bytes"),
    ]
    require(call.reply[:7] == counted, "the audit counts wrongly", call.reply[:7], counted)


def _renew_call(call: Call) -> None:
    ends_ms = call.now_ms + int(call.arguments[1])
    for ticket_id in call.ids(call.arguments[2]):
        if call.before.holders.get(ticket_id) == call.arguments[0]:
            require(call.after.deadlines[ticket_id] == ends_ms, "a lease was not renewed", ticket_id)


def _give_back_call(call: Call) -> None:
    for ticket_id in call.ids(call.arguments[1]):
        still_held = call.after.holders.get(ticket_id) == call.arguments[0]
        require(not still_held, "a ticket was not given back", ticket_id)


CHECKS: dict[str, Callable[[Call], None]] = {
    "lease": _lease_call,
    "renew": _renew_call,
    "offer": _offer_call,
    "put": _put_call,
    "give_back": _give_back_call,
    "fail": _fail_call,
    "take": _take_call,
    "reject": _reject_call,
    "commit": _commit_call,
    "recover": _recover_call,
    "version": _version_call,
    "revoke": _revoke_call,
    "close": _close_call,
    "audit": _audit_call,
}
