"""The tables of docs/reliability.md that are not of scenarios: bounds, and a run with a model.

Runs of several seeds are summed; what cannot be summed is the worst of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Run = Mapping[str, Any]


def bounds(found: Mapping[str, Run]) -> Iterator[str]:
    """Return the table of what stays within bounds."""
    memory, age, leak, soak = found["memory"], found["age"], found["leak"], found["soak"]
    yield "| what | found | bound | lost | duplicated |"
    yield "|---|---|---|---|---|"
    yield (
        f"| highest memory of the store, {memory['samples'] / 600:.0f} minutes of a stopped, then a "
        f"slow learner | {_mib(memory['highest_used_bytes'])} | {_mib(memory['allowed_bytes'])} | "
        f"{memory['lost']} | {memory['twice']} |"
    )
    for kind, what in (
        ("steady", "a steady clock"),
        ("jumping", f"{age['jumping_jumps']} jumps of the store's clock by an hour"),
    ):
        yield (
            f"| oldest of {age[f'{kind}_tokens']} trained tokens, {what} | {age[f'{kind}_oldest']} "
            f"steps | {age[f'{kind}_bound']} | {age[f'{kind}_lost']} | {age[f'{kind}_twice']} |"
        )
    yield (
        f"| growth of the learner's memory per group, over {leak['groups_measured']} groups | "
        f"{leak['rss_growth_bytes_per_group']:.1f} bytes | about 1 byte | {leak['lost']} | {leak['twice']} |"
    )
    yield f"| open files of the learner | {' or '.join(map(str, leak['files']))} | constant | | |"
    under = f"{sum(soak['struck'].values())} faults in {soak['seconds'] / 60:.0f} minutes"
    for name, account in (("learner", f" {soak['lost']} | {soak['twice']} "), ("g0", " | ")):
        one, who = soak[name], "learner" if name == "learner" else "generator"
        yield (
            f"| growth of the {who}'s memory per group under {under}, over {one['groups_measured']} "
            f"groups | {one['rss_growth_bytes_per_group']:.1f} bytes | about 1 byte |{account}|"
        )
        low, high = one["files"]
        yield f"| its open files, at the end {one['files_at_end']} | {low} to {high} | constant | | |"


def real(run: Run) -> Iterator[str]:
    """Of a run with a model: what recovers, and what ends."""
    yield "| process killed | times | longest pause without a step, s | until everybody is there again, s |"
    yield "|---|---|---|---|"
    for kind, times in sorted(run["longest_pause_s"].items()):
        yield f"| {kind} | {len(times)} | {_seconds(times)} | {_seconds(run['to_whole_s'][kind])} |"
    yield ""
    yield (
        f"The supervisor was killed, and {run['nothing_left_after_supervisor_s']} s later no process was "
        f"left. {_account(run)} A crash loop ends the run with its last words: "
        f"{_yes(run['crash_loop_ends_the_run'])}."
    )


def pace(run: Run) -> Iterator[str]:
    """Return the account of kills at a steady pace."""
    killed = ", ".join(f"{count} of a {kind}" for kind, count in run["killed"].items())
    yield (
        f"Kills: {killed}, in {run['seconds'] / 60:.0f} minutes. Steps that lasted took "
        f"{100 * run['share_of_lasting_steps']:.1f} % of that time (aim: at least 90 %; steps took "
        f"{100 * run['share_of_steps_calm']:.1f} % of the minute before, without faults), "
        f"{run['steps_per_minute']:.0f} of them a minute, and {run['steps_per_minute_calm']:.0f} in the "
        f"minute before; {100 * run['share_of_waiting']:.1f} % of the time they waited for groups, as when "
        "both generators were down. Longest pause without a step after the learner's death: "
        f"{_seconds(run['pauses_for_the_learner_s'])} s (aim: at most 6 s). {_account(run)}"
    )


def _account(run: Run) -> str:
    return (
        f"{run['steps']} steps, {run['groups']} groups, {run['unaccounted']} not accounted for, "
        f"{run['missing_in_audit']} missing in the audit; steps in a row: {_yes(run['steps_in_a_row'])}; "
        f"`asyncrl down` leaves nothing: {_yes(run['down_leaves_nothing'])}."
    )


def _seconds(times: Sequence[float]) -> str:
    return ", ".join(f"{s:.1f}" for s in times)


def _mib(count_bytes: int) -> str:
    return f"{count_bytes / 2**20:.1f} MiB"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
