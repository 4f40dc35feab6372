"""Dashboard and alert rules ask only for what the exporter has, in expressions Prometheus understands."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.core import CounterMetricFamily

from asyncrl.telemetry.alarms import ALARMS
from asyncrl.telemetry.exporter import GENERATOR_PREFIX, PREFIX, prometheus_name, status_families
from tests.support.metric_guide import BY_TIME, GUIDE, documented_units
from tests.support.telemetry_records import snapshot

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "asyncrl.json").read_text())
RULES = [
    rule
    for group in yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
OF_SETS = {
    f"asyncrl_eval_{of_set}{error}{name}"
    for of_set in ("", "math_", "base_")
    for error in ("", "se_")
    for name in ("accuracy", "reward_mean")
}
"""Names of one unnamed and two named sets of `data.eval`."""
CHOSEN = {
    "panel Alarms": {f"asyncrl_alarm_{name}" for name in ALARMS},
    "panel Reward": {name for name in OF_SETS if name.endswith("accuracy") and "_se_" not in name},
}
"""What is meant where a pattern chooses among names."""
OF_EACH_PROCESS = {"asyncrl_progress_age_seconds", "asyncrl_stall_seconds"}
LABELS = {"run", "process", "job", "place", "event", "generator", "state", "bin"}


def panels() -> Iterator[dict[str, Any]]:
    for panel in DASHBOARD["panels"]:
        yield panel
        yield from panel.get("panels", [])


def expressions() -> list[tuple[str, str]]:
    """(where it stands, PromQL) of everything that is asked."""
    asked = [
        (f"panel {panel['title']}", target["expr"])
        for panel in panels()
        for target in panel.get("targets", [])
    ]
    asked += [
        ("variable run", variable["definition"])
        for variable in DASHBOARD["templating"]["list"]
        if "definition" in variable
    ]
    return asked + [(f"alert {rule['alert']}", rule["expr"]) for rule in RULES]


def exported() -> set[str]:
    """Every name that a learner or a generator can tell."""
    names = {
        prometheus_name(name, GENERATOR_PREFIX if name in BY_TIME else PREFIX)[0]
        for name, _ in documented_units()
    }
    names |= {
        prometheus_name(f"groups/rejected_{reason}")[0] for reason in ("dead", "stale", "zero_variance")
    }
    names |= {prometheus_name(f"staleness/masked_share/{band}")[0] for band in ("short", "medium", "long")}
    names |= {prometheus_name(f"{pair}/ess")[0] for pair in ("mismatch", "policy", "drift")}
    for family in status_families(snapshot(), max_bytes=1.0):
        names.add(f"{family.name}_total" if isinstance(family, CounterMetricFamily) else family.name)
    return names | OF_EACH_PROCESS | OF_SETS


@pytest.mark.parametrize(("where", "expression"), expressions())
def test_everything_that_is_asked_can_be_told(where: str, expression: str) -> None:
    known = exported()
    asked = set(re.findall(r"\basyncrl_\w+(?![\w.])", re.sub(r'"[^"]*"', '""', expression)))
    patterns = re.findall(r'__name__(=~|!~)"([^"]+)"', expression)
    assert asked <= known, where
    assert asked or patterns or "up{" in expression, where
    if patterns:
        wanted = [(operator == "=~", pattern) for operator, pattern in patterns]
        chosen = {
            name for name in known if all(bool(re.fullmatch(one, name)) == is_so for is_so, one in wanted)
        }
        assert chosen == CHOSEN[where]
    assert set(re.findall(r'(\w+)(?:=~|!~|!=|=)"', expression)) - {"__name__"} <= LABELS, where


def test_names_that_only_a_run_knows_are_asked_by_a_pattern() -> None:
    assert {where for where, expression in expressions() if "__name__" in expression} == set(CHOSEN)


def test_only_what_never_falls_is_asked_for_its_rate() -> None:
    """Prometheus takes a fall for a restart from 0. `idle_s` falls by rounding: its growth is a `delta`."""
    rated = {name for _, one in expressions() for name in re.findall(r"(?:rate|increase)\((\w+)", one)}
    counts = {
        name for name in rated if name.startswith("asyncrl_weights_") or name.endswith(("_total", "_failed"))
    }
    assert rated == counts and len(rated) > 4


def test_what_can_be_told_is_not_everything() -> None:
    assert "asyncrl_reward_mean" in exported() and "asyncrl_reward_mean_tokens" not in exported()


def test_a_panel_shows_one_run_stands_alone_and_says_what_it_means() -> None:
    places: set[tuple[int, int]] = set()
    for panel in panels():
        box = panel["gridPos"]
        cells = {(box["x"] + x, box["y"] + y) for x in range(box["w"]) for y in range(box["h"])}
        assert not cells & places and box["x"] + box["w"] <= 24, panel["title"]
        places |= cells
        if panel["type"] != "row":
            assert panel["description"] and all(
                'run="$run"' in target["expr"] for target in panel["targets"]
            ), panel["title"]
    identities = [panel["id"] for panel in panels()]
    assert len(set(identities)) == len(identities)
    rows = [panel["title"] for panel in panels() if panel["type"] == "row"]
    last = ["Buffer", "Generators", "Weights"]
    assert rows == ["Learning", "Mismatch and staleness", "Who waits", "Hardware", *last]
    asked = " ".join(expression for _, expression in expressions())
    for name in ("perf_mfu", "memory_allocated_bytes", "generator_stalled_s", "gb_per_s"):
        assert name in asked, "what a run on GPUs is judged by"


def test_an_alert_says_what_is_wrong_and_what_to_do() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES) > 10
    for rule in RULES:
        assert set(rule["annotations"]) == {"summary", "action"} and rule["labels"]["severity"] in (
            "warning",
            "critical",
        )
        assert rule["annotations"]["summary"].startswith("{{ $labels.run }}: "), rule["alert"]


def test_grafana_finds_what_is_mounted() -> None:
    provider = yaml.safe_load(
        (DEPLOY / "grafana" / "provisioning" / "dashboards" / "asyncrl.yml").read_text()
    )["providers"][0]
    source = yaml.safe_load(
        (DEPLOY / "grafana" / "provisioning" / "datasources" / "prometheus.yml").read_text()
    )["datasources"][0]
    assert provider["options"]["path"] == "/var/lib/grafana/dashboards" and source["type"] == "prometheus"


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool (Debian: apt-get install prometheus)"
)
def test_prometheus_understands_rules_config_and_every_expression(tmp_path: Path) -> None:
    asked = [
        expression.replace("$run", "x") for where, expression in expressions() if where.startswith("panel")
    ]
    recorded = [{"record": f"panel_{index}", "expr": expression} for index, expression in enumerate(asked)]
    (tmp_path / "panels.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": recorded}]}))
    config = DEPLOY / "prometheus"
    for check in (
        ["rules", tmp_path / "panels.yml"],
        ["rules", config / "alerts.yml"],
        ["config", config / "prometheus.yml"],
    ):
        done = subprocess.run(
            ["promtool", "check", *map(str, check)], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_what_stands_beside_the_metrics_is_documented() -> None:
    own = {family.name for family in status_families(snapshot(), max_bytes=1.0)} | OF_EACH_PROCESS
    own -= {prometheus_name(name)[0] for name, _ in documented_units()}
    rows = GUIDE.split("## Prometheus and Grafana")[1].splitlines()
    documented = {name for row in rows for name in re.findall(r"`(asyncrl_\w+)[`{]", row)}
    assert {name.removesuffix("_total") for name in documented} >= own


HEALTHY = {
    "up{job='asyncrl'}": "1x40",
    "asyncrl_mismatch_k3": "0.001x40",
    "asyncrl_mismatch_ess": "0.98x40",
    "asyncrl_weights_probe_max": "0.001x40",
    "asyncrl_weights_probe_limit": "0.05x40",
    "asyncrl_alarm_entropy": "0x40",
    "asyncrl_alarm_skipped": "0x40",
    "asyncrl_completions_truncated_share": "0.1x40",
    "asyncrl_group_zero_variance": "0.3x40",
    "asyncrl_progress_age_seconds": "20x40",
    "asyncrl_stall_seconds": "1800x40",
    "asyncrl_weights_died": "0x40",
    "asyncrl_weights_updates_failed": "1x40",
    "asyncrl_member_silent_seconds{generator='g0'}": "1x40",
    "asyncrl_member_version{generator='g0'}": "0+1x40",
    "asyncrl_members": "2x40",
    "asyncrl_buffer_payload_bytes": "50x40",
    "asyncrl_buffer_limit_bytes": "100x40",
    "asyncrl_buffer_missing_groups": "0x40",
    "asyncrl_generator_rewards_failed": "3x40",
}
"""Series of forty minutes, one value a minute."""
ILL = {
    "Mismatch": {"asyncrl_mismatch_k3": "0.02x40"},
    "ProbeNearLimit": {"asyncrl_weights_probe_max": "0.03x40"},
    "EntropyCollapse": {"asyncrl_alarm_entropy": "0x30 1x9"},
    "SkippedSteps": {"asyncrl_alarm_skipped": "1x40"},
    "ResponsesTruncated": {"asyncrl_completions_truncated_share": "0.6x40"},
    "NoSignal": {"asyncrl_group_zero_variance": "0.95x40"},
    "ProcessDown": {"up{job='asyncrl'}": "1x30 0x9"},
    "NoProgress": {"asyncrl_progress_age_seconds": "0+60x40"},
    "GeneratorLost": {"asyncrl_weights_died": "0x35 1x4"},
    "NoGenerator": {"asyncrl_members": "2x20 0x19"},
    "DirtyWeights": {"asyncrl_member_version{generator='g0'}": "5x20 -1x19"},
    "WeightsNotArriving": {"asyncrl_weights_updates_failed": "0+1x40"},
    "StoreNearlyFull": {"asyncrl_buffer_payload_bytes": "95x40"},
    "AuditMismatch": {"asyncrl_buffer_missing_groups": "0x30 2x9"},
    "RewardsFail": {"asyncrl_generator_rewards_failed": "0+2x40"},
}


def test_every_alert_has_a_case() -> None:
    assert set(ILL) == {rule["alert"] for rule in RULES}


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool (Debian: apt-get install prometheus)"
)
def test_an_alert_rings_for_its_failure_alone_and_none_for_a_healthy_run(tmp_path: Path) -> None:
    cases = {"healthy": {}, **ILL}
    tests = [
        {
            "interval": "1m",
            "input_series": [
                {
                    "series": name.replace("}", ",run='r'}") if "{" in name else f"{name}{{run='r'}}",
                    "values": values,
                }
                for name, values in (HEALTHY | changes).items()
            ],
            "promql_expr_test": [
                {
                    "expr": "count by (alertname) (ALERTS{alertstate='firing'})",
                    "eval_time": "38m",
                    "exp_samples": [{"labels": f"{{alertname='{name}'}}", "value": 1}] if changes else [],
                }
            ],
        }
        for name, changes in cases.items()
    ]
    path = tmp_path / "cases.yml"
    rules = str(DEPLOY / "prometheus" / "alerts.yml")
    path.write_text(yaml.safe_dump({"rule_files": [rules], "evaluation_interval": "1m", "tests": tests}))
    done = subprocess.run(
        ["promtool", "test", "rules", str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
