"""The staleness bound: which tickets may be issued, with which weights, and which groups taken. All integers.

    L  max_lag    steps between sampling and training    B  groups    per step
    W  window     in groups; 1 is strict order           R  rejected  groups consumed so far and not trained
    S  shards     each with B / S and W / S of these; below, B, W, R and id are those of one shard

Every step trains B groups. T is the number of groups trained before the step of `version`. The ledger counts
it; it is not computed as version * B, because a resumed run may have another B.

No group is older than L + ceil((W - 1) / B) when trained: let T and R be counted when ticket `id` starts. By
the window, at most id - 1 older and W - 1 younger groups are consumed before it. T + R of these already are,
so at most id - 1 - T - R + W - 1 are trained from then on and before it. So it is trained at t <= version +
floor((id - 1 - T - R) / B) + ceil((W - 1) / B), and `minimum_version` is L less than the first two terms.

After a resume with another B, L or W, the new bound holds for every ticket that is started from then on (with
the larger W, until the older tickets are consumed). Tickets started under the old credit have the old bound,
in steps of the old B. If one is older than the new bound allows, its group is rejected as stale and counted,
and its credit returns; only tickets that were under way at the resume can be.

Why nothing waits for ever: of the ids up to the limit, at most T + R plus the groups that this step has
accepted are consumed. So a step that still needs n groups finds at least L B + n ids issuable and not
consumed, however many were issued under another credit; and the oldest unfinished id is always eligible.
"""

from collections.abc import Sequence


def credit_limit(trained: int, *, max_lag: int, groups: int, rejected: int) -> int:
    """Return the highest id that may be issued in the step after `trained` groups: T + R + (L + 1) B.

    So at most (L + 1) B groups are under way or waiting. A rejection must raise the limit immediately: the
    step needs the credit to refill.
    """
    return trained + rejected + (max_lag + 1) * groups


def minimum_version(ticket_id: int, *, version: int, limit: int, groups: int) -> int:
    """Return the oldest version that may start the ticket: version + (id - 1 - T - R) // B - L, at least 0.

    `limit` is the credit limit at `version`; the store knows neither T nor R. No id within the limit needs a
    version above `version`.
    """
    return max(0, version - (limit - ticket_id) // groups)


def choose(ready: Sequence[int], *, anchor: int, count: int, window: int) -> list[int] | None:
    """Return the next `count` ids by the anchored window, or None if they are not all ready.

    Args:
        ready: ids of finished groups, ascending; only the lowest `count` matter.
        anchor: the lowest id that is issued and unfinished, or the next id to be issued if all are finished.

    Younger groups may overtake the anchor while their ids are below anchor + W.
    """
    chosen = list(ready[:count])
    if len(chosen) < count or chosen[-1] >= anchor + window:
        return None
    return chosen


def lag_bound(max_lag: int, *, window: int, groups: int, shards: int = 1) -> int:
    """Return the greatest age of a group when it is trained: L + ceil((W - S) / B) steps.

    This is the bound above with the B / S and W / S of one shard: L + ceil((W / S - 1) / (B / S)).
    """
    return max_lag + -(-(window - shards) // groups)
