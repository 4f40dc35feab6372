"""What one scenario did to a run, as plain values, and the table of figures over several of them."""

import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .faults import Scenario
from .lineage import Verdict
from .poison import fates
from .world import World

FIGURES = (
    ("kill -9 of a generator", ("kill_generator",), 200),
    ("kill -9 of the learner", ("kill_learner",), 200),
    ("kill -9 of the store", ("kill_store",), 200),
    ("store loses power: log cut to the last sync", ("power_loss",), 200),
    ("store wiped: FLUSHALL, or an empty disk", ("wipe",), 50),
    ("replies swallowed", ("swallowed",), 2000),
    ("requests repeated up to 3 s late", ("repeated",), 2000),
    ("partition of a pair of roles, 1 to 30 s", ("partition",), 60),
    ("link down between two network namespaces, 1 to 30 s", ("link_down",), 60),
    ("SIGSTOP and SIGCONT of a generator", ("pause_generator",), 100),
    ("SIGSTOP of the learner, and a second one takes over", ("pause_learner", "usurp"), 50),
    ("second learner on the same host, refused", ("second_learner",), 10),
    ("disk of the store full", ("full_disk",), 20),
)
"""(fault, kinds of fault, how many are aimed at)"""
RECOVERIES = (
    ("kill of the store to the next TAKE", ("kill_store",), "p50 <= 0.3 s, p99 <= 1.5 s"),
    ("power loss of the store to the next TAKE", ("power_loss",), ""),
    ("kill of the learner to its next step", ("kill_learner",), "<= 6 s"),
    ("kill of a generator to its groups sampled again", ("kill_generator",), "<= 2.5 s"),
    ("end of a partition to the next TAKE", ("partition",), "<= 1.5 s"),
    ("link up again to the next TAKE", ("link_down",), "<= 1.5 s"),
    ("wipe of the store to the next TAKE", ("wipe",), ""),
    ("room on the disk to the next TAKE", ("full_disk",), "<= 2 s"),
)
"""(what is measured, kinds of fault, target)"""


def outcome(world: World, scenario: Scenario, seconds: float, verdict: Verdict) -> dict[str, Any]:
    """Plain values of a finished world."""
    poisoned, survived = fates(world, verdict)
    proxies = world.proxies.values()
    struck = dict(world.struck) | {
        "swallowed": sum(proxy.swallowed for proxy in proxies),
        "repeated": sum(proxy.repeated for proxy in proxies),
    }
    return {
        "scenario": scenario.name,
        "seconds": round(seconds, 1),
        "struck": {kind: count for kind, count in sorted(struck.items()) if count},
        "groups": verdict.groups,
        "steps": verdict.steps,
        "rejected": verdict.rejected,
        "lost": verdict.lost,
        "duplicated": verdict.duplicated,
        "wrong": [*verdict.wrong, *survived],
        "log_discarded_bytes": world.disk.discarded_bytes,
        "unexplained_exits": dict(world.exits),
        "given_back": world.given_back,
        "hangs": hangs(world),
        "poisoned": poisoned,
        "pauses_s": pauses(world) if max(scenario.at_once) > 1 else {},
        "found": world.found(),
        "recoveries_s": recoveries(world) if scenario.calm else {},
    }


TOGETHER = "several at once"


def pauses(world: World) -> dict[str, list[float]]:
    """The longest time without a step after each fault, by kind; simultaneous faults have one name."""
    found: dict[str, list[float]] = defaultdict(list)
    for one in world.rounds:
        found[one["kinds"][0] if len(one["kinds"]) == 1 else TOGETHER].append(one["pause_s"])
    return dict(sorted(found.items()))


def hangs(world: World) -> list[dict[str, Any]]:
    """What was stopped, when it was replaced, and when the next step was made, in seconds."""
    steps = [event["at_s"] for event in world.events() if event["event"] == "step"]
    return [
        {
            "kinds": one["kinds"],
            "replaced_s": one["replaced_s"],
            "step_s": round(_after(steps, one["at_s"]) - one["at_s"], 2),
        }
        for one in world.hangs
    ]


def recoveries(world: World) -> dict[str, list[float]]:
    """Seconds from each fault to the sign that it is over, by kind."""
    events, offered = world.events(), _offered(world)
    takes = [event["at_s"] for event in events if event["event"] == "take"]
    found: dict[str, list[float]] = defaultdict(list)
    for kind, faults in world.recoveries.items():
        for at_s, expected in faults:
            if kind == "kill_learner":
                signs = [
                    e["at_s"]
                    for e in events
                    if e["at_s"] > at_s and e["event"] == "step" and e["pid"] != expected["not_pid"]
                ]
                ends = signs[:1]
            elif kind == "kill_generator":
                ends = [_after(offered[i], at_s) for i in expected["held"] if _after(offered[i], at_s)]
            elif expected.get("pair") == "control":
                continue
            else:
                ends = [_after(takes, at_s)]
            found[kind] += [round(end - at_s, 3) for end in ends if end]
    return dict(found)


def _offered(world: World) -> dict[int, list[float]]:
    """When groups were handed over, by id."""
    found: dict[int, list[float]] = defaultdict(list)
    for path in world.directory.glob("put-*.txt"):
        for line in path.read_text().splitlines():
            ticket_id, _, at_s = line.split(" ")
            found[int(ticket_id)].append(float(at_s))
    return defaultdict(list, {ticket_id: sorted(times) for ticket_id, times in found.items()})


def _after(times: Sequence[float], at_s: float) -> float:
    """The first of `times` after `at_s`; 0 when there is none."""
    index = bisect_right(times, at_s)
    return times[index] if index < len(times) else 0.0


def table(outcomes: Iterable[Mapping[str, Any]]) -> list[str]:
    """The figures, as Markdown: faults with what they cost, then times."""
    outcomes = list(outcomes)
    rows = ["| fault | injected | aim | groups | lost | duplicated |", "|---|---|---|---|---|---|"]
    for fault, kinds, aim in FIGURES:
        struck = [one for one in outcomes if any(one["struck"].get(kind) for kind in kinds)]
        count = sum(one["struck"].get(kind, 0) for one in struck for kind in kinds)
        groups, lost, duplicated = (
            sum(one[key] for one in struck) for key in ("groups", "lost", "duplicated")
        )
        rows.append(f"| {fault} | {count} | {aim} | {groups} | {lost} | {duplicated} |")
    rows += [
        "",
        "| seconds from | seed | times | p50 | p99 | longest | target |",
        "|---|---|---|---|---|---|---|",
    ]
    for what, kinds, target in RECOVERIES:
        for seed in dict.fromkeys(one["seed"] for one in outcomes):
            recoveries_s = [one["recoveries_s"] for one in outcomes if one["seed"] == seed]
            if times := sorted(t for each in recoveries_s for kind in kinds for t in each.get(kind, ())):
                p50, p99 = statistics.median(times), times[min(len(times) - 1, int(0.99 * len(times)))]
                spread = f"{len(times)} | {p50:.2f} | {p99:.2f} | {times[-1]:.2f}"
                rows.append(f"| {what} | {seed} | {spread} | {target} |")
    rows += ["", "| scenario | runs, as seed: seconds of faults |", "|---|---|"]
    for name in dict.fromkeys(one["scenario"] for one in outcomes):
        runs = ", ".join(
            f"{one['seed']}: {one['seconds']:.0f}" for one in outcomes if one["scenario"] == name
        )
        rows.append(f"| {name} | {runs} |")
    return rows
