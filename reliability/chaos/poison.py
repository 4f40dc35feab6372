"""What a hostile generator can do: wrong frames, deadly tickets, messages, values in the store."""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import zmq
from redis.exceptions import RedisError

from asyncrl.algo.trainable import UNTRAINABLE
from asyncrl.buffer.base import DEADLY, PutOutcome, kind_of
from asyncrl.buffer.judge import DEAD, DISCARDED_LINEAGE
from asyncrl.errors import StoreError
from asyncrl.types import Group, GroupTimes, Rollout, VersionSpan
from asyncrl.weights.base import MEASUREMENTS
from asyncrl.wire.codec import MESSAGE_LIMITS, encode_frame
from asyncrl.wire.group_frames import encode_group
from tests.support.hostile import damage

from .faults import client_of, key_of, note
from .helpers import mark, marked
from .lineage import Verdict, digest, handed_over
from .roles import KEY, B
from .world import World

UNDECODABLE = "bytes that do not decode"
AHEAD = 8 * B
"""A ticket so far beyond those that were trained on is not issued yet."""
Wrong = Callable[[Group, random.Random], Group]


def _honest(ticket_id: int, version: int) -> Group:
    """What the ticket's generator could have sampled."""
    rollout = Rollout(
        prompt_ids=np.array([ticket_id % 16], np.int32),
        response_ids=np.arange(4, dtype=np.int32),
        action_mask=np.ones(4, np.bool_),
        behaviour_logprobs=np.full(4, -1.0, np.float32),
        version_spans=(VersionSpan(version, 4),),
        finish_reason="stop",
        reward=1.0,
    )
    return Group(
        ticket_id=ticket_id, rollouts=(rollout, rollout), generator_id="g0", finished_version=version
    )


def _rollouts(group: Group, **changes: Any) -> Group:
    return replace(group, rollouts=tuple(replace(rollout, **changes) for rollout in group.rollouts))


def _spans(group: Group, **changes: int) -> Group:
    return _rollouts(group, version_spans=(group.rollouts[0].version_spans[0]._replace(**changes),))


GROUPS: Mapping[str, Wrong] = {
    "token outside the vocabulary": lambda group, draw: _rollouts(
        group, response_ids=np.full(4, draw.choice([-1, 1000, 2**31 - 1]), np.int32)
    ),
    "empty prompt": lambda group, draw: _rollouts(group, prompt_ids=np.empty(0, np.int32)),
    "too long": lambda group, draw: _rollouts(group, prompt_ids=np.ones(draw.choice([97, 5000]), np.int32)),
    "no rollouts, or too many": lambda group, draw: replace(
        group, rollouts=draw.choice([(), group.rollouts * 2])
    ),
    "seconds that are no time": lambda group, draw: replace(
        group, sampling_s=draw.choice([math.nan, math.inf, -1.0])
    ),
    "hours that are no time": lambda group, draw: replace(
        group, times=GroupTimes(math.nan, draw.choice([math.inf, -5.0]), 1e300)
    ),
    "reward beyond bounds": lambda group, draw: _rollouts(group, reward=draw.choice([1e300, -1e12])),
    "log-probability beyond bounds": lambda group, draw: _rollouts(
        group, behaviour_logprobs=np.full(4, draw.choice([3.0, -1e30]), np.float32)
    ),
    "weights of a future version": lambda group, draw: _spans(
        group, version=group.finished_version + draw.choice([5000, 10**6])
    ),
    "weights of a lost lineage": lambda group, draw: _spans(group, lineage=draw.randrange(1, 10**6)),
    "wrong lane": lambda group, draw: replace(group, lane="eval"),
    "frame of another ticket": lambda group, draw: replace(
        group, ticket_id=group.ticket_id + draw.choice([1, -1, 10**9])
    ),
}
"""Groups with a true signature and a lie inside, by kind."""


def _undecodable(frame: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(frame))
    changed = bytes([frame[place] ^ 0xFF])
    return draw.choice(
        [frame[:place], frame[:place] + changed + frame[place + 1 :], b"", draw.randbytes(200)]
    )


def put_frame(kind: str, world: World, draw: random.Random) -> None:
    """In the place of a ticket that somebody is sampling: whoever puts first, counts."""
    with client_of(world) as client, world.buffer() as buffer:
        for _ in range(500):
            # Another fault may have put wrong types and values into the store.
            with suppress(RedisError, StoreError):
                ids = {
                    int(field)
                    for field in client.hkeys(key_of("holders"))
                    if field.isdigit() and len(field) < 12
                }
                if ids := ids - marked(world.directory, "ticket"):
                    ticket_id = draw.choice(sorted(ids))
                    frame = _frame(kind, ticket_id, world.version, draw)
                    if buffer.put("rogue", ticket_id, frame) is PutOutcome.STORED:
                        world.poisons.append({"kind": kind, "id": ticket_id, "content": digest(frame)})
                        note(world, f"poison: {kind}")
                        return
            world.run_for(0.02)  # nobody may be alive who samples


def _frame(kind: str, ticket_id: int, version: int, draw: random.Random) -> bytes:
    group = _honest(ticket_id, version)
    if kind in GROUPS:
        return encode_group(GROUPS[kind](group, draw), KEY)
    return _undecodable(encode_group(group, KEY), draw)


def plant(what: str, world: World, draw: random.Random) -> None:
    """A ticket that kills each generator which samples it, or (`step`) each learner that trains on it."""
    ticket_id = world.furthest + AHEAD + draw.randrange(B)
    mark(world.directory, what, ticket_id)
    note(world, f"deadly {what}")


def write_values(world: World, draw: random.Random) -> None:
    """What the store lets a generator's user do, past all functions."""
    with client_of(world) as client, suppress(RedisError):  # the run makes a key anew in the middle of it
        damage(client, key_of, draw, first=max(1, world.furthest - B))
    note(world, "hostile store values")


REPORT = {"version": 1, "applied": True, "reason": "", **dict.fromkeys(MEASUREMENTS, 0.0)}
WORDS: tuple[Any, ...] = (
    "",
    "g0",
    math.nan,
    math.inf,
    -1,
    2**53,
    2**63,
    None,
    True,
    [],
    {},
    ["tcp"] * 99,
    "x" * 9999,
    b"\0",
    1e300,
)


def send_message(world: World, draw: random.Random) -> None:
    """A message to the learner's control plane: with the run's key, unsigned, or in a generator's name."""
    member = {"generator_id": draw.choice(["rogue", "g0"]), "incarnation": draw.choice(["1", ""])}
    messages: dict[str, dict[str, Any]] = {
        "UpdateReport": REPORT,
        "Hello": member | {"release": "r", "config_hash": "c", "version": 0, "pid": 1},
        "Heartbeat": member | {"version": 0, "state": "sampling"},
        "Leave": member,
        "Stop": {"reason": "no more"},
        "Refused": {"reason": "not you"},
    }
    kind = draw.choice(list(messages))
    fields = messages[kind] | {
        draw.choice([*messages[kind], "x"]): draw.choice(WORDS) for _ in range(draw.randrange(3))
    }
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 300)
        socket.connect(f"ipc://{world.control_path}")
        frame = encode_frame(MESSAGE_LIMITS, {"message": {"type": kind, "fields": fields}}, {}, key=KEY)
        socket.send(draw.choice([frame, frame, frame, frame[:-1], b"", draw.randbytes(100)]))
    note(world, "wrong control message")


def fates(world: World, verdict: Verdict) -> tuple[dict[str, dict[str, int]], list[str]]:
    """What became of everything deliberate, by kind and reason, and what became of it that must not.

    That nothing of it was trained is checked with all other groups: no honest generator handed it over. A
    store that lost it before the learner saw it has its ticket sampled anew.
    """
    found: dict[str, Counter[str]] = defaultdict(Counter)
    refused = {(e["id"], e["content"]): e["reason"] for e in world.events() if e["event"] == "refused"}
    for one in world.poisons:
        reason = refused.get((one["id"], one["content"])) or verdict.reasons.get(one["id"], "")
        is_ours = kind_of(reason) in (UNTRAINABLE, DEAD, DISCARDED_LINEAGE)
        found[one["kind"]][kind_of(reason) if is_ours else "gone with the store, sampled anew"] += 1
    wrong, sampled, end = [], handed_over(world.directory), verdict.groups
    for what in ("ticket", "step"):
        for ticket_id in marked(world.directory, what):
            reason = kind_of(verdict.reasons.get(ticket_id, "" if ticket_id <= end else "not reached"))
            found[f"deadly {what}"][reason or "trained"] += 1
            if not reason or (
                what == "ticket" and reason not in (DEADLY, "not reached") and ticket_id not in sampled
            ):
                wrong.append(f"deadly {what} {ticket_id}: {reason or 'trained'}")
    return {kind: dict(counts) for kind, counts in sorted(found.items())}, wrong
