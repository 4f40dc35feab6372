"""What must hold whenever a call of the store is over, and at the end."""

from collections.abc import Sequence
from typing import Any

from asyncrl.buffer.ledger import Ledger, next_chain
from asyncrl.buffer.shards import join, ledgers_of

from .lane import Lane, require


def check_state(lane: Lane, strays: set[int]) -> None:
    """Every issued id is in one place, every group has its frame, the takes are a chain, the bytes add up.

    Args:
        strays: ids whose frame came with a call that found no functions; a recovery clears them up.
    """
    issued, watermark, frames, takes = lane.issued, lane.watermark, lane.frames, lane.takes
    leased, taken = lane.leased, lane.taken
    places = sorted([*range(1, watermark + 1), *lane.done, *leased, *lane.reissue, *lane.ready, *taken])
    require(places == list(range(1, issued + 1)), "an id is lost or in two places", issued, watermark, places)
    require(
        leased == lane.deadlines.keys() == lane.holders.keys(),
        "leases disagree",
        leased,
        lane.deadlines,
        lane.holders,
    )
    stored = lane.ready | set(taken)
    require(stored <= frames.keys(), "a group has no frame", stored - frames.keys())
    require(frames.keys() - stored <= strays, "a frame belongs to no group", frames.keys() - stored)
    counted = sum(len(frames[i]) for i in stored)
    require(lane.number("bytes") == counted, "bytes do not add up", lane.number("bytes"), counted)
    require(
        not any(map(lane.is_done, lane.attempts)),
        "attempts of done ids are left",
        lane.attempts,
        watermark,
        lane.done,
    )
    require(lane.deaths.keys() <= leased | lane.reissue, "deaths of stored ids are left", lane.deaths, stored)
    number, chain = lane.number("committed"), None
    for n in sorted(takes):
        previous, after, ids = takes[n]
        require(n == number + 1 and chain in (None, previous), "takes are no chain", n, number, takes)
        require(after == next_chain(previous, ids), "a take's hash is wrong", n)
        number, chain = n, after
    require(number == lane.number("last"), "the last take is not there", number, lane.number("last"))
    require(
        chain in (None, lane.meta.get("chain")), "the chain ends elsewhere", chain, lane.meta.get("chain")
    )


def check_lineage(
    history: list[dict[str, Any]],
    ledgers: Sequence[Ledger],
    produced: dict[int, set[str]],
    sampled_by: dict[str, set[tuple[int, int]]],
) -> None:
    """The weights of a checkpoint: every id once, only what was sampled for it, by the weights that led here
    and in time, and the ledgers say the same.

    Args:
        produced: ticket id -> the samples that were made for it. sampled_by: sample -> (version, serial
        number) of all weights that took part; no two weights have the same number.
    """
    shards, serials = len(ledgers), [0, *(entry["serial"] for entry in history)]
    replayed, trained = ledgers_of({}, shards), 0
    consumed = [(shard, i) for entry in history for shard, ids in entry["takes"] for i in ids]
    require(len(consumed) == len(set(consumed)), "an id was trained twice", history)
    for step, entry in enumerate(history):
        require(entry["version"] == step, "a step is missing or repeated", entry["version"], step)
        require(len(entry["trained"]) == entry["groups"], "a step has another size", entry)
        for shard, ids in entry["takes"]:
            replayed[shard].consume(tuple(ids))
        of_takes = [join(shard, i, shards) for shard, ids in entry["takes"] for i in ids]
        of_groups = [i for i, *_ in entry["trained"] + entry["rejected"]]
        require(sorted(of_groups) == sorted(of_takes), "a step's ids are not those of its takes", entry)
        for ticket_id, sample, oldest in entry["trained"]:
            require(
                sample in produced.get(ticket_id, ()),
                "trained on what nobody sampled for it",
                ticket_id,
                sample,
            )
            weights = sampled_by[sample]
            require(
                all(version <= step for version, _ in weights),
                "a group is younger than its learner",
                step,
                ticket_id,
            )
            lost = [one for one in weights if serials[one[0]] != one[1]]
            require(not lost, "trained on a group of weights that were lost", step, ticket_id, lost)
            require(oldest == min(weights)[0], "a group says another age", ticket_id, oldest, weights)
            require(
                step - oldest <= entry["max_age"], "a group is older than the bound", step, ticket_id, oldest
            )
        trained += len(entry["trained"])
    for mine, told in zip(replayed, ledgers, strict=True):
        same = all(
            getattr(mine, name) == getattr(told, name) for name in ("watermark", "above", "takes", "chain")
        )
        require(same, "ledger and weights disagree", mine, told)
        require(told.consumed == told.trained + told.total_rejected, "a ledger's sums are wrong", told)
    require(
        trained == sum(ledger.trained for ledger in ledgers),
        "more or less was trained than booked",
        trained,
        ledgers,
    )


def check_nothing_is_left(lane: Lane) -> None:
    """After everything issued was consumed and committed."""
    allowed = {"meta", "totals", "counters", "requests", "dead_letters"}
    require(lane.places_in_use <= allowed, "keys are left behind", lane.places_in_use - allowed)
    require(lane.number("bytes") == 0, "bytes are left behind", lane.number("bytes"))
