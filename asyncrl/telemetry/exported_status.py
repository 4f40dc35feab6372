"""The learner's status as families of Prometheus metrics: where every group is, who is there, how far the run is."""

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from asyncrl.buffer.base import Audit
from asyncrl.control.base import MemberStatus
from asyncrl.telemetry.exporter import gauge
from asyncrl.telemetry.prometheus_names import prometheus_name
from asyncrl.telemetry.status import StatusSnapshot

PLACES = ("leased", "reissue", "ready", "taken", "done")


def status_families(status: StatusSnapshot, *, max_bytes: float, probe_limit: float) -> list[Metric]:
    """Everything in `status`; and, to compare it with, the store's cap in bytes and the probe's limit in nats."""
    info = GaugeMetricFamily("asyncrl_run_info", "1, with the name and the state of the run", labels=["run", "state"])
    info.add_metric([status.run, status.state], 1.0)
    return [
        info,
        gauge("asyncrl_learner_step", "finished optimizer steps", status.step),
        gauge("asyncrl_learner_target_step", "learner.steps", status.total_steps),
        gauge("asyncrl_buffer_limit_bytes", "store.max_gib", max_bytes),
        gauge("asyncrl_weights_probe_limit_nats", "weights.probe_limit", probe_limit),
        *(_buffer(status.audit) if status.audit else ()),
        *_members(status.members),
        *_control(status.counters),
    ]


def _buffer(audit: Audit) -> Iterable[Metric]:
    groups = GaugeMetricFamily("asyncrl_buffer_groups", "issued ids by where they are", labels=["place"])
    for place in PLACES:
        groups.add_metric([place], getattr(audit, place))
    events = CounterMetricFamily("asyncrl_buffer_events", "what the store counted", labels=["event"])
    for event, count in sorted(audit.counters.items()):
        events.add_metric([event], count)
    yield groups
    yield events
    yield gauge("asyncrl_buffer_issued_groups", "ids issued so far", audit.issued)
    yield gauge("asyncrl_buffer_missing_groups", "issued ids that are nowhere or twice: always 0", audit.missing)
    yield gauge("asyncrl_buffer_payload_bytes", "stored groups", audit.payload_bytes)


def _members(members: Iterable[MemberStatus]) -> Iterable[Metric]:
    version = GaugeMetricFamily(
        "asyncrl_member_version", "policy version of a generator, -1: dirty weights", labels=["generator"]
    )
    silent = GaugeMetricFamily("asyncrl_member_silent_seconds", "since its last heartbeat", labels=["generator"])
    states = GaugeMetricFamily("asyncrl_member_state", "1, with what a generator is doing", labels=["generator", "state"])
    for member in members:
        version.add_metric([member.generator_id], member.version)
        silent.add_metric([member.generator_id], member.silent_s)
        states.add_metric([member.generator_id, member.state], 1.0)
    yield gauge("asyncrl_members", "generators that are there", len(version.samples))
    yield from (version, silent, states)


def _control(counters: Mapping[str, float]) -> Iterable[Metric]:
    for name, value in counters.items():
        exported, _ = prometheus_name(f"weights/{name}")
        yield gauge(exported, f"weights/{name}", value)
