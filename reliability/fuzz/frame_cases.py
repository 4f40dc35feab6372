"""Frames that lie: what a broken or hostile peer may send with the right key, for the unit test and for the
fuzzer.

A case is kind (1 byte) | length of the meta (2 bytes, little-endian) | meta | tensors. `frame_of` puts a
header with true lengths and a true checksum around it, so that every check behind the checksum is reached;
any other kind is sent as it is.
"""

import hashlib
import math
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from asyncrl.control.messages import CODEC
from asyncrl.errors import WireError
from asyncrl.types import Group
from asyncrl.wire import codec
from asyncrl.wire.codec import HEADER_BYTES, MESSAGE_LIMITS
from asyncrl.wire.group_frames import GROUP_LIMITS, decode_group, encode_group

GOLDEN = Path(__file__).parents[2] / "tests" / "golden"
GROUP, MESSAGE = GROUP_LIMITS.kind, MESSAGE_LIMITS.kind
WORDS = (
    "uint8",
    "int64",
    "float64",
    "arrays",
    "message",
    "type",
    "fields",
    "Hello",
    "UpdateOrder",
    "spans",
    "",
)
NUMBERS = (
    0,
    1,
    -1,
    127,
    255,
    256,
    2**31 - 1,
    2**31,
    2**62,
    2**63,
    2**64 - 1,
    -(2**63),
    0.5,
    math.nan,
    math.inf,
    True,
    None,
)


@dataclass
class Seen:
    """How far the cases came."""

    accepted: int = 0
    refused: int = 0


def frame_of(case: bytes) -> bytes:
    """The frame that a case stands for."""
    if len(case) < 3 or case[0] not in (GROUP, MESSAGE):
        return case
    meta_bytes = int.from_bytes(case[1:3], "little")
    meta, body = case[3 : 3 + meta_bytes], case[3 + meta_bytes :]
    fields = struct.pack("<8sHHIQ", codec.MAGIC, codec.WIRE_VERSION, case[0], len(meta), len(body))
    return fields + hashlib.blake2b(fields + body + meta, digest_size=16).digest() + body + meta


def case_of(frame: bytes) -> bytes:
    """The inverse, for a frame that is in order."""
    *_, kind, meta_bytes, body_bytes = struct.unpack_from("<8sHHIQ", frame)
    body, meta = frame[HEADER_BYTES : HEADER_BYTES + body_bytes], frame[HEADER_BYTES + body_bytes :]
    return bytes([kind]) + meta_bytes.to_bytes(2, "little") + meta + body


def corpus() -> list[bytes]:
    """The frozen frames of this release as cases, and one of them as it is."""
    frames = [bytes.fromhex(path.read_text()) for path in sorted(GOLDEN.glob("*.hex"))]
    return [*map(case_of, frames), frames[0]]


def check(case: bytes, seen: Seen) -> None:
    """Decode as the learner would. Anything but a WireError, or a group or message in order, raises."""
    frame = frame_of(case)
    for decode in (_group, _message):
        try:
            decode(frame)
        except WireError:
            seen.refused += 1
        else:
            seen.accepted += 1


def _group(frame: bytes) -> None:
    group: Group = decode_group(frame)
    for rollout in group.rollouts:
        lengths = {
            len(rollout.response_ids),
            len(rollout.behaviour_logprobs),
            len(rollout.action_mask),
            len(rollout.versions),
        }
        assert len(lengths) == 1, lengths
        assert np.isfinite(rollout.behaviour_logprobs).all() and math.isfinite(rollout.reward)
        if (turns := rollout.turns) is not None:
            assert (np.diff(turns.ends, prepend=0) > 0).all() and max(turns.ends, default=0) <= lengths.pop()
            assert turns.rewards is None or np.isfinite(turns.rewards).all()
    if group.episode_of is not None and group.rollouts:
        assert set(group.episode_of.tolist()) == set(range(group.episodes))
    decode_group(encode_group(group))  # what is accepted can be passed on


def _message(frame: bytes) -> None:
    message = CODEC.decode(frame)
    assert type(message).__name__ in CODEC._types


def mutants(seed: int, count: int) -> Iterator[bytes]:
    """Of the corpus, and of mutants of it."""
    rng, cases = random.Random(seed), corpus()
    for _ in range(count):
        case = rng.choice(cases)
        for _ in range(rng.randint(1, 3)):
            case = mutate(case, rng)
        yield case


def mutate(case: bytes, rng: random.Random) -> bytes:
    """A case near `case`: another value somewhere in the meta, other bytes, more or fewer of them."""
    if len(case) < 3 or rng.random() < 0.3:
        return _other_bytes(case, rng)
    meta_bytes = int.from_bytes(case[1:3], "little")
    meta, body = case[3 : 3 + meta_bytes], case[3 + meta_bytes :]
    if rng.random() < 0.3:
        body = _other_bytes(body, rng)
    else:
        meta = _other_meta(meta, rng)
    return case[:1] + min(len(meta), 65535).to_bytes(2, "little") + meta[:65535] + body


def _other_bytes(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randint(0, len(changed))
        match rng.randrange(3):
            case 0:
                changed[at : at + 1] = rng.choice((b"\0", b"\x01", b"\x7f", b"\xff", rng.randbytes(1)))
            case 1:
                changed[at:at] = rng.randbytes(rng.randint(1, 8))
            case _:
                del changed[at : at + rng.randint(1, 16)]
    return bytes(changed)


def _other_meta(meta: bytes, rng: random.Random) -> bytes:
    try:
        values: Any = msgpack.unpackb(meta, strict_map_key=False)
        packed: bytes = msgpack.packb(_with_another_value(values, rng))
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException):
        return _other_bytes(meta, rng)
    return packed


def _with_another_value(value: Any, rng: random.Random) -> Any:
    """`value` with one part of it replaced, removed or added, at any depth."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(list(value))
        match rng.randrange(8):
            case 0:
                return {other: item for other, item in value.items() if other != name}
            case 1:
                return value | {_anything(rng): _anything(rng)}
            case _:
                return value | {name: _with_another_value(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        replacement = ([], [value[at]] * 2, [_with_another_value(value[at], rng)])[
            rng.choice((0, 1, 2, 2, 2, 2))
        ]
        return value[:at] + replacement + value[at + 1 :]
    return _anything(rng)


def _anything(rng: random.Random) -> Any:
    return rng.choice((rng.choice(NUMBERS), rng.choice(WORDS), rng.randint(-4, 40), rng.randbytes(3), []))
