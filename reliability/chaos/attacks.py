"""The table of docs/reliability.md of attacks, with amounts and results."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .outcome import TOGETHER
from .poison import GROUPS

Run = Mapping[str, Any]
POISON, FILE, HANG = "poison: ", "file: ", "hang: "


class Attack(NamedTuple):
    """One row: in words, and the kinds of fault that count for it, or what they begin with."""

    words: str
    kinds: tuple[str, ...]


INJECTED = (
    Attack(
        "a generator, the learner or the store killed (kill -9)",
        ("kill_generator", "kill_learner", "kill_store"),
    ),
    Attack("power loss of the store: its log is cut to the last sync", ("power_loss",)),
    Attack("the store wiped: FLUSHALL, or an empty disk", ("wipe",)),
    Attack("replies of the store swallowed, requests repeated late", ("swallowed", "repeated")),
    Attack("two roles cut off from each other, 1 to 30 s", ("partition", "link_down")),
    Attack("the disk of the store full", ("full_disk",)),
    Attack(
        "a generator or the learner stopped and woken; a second learner",
        ("pause_", "usurp", "second_learner"),
    ),
    Attack(
        "a worker, fork server, MCP server or sandbox of an environment, or an agent, killed or stopped",
        ("kill of ", "stop of "),
    ),
    Attack("a process stopped and never woken, of each kind, of pairs, all at once", (HANG,)),
    Attack(f"an authentic frame that lies or cannot be decoded, {len(GROUPS) + 1} kinds", (POISON,)),
    Attack("a prompt that kills each generator that samples it", ("deadly ticket",)),
    Attack("a group that kills each learner that trains on it", ("deadly step",)),
    Attack("a wrong message to the control plane, signed with the run's key", ("wrong control message",)),
    Attack("hostile values written into the store past all functions", ("hostile store values",)),
    Attack("a file of the learner or the store truncated, emptied, a bit flipped, missing", (FILE,)),
)


def _is_of(kind: str, kinds: Sequence[str]) -> bool:
    return any(kind == one or (one.endswith((" ", "_")) and kind.startswith(one)) for one in kinds)


def _struck(run: Run) -> Counter[str]:
    """How often each kind struck; hangs under the names of what was stopped."""
    found = Counter({kind: count for kind, count in run["struck"].items() if kind != "stop"})
    found.update(f"{HANG}{' and '.join(hang['kinds'])}" for hang in run.get("hangs", ()))
    return found


def attacks(found: Mapping[str, Any]) -> Iterator[str]:
    """Every family of attacks in one row, over all campaigns with and without a model."""
    runs = [
        run for part in ("volume", "hangs", "episodes", "hardening") for run in _runs(found.get(part, {}))
    ]
    hardening = _runs(found.get("hardening", {}))
    yield (
        "| attack | injected | lost | trained twice | runs that needed a person | longest time without a "
        "step after it, s |"
    )
    yield "|---|---|---|---|---|---|"
    for words, kinds in INJECTED:
        by_run = [(sum(n for kind, n in _struck(run).items() if _is_of(kind, kinds)), run) for run in runs]
        hit = [(count, run) for count, run in by_run if count]
        if not hit:
            continue
        count, struck = sum(count for count, _ in hit), [run for _, run in hit]
        pauses = [
            s
            for run in hardening
            for kind, times in run["pauses_s"].items()
            if _is_of(kind, kinds)
            for s in times
        ]
        longest = f"{max(pauses):.1f}" if pauses else ""
        yield (
            f"| {words} | {count:,} | {_sum(struck, 'lost')} | {_sum(struck, 'duplicated')} | "
            f"{_persons(struck)} | {longest} |"
        )
    together = [s for run in hardening for s in run["pauses_s"].get(TOGETHER, ())]
    if together:
        lost, twice, persons = _sum(hardening, "lost"), _sum(hardening, "duplicated"), _persons(hardening)
        yield (
            f"| two to four of these at once | {len(together):,} | {lost} | {twice} | {persons} | "
            f"{max(together):.1f} |"
        )
    yield from _other_campaigns(found)


def _other_campaigns(found: Mapping[str, Any]) -> Iterator[str]:
    """Those with another oracle; their own tables are below. What an oracle does not ask is left empty."""
    if "simulation" in found:
        campaigns = found["simulation"]["campaigns"]
        faults = sum(sum(one["faults"].values()) for one in campaigns)
        failed = sum(len(one["failures"]) for one in campaigns)
        yield (
            f"| everything that can happen to the protocol, simulated | {faults:,} | {failed} | {failed} | "
            f"{failed} | |"
        )
    if "real" in found and "pace" in found:
        real = [found["real"], found["pace"]]
        killed = sum(sum(run["killed"].values()) for run in real)
        lost = _sum(real, "unaccounted") + _sum(real, "missing_in_audit")
        twice = sum(not run["steps_in_a_row"] for run in real)
        longest = max(
            max(map(max, real[0]["longest_pause_s"].values())), *real[1]["pauses_for_the_learner_s"]
        )
        words = "every kind of process of a run with a model killed"
        yield (
            f"| {words} | {killed} | {lost} | {twice} | {sum(not run['steps'] for run in real)} | "
            f"{longest:.1f} |"
        )
    if "weights" in found:
        kinds = ("stricken", "parted", "aborted")
        runs = [run for kind in kinds for run in found["weights"].get(kind, ())]
        count = sum(sum(run.get("injected", {}).values()) or run["failed_updates"] for run in runs)
        words = "a receiver killed or stopped in an update of weights, or cut off"
        yield f"| {words} | {count:,} | | | {_sum(runs, 'learner_errors')} | |"
    if "checkpoint" in found:
        kinds = found["checkpoint"]["found"].values()
        points, broken = sum(one["points"] for one in kinds), sum(len(one["violations"]) for one in kinds)
        yield (
            f"| a save cut short by a death or a power loss, at every point | {points:,} | {broken} | | "
            f"{broken} | |"
        )
    if "frames" in found:
        cases = (
            _sum(found["frames"]["structured"]["runs"], "cases")
            + found["frames"]["coverage_guided"]["executions"]
        )
        yield (
            f"| malformed frames to the decoder | {cases:,} | | | "
            f"{found['frames']['coverage_guided']['crashes']} | |"
        )


def _runs(part: Mapping[str, Any]) -> Sequence[Run]:
    volume: Mapping[str, Any] = part.get("volume", part)
    return list(volume.get("runs", ()))


def _sum(runs: Sequence[Run], key: str) -> int:
    return sum(run.get(key, 0) for run in runs)


def _persons(runs: Sequence[Run]) -> int:
    """Runs that did not come to their end by themselves, or broke a promise."""
    return sum(bool(run["wrong"]) for run in runs)
