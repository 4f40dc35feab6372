"""The staleness bound: which tickets may be issued, with which weights, and which groups taken. All integers.

    L  max_lag    steps between sampling and training    B  groups    per optimizer step
    W  window     in groups; 1 is strict order           R  rejected  groups consumed so far and not trained
    S  shards     each with B / S and W / S of these; below, B, W, R and id are those of one shard

Every step trains B groups. T is the number of groups trained before the step of `version`. It equals version
* B only while B never changes, so it is counted (in the ledger) and never computed from the version.

Why no group is older than L + ceil((W - 1) / B) when it is trained: let T and R be counted when ticket `id`
is started. By the window, at most id - 1 older groups and W - 1 younger ones are consumed before it. T + R of
these are consumed already, so at most id - 1 - T - R + W - 1 are trained from then on and before it. Hence it
is trained at t <= version + floor((id - 1 - T - R) / B) + ceil((W - 1) / B), and `minimum_version` is L less
than the first two terms.

After a resume with another B, L or W, the new bound holds for every ticket that is started from then on (with
the larger W, until the older tickets are consumed). Tickets started under the old credit have the old bound,
in steps of the old B. Those that turn out older than the new bound allows are rejected as stale, counted, and
their credit returns; they are at most as many as were under way.

Why nothing waits for ever: of the ids up to the limit, at most T + R plus the groups that this step has
accepted are consumed. So a step that still needs n groups finds at least L B + n ids issuable and not
consumed, however many were issued under another credit; and the oldest unfinished id is always eligible.
"""

from collections.abc import Sequence


def credit_limit(trained: int, *, max_lag: int, groups: int, rejected: int) -> int:
    """The highest id that may be issued in the step after `trained` groups: T + R + (L + 1) B.

    So at most (L + 1) B groups are under way or waiting. The limit must be raised at every rejection, not
    only at every step: the step that refills needs the credit.
    """
    return trained + rejected + (max_lag + 1) * groups


def minimum_version(ticket_id: int, *, version: int, limit: int, groups: int) -> int:
    """The oldest weights that may start the ticket: version + (id - 1 - T - R) // B - L.

    Computed from `limit`, the credit limit at `version`, because the store knows neither T nor R. Never below
    0, and never above `version` for an id within the limit.
    """
    return max(0, version - (limit - ticket_id) // groups)


def choose(ready: Sequence[int], *, anchor: int, count: int, window: int) -> list[int] | None:
    """The next `count` ids by the anchored window, all or none.

    Args:
        ready: ids of finished groups, ascending; only the lowest `count` matter.
        anchor: the lowest id that is issued and unfinished, or the next id to be issued if all are finished.

    Younger groups may overtake the anchor while their id is below anchor + W. Ids are taken in ascending
    order, so if the last one is within the window, all are.
    """
    chosen = list(ready[:count])
    if len(chosen) < count or chosen[-1] >= anchor + window:
        return None
    return chosen


def lag_bound(max_lag: int, *, window: int, groups: int, shards: int = 1) -> int:
    """The greatest age of a group when it is trained: L + ceil((W - S) / B) optimizer steps.

    Each of the S shards is a lane with B / S groups per step and a window of W / S, so its bound is
    L + ceil((W / S - 1) / (B / S)).
    """
    return max_lag + -(-(window - shards) // groups)
