"""The rules for tickets of which holders died: how deaths are counted, who may lease a suspect, and when one
is given up."""

from typing import TYPE_CHECKING

from asyncrl.buffer.base import ALONE_DEATHS, DEADLY, GIVEN_UP

from .lane import require

if TYPE_CHECKING:
    from .calls import Call

LOSES_A_HOLDER = {"lease", "offer", "put", "revoke"}


def check_counts(call: "Call") -> None:
    """One for each lease that a holder lost without a word, none else; what was stored has none."""
    if call.name == "recover":
        return
    moved, before, after = call.moved, call.before.deaths, call.after.deaths
    lost = (
        {i for i, move in moved.items() if move == ("leased", "reissue")}
        if call.name in LOSES_A_HOLDER
        else set()
    )
    if call.name == "lease":  # what had run out may be leased again in the same call
        lost |= {
            i
            for i, ends_ms in call.before.deadlines.items()
            if ends_ms <= call.now_ms and i not in call.after.ready
        }
    for ticket_id in before.keys() | after.keys() | lost:
        expected = before.get(ticket_id, 0) + (ticket_id in lost)
        is_stored = (
            ticket_id in call.after.ready or ticket_id in call.after.taken or call.after.is_done(ticket_id)
        )
        found = after.get(ticket_id, 0)
        require(
            found == (0 if is_stored else expected),
            "deaths are counted wrongly",
            call.name,
            ticket_id,
            found,
            expected,
        )


def suspects(call: "Call") -> set[int]:
    """Leases that have run out are counted already."""
    return {i for i, count in call.after.deaths.items() if count >= max(call.max_deaths - ALONE_DEATHS, 1)}


def check_lease(call: "Call", holder: str, ids: set[int]) -> bool:
    """Whether suspects decided: nothing beside one, nothing while one awaits a free holder, else that one."""
    limit, suspected = call.before.number("limit"), suspects(call)
    held = {i for i, of in call.after.holders.items() if of == holder} - ids
    waiting = {
        i
        for i in call.after.reissue | ids
        if i in suspected and call.after.deaths[i] < call.max_deaths and i <= limit
    }
    if not (held & suspected or waiting):
        require(not ids & suspected, "a ticket was leased of which too many died", ids, suspected)
        return False
    alone = set() if held else {min(waiting)}
    require(ids == alone, "a suspect is not sampled alone", holder, ids, held, waiting)
    return True


def is_given_up(call: "Call", ticket_id: int) -> bool:
    frame = call.after.frames[ticket_id]
    is_due = call.before.deaths.get(ticket_id, 0) >= call.max_deaths
    return is_due and frame.startswith(GIVEN_UP + DEADLY.encode())
