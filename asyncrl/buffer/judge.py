"""Which groups are not trained, and why. A reason is `kind: details`; reasons are counted by kind."""

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from asyncrl.algo.filters import GroupOutcome
from asyncrl.algo.trainable import UNTRAINABLE
from asyncrl.buffer.base import DEADLY, kind_of, one_line
from asyncrl.buffer.gate import DEAD
from asyncrl.errors import RowsChanged, RunError
from asyncrl.lineage import INITIAL, History
from asyncrl.types import Group

log = logging.getLogger(__name__)

Judge = Callable[[Group, int], str | None]
"""(group, version being trained) -> reason to reject it, or None."""

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
