"""An intake over a memory buffer, and frames for it."""

from collections.abc import Callable
from typing import Any

import numpy as np

from asyncrl.algo.trainable import GroupLimits
from asyncrl.buffer.intake import Intake
from asyncrl.buffer.judge import Gate
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.memory import MemoryBuffer
from asyncrl.types import Group, Rollout, VersionSpan
from asyncrl.wire.group_frames import decode_group, encode_group

B = 4
GATE = Gate(lane="train", decode=decode_group, limits=GroupLimits(vocabulary=10, rollouts=2, max_tokens=8))


def frame(ticket_id: int, version: int = 0) -> bytes:
    rollout = Rollout(
        prompt_ids=np.array([1, 2], dtype=np.int32),
        response_ids=np.array([3], dtype=np.int32),
        action_mask=np.array([True]),
        behaviour_logprobs=np.array([-0.5], dtype=np.float32),
        version_spans=(VersionSpan(version, 1),),
        finish_reason="stop",
        reward=float(ticket_id % 2),
    )
    return encode_group(
        Group(ticket_id=ticket_id, rollouts=(rollout,), generator_id="g", finished_version=version)
    )


def intake(
    buffer: MemoryBuffer, judge: Callable[[Group, int], str | None] = lambda group, version: None, **more
) -> Intake:
    settings: dict[str, Any] = {
        "groups": B,
        "window": 2 * B,
        "max_lag": 1,
        "max_refills": 3,
        "stall_s": 60.0,
    } | more
    one = Intake(buffer=buffer, ledger=Ledger(), judge=judge, **{"gate": GATE} | settings)
    one.recover(0)
    return one


def ids_of(collected) -> list[int]:
    return [group.ticket_id for group in collected.groups]
