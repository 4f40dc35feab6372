"""Which groups are not trained, and why: a gate decodes and checks each taken frame, then filters judge it.

A reason is `kind: details`; reasons are counted by kind.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from asyncrl.algo.filters import GroupOutcome
from asyncrl.algo.trainable import MOST_CHARACTERS, UNTRAINABLE, GroupLimits, trainable
from asyncrl.buffer.base import DEADLY, GIVEN_UP, LearnerBuffer, Take, kind_of, one_line
from asyncrl.errors import RowsChanged, RunError, WireError
from asyncrl.hosting.progress import beat
from asyncrl.lineage import INITIAL, History
from asyncrl.types import Group

log = logging.getLogger(__name__)

Judge = Callable[[Group, int], str | None]
"""(group, version being trained) -> reason to reject it, or None."""

# The kind of groups whose ticket failed too often.
DEAD = "dead"
# The kind of groups sampled by weights that the learner lost when it went back to a checkpoint.
DISCARDED_LINEAGE = "discarded_lineage"
# Kinds that mean a fault. Other kinds come from filters, or from settings that changed before a resume.
FAULTS = frozenset({DEAD, DEADLY, UNTRAINABLE, "filter_failed", "image_changed"})

# A kind is the name of a metric and a key in every checkpoint, so kinds of users' filters are few and short.
MOST_KINDS = 20
OTHER = "other"
# Dead groups, and at least a batch, after which a run ends if no other group has arrived.
FEWEST_DEAD = 8
# Different reasons in the message of a run in which every ticket dies.
MOST_LISTED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """The checks of one lane."""

    # Frames of other lanes are rejected, because lanes use the same ticket ids.
    lane: str
    decode: Callable[[bytes], Group]
    limits: GroupLimits
    # Returns a reason if learners died while they trained on this frame; then the frame is not decoded.
    condemned: Callable[[bytes], str | None] = lambda frame: None
    # Returns the ticket's id outside the buffer, which the frame carries: a shard has ids of its own.
    name_of: Callable[[int], int] = lambda ticket_id: ticket_id

    def groups(self, buffer: LearnerBuffer, take: Take) -> list[tuple[Group, bytes]] | None:
        """Return the groups of a take with their frames, or None after a frame that cannot be decoded.

        The gate rejects such a frame; the caller takes again and gets the rest of the take. A group that
        cannot be trained on is returned dead; its `dead_reason` begins with dead, untrainable or deadly.
        """
        groups: list[tuple[Group, bytes]] = []
        for ticket_id, frame in zip(take.ids, buffer.frames(take.ids), strict=True):
            beat()
            name = self.name_of(ticket_id)
            where = {"ticket_id": name, "lane": self.lane}
            try:
                group, reason = self._group(name, frame)
            except WireError as error:
                invalid = "the frame of group %d is not valid and counts as a failed attempt: %s"
                log.error(invalid, name, error, extra=where)
                buffer.reject_frame(take, ticket_id, frame, f"{DEAD}: undecodable: {error}")
                return None
            if reason:
                log.error("group %d is set aside: %s", name, reason, extra=where)
                buffer.reject_frame(take, ticket_id, frame, reason, final=True)
            groups.append((group, frame))
        return groups

    def _group(self, name: int, frame: bytes) -> tuple[Group, str]:
        """Return the group of a frame, and why its ticket must be given up now, or "". Raises WireError."""
        if frame.startswith(GIVEN_UP):
            given = frame.removeprefix(GIVEN_UP)[:4000].decode(errors="replace")
            # A generator can write this text, and its kind becomes the name of a metric.
            is_known = kind_of(given) in (DEAD, UNTRAINABLE, DEADLY)
            return _dead(name, given if is_known else f"{DEAD}: {given}"), ""
        if reason := self.condemned(frame):
            return _dead(name, found := f"{DEADLY}: {reason}"), found
        group = self.decode(frame)
        if (group.lane, group.ticket_id) != (self.lane, name):
            raise WireError(
                f"stored in lane {self.lane} under id {name}, but its group says lane {group.lane[:40]!r}, "
                f"id {group.ticket_id}"
            )
        if group.dead_reason is not None:
            return _dead(name, f"{DEAD}: {group.dead_reason}", generator_id=group.generator_id), ""
        if reason := trainable(group, self.limits):
            return _dead(name, found := f"{UNTRAINABLE}: {reason}"), found
        return group, ""


def _dead(ticket_id: int, reason: str, *, generator_id: str = "") -> Group:
    return Group.dead(ticket_id, reason, generator_id=generator_id[:MOST_CHARACTERS], version=0)


def make_judge(
    filters: Sequence[Callable[[GroupOutcome], str | None]],
    *,
    drop_older_than: int | None,
    needs_greedy: bool = False,
    history: History = INITIAL,
    fault: Callable[[Group], str | None] | None = None,
) -> Judge:
    """Return a judge that applies the group filters, and before them rejects a group for these reasons:

    `discarded_lineage`: the learner lost its weights, which are not in `history` or newer than the version.
    `stale`: it is older than `drop_older_than`. Its ticket was for lost steps, or `staleness.policy` is drop.
    `no_greedy_reward`: the advantage needs a greedy reward, and another algorithm sampled the group.
    Those of `fault`, which reads the images of the group's row, such as `image_changed`.
    """

    def judge(group: Group, version: int) -> str | None:
        sampled_by = {span.weights for rollout in group.rollouts for span in rollout.version_spans}
        versions = [weights.version for weights in sampled_by] or [version]
        if max(versions) > version or not all(weights in history for weights in sampled_by):
            return DISCARDED_LINEAGE
        if drop_older_than is not None and version - min(versions) > drop_older_than:
            return "stale"
        if needs_greedy and group.greedy_reward is None:
            return "no_greedy_reward"
        if fault is not None and (reason := fault(group)):
            return reason
        episodes = group.by_episode
        outcome = GroupOutcome(
            rewards=tuple(episode[0].reward for episode in episodes),
            lengths=tuple(sum([rollout.actions for rollout in episode]) for episode in episodes),
            finish_reasons=tuple(episode[0].finish_reason for episode in episodes),
            missing=sum(group.missing.values()),
        )
        return next((reason for accepts in filters if (reason := accepts(outcome)) is not None), None)

    return judge


def reason_to_reject(group: Group, version: int, *, judge: Judge, known_kinds: Collection[str]) -> str | None:
    """Return why `group` is not trained, or None. A group for which a user's filter raises is not trained.

    `known_kinds` are the kinds counted so far; after `MOST_KINDS` of them a new kind counts as `OTHER`.
    """
    if group.dead_reason is not None:
        return group.dead_reason
    try:
        reason = judge(group, version)
        return None if reason is None else _with_bounded_kind(reason, known_kinds)
    except RowsChanged:  # true of every group that follows: the learner ends, and reads its rows again
        raise
    except Exception as error:
        log.exception(
            "group %d cannot be judged and is not trained",
            group.ticket_id,
            extra={"ticket_id": group.ticket_id},
        )
        return one_line(f"filter_failed: {type(error).__name__}: {error}")


def _with_bounded_kind(reason: str, known_kinds: Collection[str]) -> str:
    if not isinstance(reason, str):
        raise TypeError(f"a filter returned {reason!r:.100}; it must return a reason, as text, or None")
    kind = re.sub(r"[^A-Za-z0-9_.-]", "_", kind_of(reason).strip())[:40] or "unnamed"
    if kind not in known_kinds and len(known_kinds) >= MOST_KINDS:
        if OTHER not in known_kinds:
            log.warning(
                "filters have rejected groups for %d kinds of reasons; further kinds count as `%s`, the "
                "first is `%s`. Write what differs from group to group after a colon: the text before it is "
                "the kind, the name of a metric",
                *(MOST_KINDS, OTHER, one_line(reason)[:200]),
            )
        kind = OTHER
    return one_line(reason if kind == kind_of(reason) else f"{kind}: {reason}")


def require_life(reasons: Sequence[str], batch: int) -> None:
    """Raise RunError if there is a batch of `reasons`, those of a run of which all groups are dead."""
    if len(reasons) < max(FEWEST_DEAD, batch):
        return
    # Reasons of equal faults differ in numbers: tickets, attempts, seconds.
    examples = {re.sub(r"\d+", "#", reason): reason for reason in reasons}
    counts = Counter(re.sub(r"\d+", "#", reason) for reason in reasons)
    listed = "".join(f"\n  {count} x {examples[shape]}" for shape, count in counts.most_common(MOST_LISTED))
    more = f"\n  {len(counts) - MOST_LISTED} further reasons" if len(counts) > MOST_LISTED else ""
    raise RunError(
        f"all {len(reasons)} groups that have arrived have failed, and none can be trained on; fix what the "
        f"reasons name, then the same command goes on:{listed}{more}"
    )


def too_many_rejected(reasons: Sequence[str], takes: int, accepted: str, most: int) -> RunError:
    """Return the error for a step that rejected more than `most` groups; `accepted` is such as "3 of 8"."""
    kinds = Counter(map(kind_of, reasons))
    [(commonest, _)] = kinds.most_common(1)
    example = next(reason for reason in reversed(reasons) if kind_of(reason) == commonest)
    cure = (
        f"No filter rejected them: fix what the reasons name. The last one of {commonest} is `{example}`"
        if commonest in FAULTS
        else "Use easier or harder prompts so that rewards within a group differ, drop the filter, or raise "
        "the limit"
    )
    return RunError(
        f"one step: {len(reasons)} groups were rejected in {takes} takes ({dict(kinds)}), only "
        f"{accepted} accepted; algorithm.max_refills allows {most} rejections. {cure}"
    )
