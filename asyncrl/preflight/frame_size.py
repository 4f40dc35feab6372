"""The size of the largest group in the store."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.columns import EXPERTS, KEPT_COUNTS, KEPT_IDS, TEACHER
from asyncrl.config.schema import Config
from asyncrl.hosting.machine import routing_sizes
from asyncrl.rewards.forms import ANSWER_CHARACTERS
from asyncrl.types import Group, Rollout, Turns, VersionSpan
from asyncrl.wire.group_frames import encode_group


def frame_bytes(config: Config) -> int:
    """Return the size of an encoded group with full prompts and responses of two policy versions."""
    prompt, response = config.sampling.max_prompt_tokens, config.sampling.max_response_tokens
    recorded: dict[str, NDArray[Any]] = {TEACHER: np.zeros(response, np.float32)} if config.teacher else {}
    if sizes := routing_sizes(config.model):
        recorded[EXPERTS] = np.zeros((prompt + response, sizes["layers"], sizes["top_k"]), np.int16)
    if (most := config.sampling.top_k) > 0:
        recorded[KEPT_COUNTS] = np.full(response, most, np.int32)
        recorded[KEPT_IDS] = np.zeros(response * most, np.int32)
    rollout = Rollout(
        prompt_ids=np.zeros(prompt, np.int32),
        response_ids=np.zeros(response, np.int32),
        action_mask=np.ones(response, np.bool_),
        behaviour_logprobs=np.zeros(response, np.float32),
        version_spans=(VersionSpan(1, response - 1), VersionSpan(2, 1)),
        finish_reason="length",
        reward_parts=dict.fromkeys(config.reward_parts, 0.0),
        answer="0" * ANSWER_CHARACTERS,
        turns=_full_turns(config),
        recorded=recorded,
    )
    rollouts = (rollout,) * (config.batch.group_size * config.environment.sequences)
    said = config.batch.group_size * config.reward.judgement_bytes
    group = Group(
        ticket_id=1,
        rollouts=rollouts,
        generator_id="g0",
        finished_version=2,
        recorded={"judgements": np.zeros(said, np.uint8)} if said else {},
    )
    return len(encode_group(group, b"key"))


def _full_turns(config: Config) -> Turns | None:
    """Return as many turns as an episode may have, with rewards and states."""
    if not config.environment.is_used:
        return None
    count = min(config.environment.max_turns, config.sampling.max_response_tokens)
    ends = np.arange(1, count + 1, dtype=np.int32)
    return Turns(ends=ends, rewards=np.zeros(count, np.float32), states=np.zeros(count, np.uint64))
