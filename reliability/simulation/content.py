"""Frames of the simulation: small, checked like real ones; they say who sampled them with which weights."""

import zlib
from collections.abc import Sequence

import numpy as np

from asyncrl.algo.trainable import GroupLimits, trainable
from asyncrl.errors import WireError
from asyncrl.lineage import Weights
from asyncrl.types import Group, Rollout, version_spans

DEAD = "dead"
LANE = "train"
LIMITS = GroupLimits(vocabulary=2, rollouts=3, max_tokens=8)

Tokens = tuple[int, Sequence[Weights]]
"""A rollout: its reward, and the weights that sampled each of its tokens."""


def encode(
    ticket_id: int,
    sample: str,
    rollouts: Sequence[Tokens],
    *,
    lane: str = LANE,
    token: int = 1,
    padding: int = 0,
) -> bytes:
    """`sample` is unique to one attempt of one generator; `token` is what all rollouts are made of."""
    texts = [
        f"{reward}:" + "/".join(f"{version}.{lineage}" for version, lineage in tokens)
        for reward, tokens in rollouts
    ]
    body = f"{ticket_id} {sample} {lane} {token} {','.join(texts)} {'x' * padding}".encode()
    return b"%08x " % zlib.crc32(body) + body


def decode(frame: bytes) -> Group:
    """The group; its `generator_id` is the sample."""
    checksum, _, body = frame.partition(b" ")
    if checksum != b"%08x" % zlib.crc32(body):
        raise WireError(f"no frame: {frame[:40]!r}")
    ticket_id, sample, lane, token, texts, _ = body.decode().split(" ")
    if sample == DEAD:
        return Group.dead(int(ticket_id), "the reward failed", generator_id=DEAD, version=0, lane=lane)
    rollouts = tuple(_rollout(text, int(token)) for text in texts.split(",") if text)
    newest = max((span.version for rollout in rollouts for span in rollout.version_spans), default=0)
    return Group(
        ticket_id=int(ticket_id),
        rollouts=rollouts,
        generator_id=sample,
        finished_version=max(newest, 0),
        lane=lane,
    )


def is_good(ticket_id: int, frame: bytes) -> bool:
    """Whether it is the group of that ticket, and one that can be digested."""
    try:
        group = decode(frame)
    except WireError:
        return False
    return (group.lane, group.ticket_id) == (LANE, ticket_id) and (
        group.dead_reason is not None or not trainable(group, LIMITS)
    )


def is_hopeless(ticket_id: int, frame: bytes) -> bool:
    """Whether it is that ticket's, and another attempt would be no better."""
    try:
        group = decode(frame)
    except WireError:
        return False
    return (group.lane, group.ticket_id) == (LANE, ticket_id) and not is_good(ticket_id, frame)


def _rollout(text: str, token: int) -> Rollout:
    reward, _, names = text.partition(":")
    weights = [Weights(*map(int, name.split("."))) for name in names.split("/") if name]
    count = len(weights)
    return Rollout(
        prompt_ids=_ONE, response_ids=np.full(count, token, np.int32), action_mask=np.ones(count, np.bool_),
        behaviour_logprobs=np.zeros(count, np.float32), version_spans=version_spans(weights), finish_reason="stop",
        reward=float(reward),
    )  # fmt: skip


_ONE = np.ones(1, np.int32)
