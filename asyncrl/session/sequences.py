"""Flattens a tree of turns: each leaf is one sequence, and each turn is trained once."""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from asyncrl.columns import KEPT_COUNTS, KEPT_IDS
from asyncrl.errors import DriftError
from asyncrl.session.base import Turn
from asyncrl.types import Rollout, Turns, VersionSpan


def sequences_of(turns: Sequence[Turn]) -> tuple[Rollout, ...]:
    """Return the sequences of all leaves, in the order of recording.

    A sequence ends with its last action: what follows is context of nothing. A leaf whose turns are all
    trained elsewhere, or are not trained at all, gives no sequence. If the turns of two sequences took place
    in turn, `Turns.order` says when. Raises DriftError.
    """
    done: set[int] = set()
    found: list[tuple[Sequence[Turn], set[int]]] = []
    for leaf in turns:
        if leaf.children:
            continue
        path = leaf.path
        _require_no_drift(path)
        actions = {turn.index for turn in path if turn.is_trained} - done
        while path and path[-1].index not in actions:
            path.pop()
        if path:
            found.append((path, actions))
        done |= actions
    order = [turn.index for path, actions in found for turn in path if turn.index in actions]
    is_mixed = order != sorted(order)
    return tuple(_sequence(path, actions, is_mixed=is_mixed) for path, actions in found)


def _sequence(path: Sequence[Turn], actions: set[int], *, is_mixed: bool) -> Rollout:
    """The turns of `path` one behind the other; those in `actions` are trained."""
    ids: list[NDArray[np.int32]] = []
    mask: list[NDArray[np.bool_]] = []
    logprobs: list[NDArray[np.float32]] = []
    spans: list[VersionSpan] = []
    counts: list[NDArray[np.int32]] = []
    kept: list[NDArray[np.int32]] = []
    ends: list[int] = []
    length = 0
    for turn in path:
        given, rollout = len(turn.delta_ids) if turn.parent else 0, turn.rollout
        if given:
            ids.append(np.array(turn.delta_ids, dtype=np.int32))
            mask.append(np.zeros(given, dtype=np.bool_))
            logprobs.append(np.zeros(given, dtype=np.float32))
            spans.append(spans[-1]._replace(tokens=given))
        is_action = turn.index in actions
        ids.append(rollout.response_ids)
        mask.append(rollout.action_mask & is_action)
        logprobs.append(rollout.behaviour_logprobs * np.float32(is_action))
        counts += [np.zeros(given, np.int32), np.zeros(len(rollout.response_ids), np.int32)]
        if is_action and KEPT_COUNTS in rollout.recorded:
            counts[-1] = rollout.recorded[KEPT_COUNTS]
            kept.append(rollout.recorded[KEPT_IDS])
        spans += rollout.version_spans
        length += given + len(rollout.response_ids)
        if is_action:
            ends.append(length)
    return replace(
        path[-1].rollout,
        prompt_ids=path[0].rollout.prompt_ids,
        response_ids=np.concatenate(ids),
        action_mask=np.concatenate(mask),
        behaviour_logprobs=np.concatenate(logprobs),
        version_spans=_merged(spans),
        recorded={KEPT_COUNTS: np.concatenate(counts), KEPT_IDS: np.concatenate(kept)} if kept else {},
        turns=_turns([turn for turn in path if turn.index in actions], ends, is_mixed=is_mixed),
    )


def _turns(trained: Sequence[Turn], ends: Sequence[int], *, is_mixed: bool) -> Turns | None:
    rewards = states = order = None
    if any(turn.reward is not None for turn in trained):
        rewards = np.array([turn.reward or 0.0 for turn in trained], dtype=np.float32)
    if any(turn.state is not None for turn in trained):
        states = np.array([turn.state or 0 for turn in trained], dtype=np.uint64)
    if is_mixed:
        order = np.array([turn.index for turn in trained], dtype=np.int32)
    if len(ends) == 1 and rewards is None and states is None and order is None:
        return None
    return Turns(ends=np.array(ends, dtype=np.int32), rewards=rewards, states=states, order=order)


def _merged(spans: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
    """`spans` with neighbours of the same weights joined."""
    return tuple(
        VersionSpan(weights.version, sum(span.tokens for span in run), weights.lineage)
        for weights, run in groupby(spans, key=lambda span: span.weights)
    )


def _require_no_drift(path: Sequence[Turn]) -> None:
    """Raise DriftError unless the engine's prompt of every turn is the ids before it."""
    before = blake2b()
    for turn in path:
        before.update(np.array(turn.delta_ids, dtype=np.int32).tobytes())
        if before.digest() != turn.prompt_digest:
            raise DriftError(
                f"turn {turn.index} of a session was sampled behind other token ids than its sequence has "
                "there; the engine must report the prompt that the session gave it"
            )
        before.update(turn.sampled_ids.astype(np.int32).tobytes())
