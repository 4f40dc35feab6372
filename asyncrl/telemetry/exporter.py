"""Metrics of one process for Prometheus: `/metrics` has the newest values, `/health` answers 503 in a stall.

The address is written to a file in the format of Prometheus's file-based discovery, so that one scrape
configuration finds every process of every run, including processes that restart or join later.
`docs/metrics.md` has the rule that makes a Prometheus name from the name of a metric.
"""

import contextlib
import errno
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from http.server import ThreadingHTTPServer
from pathlib import Path

from prometheus_client import CollectorRegistry, MetricsHandler
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from asyncrl.buffer.base import Audit
from asyncrl.config.schema import Config
from asyncrl.control.base import MemberStatus
from asyncrl.errors import RunError
from asyncrl.files import replace_text
from asyncrl.telemetry.base import BIN, SampleRecord
from asyncrl.telemetry.status import PLACES, StatusSnapshot

log = logging.getLogger(__name__)

PREFIX = "asyncrl_"
GENERATOR_PREFIX = "asyncrl_generator_"
RANK = re.compile(r"(?P<name>.+)/rank(?P<rank>\d+)")  # of one rank of the learner
KEPT = ("eval/", "time/checkpoint")  # not measured in every step: the last value stays
PROGRESS = ("version", "sampled_tokens", "groups")  # one of these changes when a generator makes progress
# (unit, names that have it). The first match counts; a name without a match has no unit that is one word.
UNITS = (
    ("", r"(reward|hook|alarm|environment)/.*|.*(flops|gb)_per_s"),
    ("tokens_per_second", r".*tokens_per_s"),
    ("seconds", r"time/.*|.*_s"),
    ("share", r"idle/.*|perf/mfu|lag/stale|advantage/positive|group/(zero_variance|singleton|majority)"),
    (
        "share",
        r"eval/(se/)?(accuracy|pass@.*|maj@.*)|preference/accuracy|critic/(explained_variance|value_clipped)",
    ),
    ("share", r"weight/(zero|truncated|rejected)(/.*)?|engine/occupancy|episodes/duty"),
    ("share", r"policy/(left_out|clipped_\w+|dual_clipped)(/.*)?|.*/(ess|tail_high|tail_low)|.*_share(/.*)?"),
    ("nats", r"mismatch/turn/.*|preference/(margin|chosen_logprob|rejected_logprob)"),
    (
        "nats",
        r".*/(entropy|logprob|kl_reference|nll|k1|k3|moved|probe_max|probe_mean|probe_limit|floor_max|floor_mean|abs_log_ratio/max)",
    ),
    ("steps", r"(staleness|lag)/.*"),
    ("tokens", r"(completions|eval|groups)/length_.*"),
)


class Exporter(Collector):
    """A tracker that keeps the newest values and serves them over HTTP."""

    def __init__(
        self, *, host: str, port: int, target: Path, run: str, process: str, prefix: str, stall_s: float
    ) -> None:
        """Listen on `host`. Raises RunError if that is not an address of this machine.

        Args:
            port: port to bind. With 0, and with a message when the port is taken, any free port is used.
            target: file that tells Prometheus where this process listens; `close` removes it.
            run, process: labels of the target.
            prefix: prefix of the names of all logged metrics.
            stall_s: after this long without progress `/health` answers 503.
        """
        self._prefix = prefix
        self._stall_s = stall_s
        self._values: Mapping[str, float] = {}
        self._families: Sequence[Metric] = ()
        self._marks: tuple[object, ...] = ()
        self._moved_at_s = time.monotonic()
        registry = CollectorRegistry()
        registry.register(self)
        self._server = _listen(host, port, _handler(registry, self._health))
        self._target = target
        labels = {"run": run, "process": process}
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            replace_text(target, json.dumps([{"targets": [f"{host}:{self.port}"], "labels": labels}]))
        except OSError as error:
            message = "%s cannot be written, so Prometheus will not find %s:%d: %s"
            log.warning(message, target, host, self.port, error)
        threading.Thread(target=self._server.serve_forever, name="asyncrl-metrics", daemon=True).start()
        where = host or "all interfaces"
        log.info("metrics are at port %d of %s, for Prometheus in %s", self.port, where, target)

    @property
    def port(self) -> int:
        """The port in use."""
        return int(self._server.server_address[1])

    def log(self, metrics: Mapping[str, float], *, step: int | None = None) -> None:
        """Keep the newest values. A whole step replaces the one before; a record without a step is whole."""
        if step is None:
            self.moved(*(metrics.get(name) for name in PROGRESS))
        is_whole = step is None or "time/step" in metrics
        old = {name: value for name, value in self._values.items() if not is_whole or name.startswith(KEPT)}
        self._values = old | dict(metrics)

    def samples(self, records: Sequence[SampleRecord]) -> None:
        """Do nothing: Prometheus keeps numbers only."""

    def show(self, families: Sequence[Metric]) -> None:
        """Replace the families that are served in addition to the logged metrics."""
        self._families = families

    def show_status(self, status: StatusSnapshot, *, max_bytes: float) -> None:
        """Show every number of `status`, and the limit of the store's bytes."""
        self.moved(status.state, status.step, status.audit and status.audit.counters.get("put"))
        self.show(status_families(status, max_bytes=max_bytes))

    def moved(self, *marks: object) -> None:
        """Receive values that change with progress: a difference from the last call counts as progress."""
        if marks != self._marks:
            self._marks, self._moved_at_s = marks, time.monotonic()

    def close(self) -> None:
        """Stop listening."""
        with contextlib.suppress(OSError):
            self._target.unlink()
        self._server.shutdown()
        self._server.server_close()

    def collect(self) -> Iterable[Metric]:
        """Return the families that `/metrics` serves."""
        logged: dict[str, GaugeMetricFamily] = {}
        for name, value in sorted(self._values.items()):
            exported, labels = prometheus_name(name, self._prefix)
            family = logged.setdefault(exported, GaugeMetricFamily(exported, name, labels=list(labels)))
            if labels or not family.samples:  # of two metrics with one Prometheus name, the first
                family.add_metric(list(labels.values()), float(value))
        age_s = time.monotonic() - self._moved_at_s
        own = (
            *self._families,
            gauge("asyncrl_progress_age_seconds", "since the last progress", age_s),
            gauge("asyncrl_stall_seconds", "control.stall_s: an older progress is a stall", self._stall_s),
        )
        return {family.name: family for family in (*logged.values(), *own)}.values()

    def _health(self) -> tuple[int, dict[str, float]]:
        age_s = time.monotonic() - self._moved_at_s
        answer = {"progress_age_s": round(age_s, 3), "stall_s": self._stall_s}
        return (200 if age_s < self._stall_s else 503), answer


def open_exporter(config: Config, process: str, target: Path) -> Exporter | None:
    """Serve `/metrics` and `/health` of the learner or generator named `process`; None unless asked for."""
    telemetry = config.telemetry
    if telemetry.prometheus_port is None:
        return None
    index = re.search(r"\d+$", process)  # of generators on one machine: g0, g1, ...
    offset = 1 + int(index[0]) if index else 0
    return Exporter(
        host=telemetry.prometheus_host,
        port=telemetry.prometheus_port and telemetry.prometheus_port + offset,
        target=target,
        run=config.run.name,
        process=process,
        prefix=GENERATOR_PREFIX if index else PREFIX,
        stall_s=config.control.stall_s,
    )


def _handler(
    registry: CollectorRegistry, health: Callable[[], tuple[int, dict[str, float]]]
) -> type[MetricsHandler]:
    class Handler(MetricsHandler):
        def do_GET(self) -> None:
            match self.path.partition("?")[0]:
                case "/metrics":
                    super().do_GET()
                case "/health":
                    status, answer = health()
                    body = json.dumps(answer).encode()
                    self.send_response(status)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)
                case _:
                    self.send_error(404, explain="there are /metrics and /health")

    Handler.registry = registry
    return Handler


def _listen(host: str, port: int, handler: type[MetricsHandler]) -> ThreadingHTTPServer:
    try:
        return ThreadingHTTPServer((host, port), handler)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise RunError(
                f"telemetry.prometheus_host is {host}, port {port}: {error}; give an address of this "
                "machine (127.0.0.1 for itself only) and a port above 1023"
            ) from error
        log.warning("port %d of %s for metrics is taken; any free port is used", port, host)
        return ThreadingHTTPServer((host, 0), handler)


def prometheus_name(name: str, prefix: str = PREFIX) -> tuple[str, dict[str, str]]:
    """Return (Prometheus name, labels) of a logged metric."""
    found = BIN.fullmatch(name)
    plain = prefix + re.sub(r"[^a-zA-Z0-9_]+", "_", found["name"] if found else name)
    if found:
        return f"{plain}_share", {"bin": found["at"]}
    if found := RANK.fullmatch(name):
        return prometheus_name(found["name"], prefix)[0], {"rank": found["rank"]}
    unit = next((unit for unit, names in UNITS if re.fullmatch(names, name)), "")
    plain = re.sub(r"_s$", "_seconds", re.sub(r"_per_s$", "_per_second", plain))
    return (plain if not unit or f"_{unit}" in plain else f"{plain}_{unit}"), {}


def gauge(name: str, meaning: str, value: float) -> GaugeMetricFamily:
    """Return a family with one value."""
    return GaugeMetricFamily(name, meaning, value=value)


def status_families(status: StatusSnapshot, *, max_bytes: float) -> list[Metric]:
    """Return the learner's status as metrics, with the limit of the store's bytes."""
    info = _family("run_info", "1, with the name and the state of the run", "run", "state")
    info.add_metric([status.run, status.state], 1.0)
    return [
        info,
        gauge("asyncrl_learner_step", "finished optimizer steps", status.step),
        gauge("asyncrl_learner_target_step", "learner.steps", status.total_steps),
        gauge("asyncrl_buffer_limit_bytes", "store.max_gib", max_bytes),
        *(_buffer(status.audit) if status.audit else ()),
        *_members(status.members),
        *(
            gauge(prometheus_name(f"weights/{name}")[0], f"weights/{name}", value)
            for name, value in status.counters.items()
        ),
    ]


def _buffer(audit: Audit) -> Iterable[Metric]:
    groups = _family("buffer_groups", "issued ids by where they are", "place")
    for place in PLACES:
        groups.add_metric([place], getattr(audit, place))
    events = CounterMetricFamily("asyncrl_buffer_events", "what the store counted", labels=["event"])
    for event, count in sorted(audit.counters.items()):
        events.add_metric([event], count)
    yield groups
    yield events
    yield gauge("asyncrl_buffer_issued_groups", "ids issued so far", audit.issued)
    yield gauge("asyncrl_buffer_missing_groups", "issued ids that are nowhere or twice: 0", audit.missing)
    yield gauge("asyncrl_buffer_payload_bytes", "stored groups", audit.payload_bytes)


def _members(members: Iterable[MemberStatus]) -> Iterable[Metric]:
    version = _family("member_version", "policy version of a generator, -1: dirty weights", "generator")
    silent = _family("member_silent_seconds", "since its last heartbeat", "generator")
    states = _family("member_state", "1, with what a generator is doing", "generator", "state")
    for member in members:
        version.add_metric([member.generator_id], member.version)
        silent.add_metric([member.generator_id], member.silent_s)
        states.add_metric([member.generator_id, member.state], 1.0)
    yield gauge("asyncrl_members", "generators that have joined", len(version.samples))
    yield from (version, silent, states)


def _family(name: str, meaning: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, meaning, labels=labels)
