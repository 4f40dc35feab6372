"""Every metric that the code names is explained in docs/metrics.md."""

import dataclasses
import re
from fnmatch import fnmatchcase

import torch

from asyncrl.algo.metrics import BANDS, TURNS, finish, group_metrics, merge, policy_metrics
from asyncrl.config.checkpoint_section import METRICS
from asyncrl.report.step_metrics import step_metrics, usage_metrics
from asyncrl.telemetry.alarms import ALARMS, PREFIX
from asyncrl.trainer.base import Usage
from tests.support.algo_cases import make_case, make_rewards
from tests.support.metric_guide import ELSEWHERE, GUIDE, ROOT, documented, first_column
from tests.support.steps import group, rollout, step

SOURCES = [
    "generator.py",
    "evaluation.py",
    "algo/metrics.py",
    "algo/preferences.py",
    "batch/objective.py",
    "batch/masks.py",
    "report/step_metrics.py",
    "launch/taking.py",
    "launch/saving.py",
]
INTERNAL = {
    "reward/square", "advantage/square", "<>/square", "<>/ratio_square", "<>/mean", "<>/std", "<>/ess", "<>/chi2_token",
    "weights/<>", "time/<>", "policy/<>", "weight/<>", "tokens/<>", "critic/<>", "critic/<>_<>", "groups/collapsed_<>",
    "memory/<>/rank<>", "staleness/<>", "staleness/<>/<>",
}  # fmt: skip
"""Sums that are finished before they are published, and families that are listed one by one."""


def named_in_code() -> set[str]:
    found = set()
    for source in SOURCES:
        path = ROOT / "asyncrl" / source
        for name in re.findall(r'"([a-z_{}]+(?:/[a-z0-9_@{}]+)+)"', path.read_text(encoding="utf-8")):
            found.add(re.sub(r"\{\w+\}", "<>", name))
    return found - INTERNAL


def test_every_metric_is_documented() -> None:
    names = named_in_code()
    assert len(names) > 30, "the search finds the names"
    assert names - documented() == set()


def test_every_published_number_of_the_mathematics_is_documented() -> None:
    case = make_case(1)
    turns_T = torch.zeros_like(case.logprobs_T)
    batch = dataclasses.replace(case.batch, reference_logprobs_T=case.logprobs_T, turn_part_T=turns_T)
    left_out_T = torch.zeros_like(case.entropy_T, dtype=torch.bool)
    parts = [
        policy_metrics(batch, case.logprobs_T, case.entropy_T, left_out_T=left_out_T, max_response_tokens=9)
    ]
    published = finish(merge([*parts, group_metrics(make_rewards(1))]))
    assert len(published) > 60
    assert set(published) - documented() - {"tokens", "sequences", "groups"} == set()


def test_every_published_number_of_a_step_is_documented() -> None:
    rejected = ((group([0.0, 0.0], [1, 2]), "zero_variance"),)
    base = step(rollout(a=1.0), rollout(a=0.0))
    published = step_metrics(
        dataclasses.replace(base, collected=dataclasses.replace(base.collected, rejected=rejected))
    )
    assert len(published) > 30
    generic = {
        re.sub(r"(rejected)_\w+", r"\1_<>", name.replace("reward/a/", "reward/<>/")) for name in published
    }
    generic = {re.sub(r"(staleness/in_\w+)/\d+", r"\1/<>", name) for name in generic}
    assert generic - documented() - {"groups"} == set()


def test_what_the_learners_gpus_did_is_documented() -> None:
    memory = {"allocated_bytes": 1, "reserved_bytes": 2, "planned_bytes": 3}
    published = usage_metrics(step(rollout(a=1.0)), [Usage(flops=1, peak_flops_per_s=1.0, memory=memory)])
    assert len(published) == 5 and {name.replace("rank0", "rank<>") for name in published} <= documented()


def test_every_alarm_is_documented_and_watches_a_documented_metric() -> None:
    assert {PREFIX + name for name in ALARMS} | {alarm.metric for alarm in ALARMS.values()} <= documented()


def test_the_names_that_a_config_may_give_are_those_documented() -> None:
    kinds = GUIDE.replace("### Memory", "## Memory").split("\n## ")
    names = {
        name
        for kind in kinds
        if not kind.startswith(("Generators", "Trackers"))
        for name in first_column(kind)
    }
    for holder, values in {"pair": ("mismatch", "policy", "drift"), "band": BANDS, "turn": TURNS}.items():
        names = {name.replace(f"<{holder}>", value) for name in names for value in values}
    found = {re.sub(r"<\w+>", "*", name) for name in names if "/" in name and not name.startswith("asyncrl_")}
    of_losses = {"clipped_low", "clipped_high", "dual_clipped", "left_out", "capped", "penalised"}
    # The first is of a stage, and the second is a case of the third.
    found -= {"eval/loss", "environment/chat/text", "eval/*/accuracy"} | {PREFIX + name for name in ALARMS}
    found = {name for name in found if not name.startswith("environment/")} | {"environment/*"}
    assert METRICS - {f"policy/{name}" for name in of_losses} == found


def test_the_table_of_other_names_speaks_of_documented_ones() -> None:
    names = {re.sub(r"<\w+>", "<>", name) for name in first_column(ELSEWHERE)}
    of_losses = {"policy/clipped_low", "policy/clipped_high", "policy/dual_clipped"}
    of_filters = {"groups/rejected_zero_variance", "groups/rejected_stale"}
    assert len(names) > 40 and names - documented() == of_losses | of_filters


def test_what_the_dashboard_shows_is_documented() -> None:
    shown = set()
    for source in ("dashboard.py", "live.py", "state.py", "advice.py"):
        text = (ROOT / "asyncrl" / "telemetry" / source).read_text(encoding="utf-8")
        shown |= set(
            re.findall(
                r"""["']((?:reward|eval|completions|policy|mismatch|staleness|time|perf|idle|weights)/\w+)["']""",
                text,
            )
        )
    assert len(shown) > 15 and shown - documented() == set()


def test_comments_of_the_configs_name_metrics_that_exist() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "configs").rglob("*.yaml"))
    named = re.findall(r"`([a-z]+/[\w/@]+)`", text)
    assert named and [name for name in named if not any(fnmatchcase(name, one) for one in METRICS)] == []
