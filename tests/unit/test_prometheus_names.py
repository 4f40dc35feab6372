"""Prometheus names follow from those of docs/metrics.md by one rule."""

import re
from pathlib import Path

import pytest

from asyncrl.telemetry.exporter import (
    GENERATOR_PREFIX,
    PREFIX,
    open_exporter,
    prometheus_name,
    status_families,
)
from asyncrl.telemetry.status import PLACES
from tests.support.metric_guide import BY_TIME, documented_units
from tests.support.task_config import config_of
from tests.support.telemetry_records import snapshot


def test_the_guide_is_read() -> None:
    names = dict(documented_units())
    assert (
        len(names) > 90
        and names["lag/stale"] == "share"
        and names["time/step"] == "s"
        and names["paused_s"] == "s"
    )


@pytest.mark.parametrize(
    ("name", "exported", "labels"),
    [
        ("time/step", "asyncrl_time_step", {}),
        ("eval/pass@8", "asyncrl_eval_pass_8", {}),
        ("staleness/in_queue", "asyncrl_staleness_in_queue", {}),
        ("staleness/in_queue/3", "asyncrl_staleness_in_queue_share", {"bin": "3"}),
        ("memory/allocated_bytes/rank12", "asyncrl_memory_allocated_bytes", {"rank": "12"}),
    ],
)
def test_a_name_keeps_its_words(name: str, exported: str, labels: dict[str, str]) -> None:
    assert prometheus_name(name) == (exported, labels)


def test_no_two_metrics_become_one() -> None:
    prefixes = {name: GENERATOR_PREFIX if name in BY_TIME else PREFIX for name, _ in documented_units()}
    exported = [prometheus_name(name, prefix)[0] for name, prefix in prefixes.items()]
    assert len(exported) == len(set(exported))
    assert all(re.fullmatch(r"asyncrl_[a-zA-Z0-9_]+", one) for one in exported)


def test_a_status_is_told_whole() -> None:
    families = {one.name: one for one in status_families(snapshot(), max_bytes=100.0)}
    places = {sample.labels["place"]: sample.value for sample in families["asyncrl_buffer_groups"].samples}
    assert places == {"leased": 1, "reissue": 2, "ready": 3, "taken": 0, "done": 4} and list(places) == list(
        PLACES
    )
    assert sum(places.values()) == families["asyncrl_buffer_issued_groups"].samples[0].value
    assert families["asyncrl_buffer_missing_groups"].samples[0].value == 0
    assert [(one.labels, one.value) for one in families["asyncrl_buffer_events"].samples] == [
        ({"event": "put"}, 3)
    ]
    assert [(one.labels, one.value) for one in families["asyncrl_member_version"].samples] == [
        ({"generator": "g0"}, 3)
    ]
    assert (
        families["asyncrl_members"].samples[0].value == 1
        and families["asyncrl_weights_died"].samples[0].value == 1.0
    )
    bare = {one.name for one in status_families(snapshot(audit=None, members=()), max_bytes=1.0)}
    assert "asyncrl_buffer_groups" not in bare and "asyncrl_members" in bare


@pytest.mark.parametrize("number", [0, 56135, 1_700_000_000])
def test_a_generator_of_any_number_is_served(tmp_path: Path, number: int) -> None:
    config = config_of(telemetry={"prometheus_port": 9401})
    exporter = open_exporter(config, f"g{number}", tmp_path / "target.json")
    assert exporter is not None and 0 < exporter.port <= 65535
    exporter.close()
