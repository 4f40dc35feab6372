"""Frames of the simulation: small, checked like real ones, and telling who sampled them with which weights."""

import zlib

import numpy as np

from asyncrl.errors import WireError
from asyncrl.types import Group, Rollout, VersionSpan

DEAD = "dead"


def encode(ticket_id: int, sample: str, version: int, reward: int, *, padding: int = 0) -> bytes:
    """`sample` is unique to one attempt of one generator."""
    body = f"{ticket_id} {sample} {version} {reward} {'x' * padding}".encode()
    return b"%08x " % zlib.crc32(body) + body


def decode(frame: bytes) -> Group:
    """The group; its `generator_id` is the sample."""
    checksum, _, body = frame.partition(b" ")
    if checksum != b"%08x" % zlib.crc32(body):
        raise WireError(f"no frame: {frame[:40]!r}")
    ticket_id, sample, version, reward, *_ = body.decode().split(" ")
    if sample == DEAD:
        return Group.dead(int(ticket_id), "the reward failed", generator_id=DEAD, version=int(version))
    rollout = Rollout(
        prompt_ids=_ONE, response_ids=_ONE, action_mask=_TRUE, behaviour_logprobs=_ZERO,
        version_spans=(VersionSpan(int(version), 1),), finish_reason="stop", reward=float(reward),
    )  # fmt: skip
    return Group(ticket_id=int(ticket_id), rollouts=(rollout,), generator_id=sample, finished_version=int(version))


_ONE, _TRUE, _ZERO = np.ones(1, np.int32), np.ones(1, np.bool_), np.zeros(1, np.float32)
