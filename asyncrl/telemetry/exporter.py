"""Metrics of one process for Prometheus: `/metrics` has the newest values.

The address is written to a file in the format of Prometheus's file-based discovery, so that one scrape
configuration finds every process of every run, including processes that restart or join later.
`docs/metrics.md` has the rule that makes a Prometheus name from the name of a metric.
"""

import contextlib
import errno
import json
import logging
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from asyncrl.config.schema import Config
from asyncrl.errors import RunError
from asyncrl.files import replace_text
from asyncrl.hosting.route import address_towards
from asyncrl.telemetry.base import SampleRecord
from asyncrl.telemetry.history import LATER
from asyncrl.telemetry.status import PLACES, StatusSnapshot

log = logging.getLogger(__name__)

PREFIX = "asyncrl_"
GENERATOR_PREFIX = "asyncrl_generator_"
# Of one rank of the learner, or the share of a distribution at one value, as in `trackers.BIN`.
PART = re.compile(r"(?P<name>.+)/(rank(?P<rank>[0-9]+)|(?P<bin>[0-9]{1,2}))")
MOST_PORT = 65535
PROGRESS = ("version", "sampled_tokens", "groups")  # one of these changes when a generator makes progress


class Exporter(Collector):
    """A tracker that keeps the newest values and serves them over HTTP."""

    def __init__(self, config: Config, port: int, process: str, target: Path) -> None:
        """Listen at the config's host and, counted from it for generators, `port`.

        With 0, and with a message when the port is taken, any free one is used. The file `target` tells
        Prometheus where this `process` listens; `close` removes it. Raises RunError if the host is not ours.
        """
        index = re.search(r"\d+$", process)  # of generators on one machine: g0, g1, ...
        host, port = config.telemetry.prometheus_host, port and port + (1 + int(index[0]) if index else 0)
        port = port if port <= MOST_PORT else 0  # a host may give its generators any number
        self._prefix, self._target = GENERATOR_PREFIX if index else PREFIX, target
        self._stall_s = config.control.stall_s  # shown next to the seconds since the last progress
        self._values: Mapping[str, float] = {}
        self._status: Sequence[Metric] = ()
        self._marks: tuple[object, ...] = ()
        self._moved_at_s = time.monotonic()
        registry = CollectorRegistry()
        registry.register(self)
        try:
            # It is an address of the learner's host; a generator on another host has one on the route to it.
            host = address_towards(host) if index else host
            self._server, _ = start_http_server(port, host, registry)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise RunError(
                    f"telemetry.prometheus_host is {host}, port {port}: {error}; give an address of this "
                    "machine (127.0.0.1 for itself only) and a port above 1023"
                ) from error
            log.warning("port %d of %s for metrics is taken; any free port is used", port, host)
            self._server, _ = start_http_server(0, host, registry)
        labels = {"run": config.run.name, "process": process}
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            address = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
            replace_text(target, json.dumps([{"targets": [address], "labels": labels}]))
        except OSError as error:
            message = "%s cannot be written, so Prometheus will not find %s:%d: %s"
            log.warning(message, target, host, self.port, error)
        log.info("metrics are at port %d of %s, for Prometheus in %s", self.port, host, target)

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def log(self, metrics: Mapping[str, float], *, step: int | None = None) -> None:
        """Keep the newest values. A whole step replaces the one before; a record without a step is whole."""
        if step is None:
            self._moved(*(metrics.get(name) for name in PROGRESS))
        is_whole = step is None or "time/step" in metrics
        old = {name: value for name, value in self._values.items() if not is_whole or name.startswith(LATER)}
        self._values = old | dict(metrics)

    def samples(self, records: Sequence[SampleRecord]) -> None:
        """Do nothing: Prometheus keeps numbers only."""

    def show_status(self, status: StatusSnapshot, *, max_bytes: float) -> None:
        """Show every number of `status`, and the limit of the store's bytes."""
        self._moved(status.state, status.step, status.audit and status.audit.counters.get("put"))
        self._status = list(status_families(status, max_bytes=max_bytes))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._target.unlink()
        self._server.shutdown()
        self._server.server_close()

    def collect(self) -> Iterable[Metric]:
        """Return the families that `/metrics` serves."""
        found: dict[str, Metric] = {}
        for name, value in sorted(self._values.items()):
            exported, labels = prometheus_name(name, self._prefix)
            family = found.setdefault(exported, Metric(exported, name, "gauge"))
            if labels or not family.samples:  # of two metrics with one Prometheus name, the first
                family.add_sample(exported, labels, float(value))
        age_s = time.monotonic() - self._moved_at_s
        found |= {family.name: family for family in self._status}
        return (
            *found.values(),
            _gauge("progress_age_seconds", "since the last progress", age_s),
            _gauge("stall_seconds", "control.stall_s: an older progress is a stall", self._stall_s),
        )

    def _moved(self, *marks: object) -> None:
        """Receive values that change with progress: a difference from the last call counts as progress."""
        if marks != self._marks:
            self._marks, self._moved_at_s = marks, time.monotonic()


def open_exporter(config: Config, process: str, target: Path) -> Exporter | None:
    """Serve the metrics of the learner or generator named `process`; None unless the config asks for it."""
    port = config.telemetry.prometheus_port
    return None if port is None else Exporter(config, port, process, target)


def prometheus_name(name: str, prefix: str = PREFIX) -> tuple[str, dict[str, str]]:
    """Return (Prometheus name, labels) of a logged metric."""
    labels = {}
    if found := PART.fullmatch(name):
        labels = {label: index for label in ("rank", "bin") if (index := found[label])}
        # `staleness/in_queue` is a mean, and `staleness/in_queue/3` a share.
        name = found["name"] if found["rank"] else f"{found['name']}_share"
    return prefix + re.sub(r"[^a-zA-Z0-9_]+", "_", name), labels


def status_families(status: StatusSnapshot, *, max_bytes: float) -> Iterable[Metric]:
    """Yield the learner's status as metrics, with the limit of the store's bytes."""
    members = status.members
    info = [((status.run, status.state), 1.0)]
    yield _family("run_info", "1, with the name and the state of the run", info, "run", "state")
    yield _gauge("learner_step", "finished optimizer steps", status.step)
    yield _gauge("learner_target_step", "learner.steps", status.total_steps)
    yield _gauge("buffer_limit_bytes", "store.max_gib", max_bytes)
    if audit := status.audit:
        places = [((place,), getattr(audit, place)) for place in PLACES]
        yield _family("buffer_groups", "issued ids by where they are", places, "place")
        events = CounterMetricFamily(f"{PREFIX}buffer_events", "what the store counted", labels=["event"])
        for event, count in sorted(audit.counters.items()):
            events.add_metric([event], count)
        yield events
        yield _gauge("buffer_issued_groups", "ids issued so far", audit.issued)
        yield _gauge("buffer_missing_groups", "issued ids that are nowhere or twice: 0", audit.missing)
        yield _gauge("buffer_payload_bytes", "stored groups", audit.payload_bytes)
    yield _gauge("members", "generators that have joined", len(members))
    versions = [((member.generator_id,), float(member.version)) for member in members]
    yield _family("member_version", "policy version, -1: dirty weights", versions, "generator")
    silent = [((member.generator_id,), member.silent_s) for member in members]
    yield _family("member_silent_seconds", "since the last heartbeat", silent, "generator")
    states = [((member.generator_id, member.state), 1.0) for member in members]
    yield _family("member_state", "1, with what a generator is doing", states, "generator", "state")
    for name, value in status.counters.items():
        yield _gauge(f"weights_{name}", f"weights/{name}", value)


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, meaning, value=value)


def _family(name: str, meaning: str, values: Iterable[tuple[Sequence[str], float]], *labels: str) -> Metric:
    """Return a gauge with a value for each combination of labels."""
    family = GaugeMetricFamily(PREFIX + name, meaning, labels=labels)
    for given, value in values:
        family.add_metric(given, value)
    return family
