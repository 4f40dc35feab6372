"""Prometheus names follow from docs/metrics.md by one rule, as do those that dashboards and alerts use."""

import re

import pytest

from asyncrl.telemetry.exporter import GENERATOR_PREFIX, PREFIX, prometheus_name, status_families
from asyncrl.telemetry.status import PLACES
from tests.support.metric_guide import BY_TIME, documented_units
from tests.support.telemetry_records import snapshot

UNITS = {
    "s": "seconds",
    "share": "share",
    "tokens": "tokens",
    "steps": "steps",
    "nats": "nats",
    "tokens/s": "tokens_per_second",
}


def test_the_guide_is_read() -> None:
    names = dict(documented_units())
    assert (
        len(names) > 90
        and names["lag/stale"] == "share"
        and names["time/step"] == "s"
        and names["paused_s"] == "s"
    )


@pytest.mark.parametrize(("name", "unit"), documented_units())
def test_a_name_says_the_unit_that_the_guide_says(name: str, unit: str) -> None:
    exported, labels = prometheus_name(name)
    assert re.fullmatch(r"asyncrl_[a-zA-Z0-9_]+", exported)
    told = {
        word
        for word in UNITS.values()
        if exported.endswith(f"_{word}") or (word == "share" and "_share_" in exported)
    }
    # Counts of them.
    told -= {word for word in ("steps", "tokens") if unit not in UNITS and name.endswith(f"_{word}")}
    assert told == ({UNITS[unit]} if unit in UNITS else set()), (
        f"{name} in {unit or 'no unit'} became {exported}"
    )
    assert labels == (
        {"bin": "3"} if name.endswith("/3") else {"rank": "0"} if name.endswith("/rank0") else {}
    )


def test_no_two_metrics_become_one() -> None:
    prefixes = {name: GENERATOR_PREFIX if name in BY_TIME else PREFIX for name, _ in documented_units()}
    exported = [prometheus_name(name, prefix)[0] for name, prefix in prefixes.items()]
    assert len(exported) == len(set(exported))


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
