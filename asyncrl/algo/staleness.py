"""The staleness bound: which tickets may be issued, with which weights, and which groups may be taken. Integers only.

    L  max_lag    steps between sampling and training    B  groups    per optimizer step
    W  window     in groups; 1 is strict order           R  rejected  groups consumed so far and not trained
    S  shards     each with B / S and W / S of these; below, B, W, R and id are those of one shard

Step t trains weights of version t, so the group that is the p-th accepted one (from 0) is trained at t = p // B.

Why no group is older than L + ceil((W - 1) / B) when it is trained: when ticket `id` is started, R groups have been
rejected, so at most id - 1 - R older groups and, by the window, W - 1 younger ones are accepted before it; hence
t <= (id - 1 - R) // B + ceil((W - 1) / B), and `minimum_version` is (id - 1 - R) // B - L.

Why nothing waits for ever: a step that still needs n groups finds at least n ids issuable and not consumed, because
every rejection raises the limit by one; and the oldest unfinished id is always eligible.
"""

from collections.abc import Sequence


def credit_limit(version: int, *, max_lag: int, groups: int, rejected: int) -> int:
    """The highest id that may be issued while `version` is being trained: (L + version + 1) B + R.

    So at most (L + 1) B groups are under way or waiting. It must be raised at every rejection, not only at every
    step: the step that refills needs the credit.
    """
    return (max_lag + version + 1) * groups + rejected


def minimum_version(ticket_id: int, *, version: int, limit: int, groups: int) -> int:
    """The oldest weights that may start the ticket: (id - 1 - R) // B - L, written with what the store knows.

    `limit` is the credit limit at `version`. Never below 0, and never above `version` for an id within the limit.
    """
    return max(0, version - (limit - ticket_id) // groups)


def choose(ready: Sequence[int], *, anchor: int, count: int, window: int) -> list[int] | None:
    """The next `count` ids by the anchored window, all or none.

    Args:
        ready: ids of finished groups, ascending; only the lowest `count` matter.
        anchor: the lowest id that is issued and unfinished, or the next id to be issued when all are finished.

    Younger groups may overtake the anchor while their id is below anchor + W. Taking in ascending order, an id below
    the anchor is its own anchor, so only the last one needs looking at.
    """
    chosen = list(ready[:count])
    if len(chosen) < count or chosen[-1] >= anchor + window:
        return None
    return chosen


def lag_bound(max_lag: int, *, window: int, groups: int, shards: int = 1) -> int:
    """No group is older than this when it is trained: L + ceil((W - S) / B) optimizer steps.

    In S shards, each is a lane with B / S groups per step and a window of W / S: L + ceil((W / S - 1) / (B / S)).
    """
    return max_lag + -(-(window - shards) // groups)
