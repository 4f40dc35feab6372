"""A real scrape of the exporter over HTTP, read by Prometheus's own parser."""

import json
import math
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from asyncrl.errors import RunError
from asyncrl.telemetry.exporter import Exporter
from tests.support.task_config import config_of
from tests.support.telemetry_records import snapshot

pytestmark = pytest.mark.integration


def exporter(
    tmp_path: Path, *, port: int = 0, stall_s: float = 60.0, process: str = "x", host: str = "127.0.0.1"
) -> Exporter:
    telemetry = {"prometheus_host": host, "prometheus_port": port}
    config = config_of(run={"name": "r"}, telemetry=telemetry, control={"stall_s": stall_s})
    return Exporter(config, port, process, tmp_path / "prometheus" / "x.json")


@pytest.fixture
def learner(tmp_path: Path) -> Iterator[Exporter]:
    with closing(exporter(tmp_path)) as one:
        yield one


def scrape(one: Exporter) -> dict[tuple[str, ...], float]:
    """(name, label values...) -> value."""
    answer = httpx.get(f"http://127.0.0.1:{one.port}/metrics", timeout=30)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    samples = [sample for family in text_string_to_metric_families(answer.text) for sample in family.samples]
    found = {(sample.name, *sample.labels.values()): sample.value for sample in samples}
    assert len(found) == len(samples), "no series twice"
    return found


def test_a_scrape_holds_the_last_step_and_the_status(learner: Exporter) -> None:
    learner.log(
        {"time/step": 2.0, "reward/mean": 0.5, "groups/rejected_stale": 3, "staleness/in_queue/2": 0.25},
        step=1,
    )
    learner.log({"eval/accuracy": 0.75}, step=1)
    learner.log({"checkpoint/failed": 2.0}, step=1)
    learner.log({"time/step": 3.0, "reward/mean": math.nan, "weights/died": 0.0}, step=2)
    learner.show_status(snapshot(), max_bytes=4096.0)
    found = scrape(learner)
    assert found[("asyncrl_time_step",)] == 3.0 and found[("asyncrl_eval_accuracy",)] == 0.75
    assert found[("asyncrl_checkpoint_failed",)] == 2.0, "it is logged only when a save fails"
    assert math.isnan(found[("asyncrl_reward_mean",)])
    assert ("asyncrl_groups_rejected_stale",) not in found, "of an earlier step"
    assert found[("asyncrl_weights_died",)] == 1.0, "the status is newer than the step"
    assert (
        found[("asyncrl_buffer_groups", "ready")] == 3 and found[("asyncrl_buffer_events_total", "put")] == 3
    )
    assert (
        found[("asyncrl_buffer_limit_bytes",)] == 4096.0
        and found[("asyncrl_run_info", "a", "training")] == 1.0
    )
    learner.log(
        {"time/step": 1.0, "staleness/in_queue/0": 0.5, "staleness/in_queue/1": 0.5, "a/b": 1.0, "a_b": 2.0},
        step=3,
    )
    found = scrape(learner)
    assert found[("asyncrl_staleness_in_queue_share", "1")] == 0.5 and ("asyncrl_a_b",) in found


def test_the_target_file_leads_to_the_process_and_goes_with_it(tmp_path: Path) -> None:
    one = exporter(tmp_path)
    (group,) = json.loads((tmp_path / "prometheus" / "x.json").read_text())
    assert group == {"targets": [f"127.0.0.1:{one.port}"], "labels": {"run": "r", "process": "x"}}
    one.close()
    assert list((tmp_path / "prometheus").iterdir()) == []
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{one.port}/metrics", timeout=30)


def test_the_target_of_an_ipv6_address_has_brackets(tmp_path: Path) -> None:
    with closing(exporter(tmp_path, host="::1")) as one:
        (group,) = json.loads((tmp_path / "prometheus" / "x.json").read_text())
        assert group["targets"] == [f"[::1]:{one.port}"]
        assert httpx.get(f"http://{group['targets'][0]}/metrics", timeout=30).status_code == 200


def test_progress_has_an_age_that_only_progress_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr("asyncrl.telemetry.exporter.time", SimpleNamespace(monotonic=lambda: now.s))
    with closing(exporter(tmp_path, stall_s=30.0, process="g0")) as one:
        metrics = {"sampled_tokens": 5.0, "version": 1.0, "groups": 1.0}

        def age_s(after_s: float, **changes: float) -> float:
            """Age after it has lived for `after_s` and told `changes`."""
            now.s += after_s
            one.log({**metrics, "alive_s": now.s, **changes})
            return scrape(one)[("asyncrl_progress_age_seconds",)]

        assert age_s(0.0) == 0 and age_s(30.0) == 30, "it lives, but it does nothing"
        assert scrape(one)[("asyncrl_stall_seconds",)] == 30.0
        assert [age_s(40.0, **{name: 9.0}) for name in ("version", "sampled_tokens", "groups")] == [0, 0, 0]
        assert scrape(one)[("asyncrl_generator_groups",)] == 9.0


def test_a_taken_port_is_left_to_its_owner_and_an_address_of_others_is_a_mistake(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with closing(exporter(tmp_path, port=port)) as one:
            assert one.port != port and f"port {port} of 127.0.0.1 for metrics is taken" in caplog.text
            scrape(one)
    with pytest.raises(RunError, match=r"telemetry\.prometheus_host is 192\.0\.2\.1"):
        exporter(tmp_path, host="192.0.2.1")
