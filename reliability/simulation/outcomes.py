"""The kinds of results that the store's functions have, so that a campaign can tell which it has seen."""

from typing import Any

from asyncrl.buffer.base import GIVEN_UP

from .store import OOM

OUTCOMES = {
    "lease": ["tickets", "nothing", "closed", "oom"],
    "renew": ["ok"],
    "offer": ["stored", "duplicate", "full", "unknown", "oom"],
    "put": ["stored", "duplicate", "full", "unknown"],
    "give_back": ["ok"],
    "fail": ["last", "not the last"],
    "take": ["groups", "WAIT", "GAP", "FENCED"],
    "reject": ["shortened", "given up", "GAP", "FENCED"],
    "commit": ["groups", "nothing", "GAP", "FENCED"],
    "recover": ["groups kept", "nothing kept", "NEWER"],
    "version": ["OK", "GAP", "FENCED"],
    "revoke": ["some", "none"],
    "close": ["OK", "GAP", "FENCED"],
    "audit": ["ok"],
}
"""(PUT out of memory is refused with its whole transaction, before the function runs.)"""
EVERY_OUTCOME = frozenset(f"{name}: {kind}" for name, kinds in OUTCOMES.items() for kind in kinds)


def outcome(name: str, reply: Any, frames: dict[int, bytes]) -> str:
    """ "FUNCTION: KIND" of a reply; `frames` are those in the store after it."""
    return f"{name}: {_kind(name, reply, frames)}"


def _kind(name: str, reply: Any, frames: dict[int, bytes]) -> str:
    if reply == OOM:
        return "oom"
    if name in ("put", "offer"):
        return str(reply.decode())
    if name == "lease":
        return "closed" if reply[2] else "tickets" if reply[3] else "nothing"
    if name == "fail":
        return "last" if reply else "not the last"
    if name == "revoke":
        return "some" if reply else "none"
    if name in ("renew", "give_back", "audit"):
        return "ok"
    if name == "recover" and reply[0] == b"OK":
        return "groups kept" if frames else "nothing kept"
    if reply[0] != b"OK":
        return str(reply[0].decode())
    if name == "reject":
        return "given up" if any(frames[int(i)].startswith(GIVEN_UP) for i in reply[2]) else "shortened"
    if name == "commit":
        return "groups" if reply[1] else "nothing"
    return "groups" if name == "take" else "OK"
