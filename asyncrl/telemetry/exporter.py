"""One process for Prometheus: `/metrics` with its newest numbers, `/health` with 503 while nothing moves.

Where it listens is in a file beside the run, in the form of Prometheus's file-based discovery, so that one scrape
configuration finds every process of every run, restarted and joined ones too.
"""

import contextlib
import errno
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from http.server import ThreadingHTTPServer
from pathlib import Path

from prometheus_client import CollectorRegistry, MetricsHandler
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from asyncrl.errors import RunError
from asyncrl.files import replace_text
from asyncrl.telemetry.base import SampleRecord
from asyncrl.telemetry.prometheus_names import prometheus_name

log = logging.getLogger(__name__)

KEPT = ("eval/", "time/checkpoint")
"""What is not measured in every step: its last value stays."""
PROGRESS = ("version", "sampled_tokens", "groups")
"""Of a generator: one of them changes while it does anything."""


class Exporter(Collector):
    """A tracker that keeps the newest values and hands them to whoever asks over HTTP."""

    def __init__(self, *, host: str, port: int, target: Path, run: str, process: str, prefix: str, stall_s: float) -> None:
        """Listen on `host`.

        Args:
            host: address to bind.
            port: 0 is any free one; so is a port that is taken, with a message.
            target: file that says where this process listens; removed by `close`.
            run: label of the target.
            process: label of the target.
            prefix: of the names of everything that is logged.
            stall_s: without progress for this long, `/health` says 503.

        Raises:
            RunError: `host` is no address of this machine.
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
        _announce(target, host, self.port, {"run": run, "process": process})
        threading.Thread(target=self._server.serve_forever, name="asyncrl-metrics", daemon=True).start()
        log.info("metrics are at port %d of %s, for Prometheus in %s", self.port, host or "all interfaces", target)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_address[1])

    def log(self, metrics: Mapping[str, float], *, step: int | None = None) -> None:
        """Keep the newest values; those of a whole step replace the last step's. By time, `PROGRESS` tells of progress."""
        if step is None:
            self.moved(*(metrics.get(name) for name in PROGRESS))
        is_whole = step is None or "time/step" in metrics
        old = {name: value for name, value in self._values.items() if not is_whole or name.startswith(KEPT)}
        self._values = old | dict(metrics)

    def samples(self, records: Sequence[SampleRecord]) -> None:
        """Nothing: Prometheus keeps numbers."""

    def show(self, families: Sequence[Metric]) -> None:
        """Replace the families that stand beside what is logged."""
        self._families = families

    def moved(self, *marks: object) -> None:
        """Tell what grows with progress: whenever it differs from the last call, there was some."""
        if marks != self._marks:
            self._marks, self._moved_at_s = marks, time.monotonic()

    def close(self) -> None:
        """Stop listening."""
        with contextlib.suppress(OSError):
            self._target.unlink()
        self._server.shutdown()
        self._server.server_close()

    def collect(self) -> Iterable[Metric]:
        """What `/metrics` shows."""
        own = (
            *self._families,
            gauge("asyncrl_progress_age_seconds", "since something was sampled, arrived or was trained", self._age_s),
            gauge("asyncrl_stall_seconds", "control.stall_s: an older progress is a stall", self._stall_s),
        )
        families = {family.name: family for family in self._logged()}
        return (families | {family.name: family for family in own}).values()

    def _logged(self) -> Iterable[Metric]:
        families: dict[str, GaugeMetricFamily] = {}
        for name, value in sorted(self._values.items()):
            exported, labels = prometheus_name(name, self._prefix)
            family = families.setdefault(exported, GaugeMetricFamily(exported, name, labels=list(labels)))
            if labels or not family.samples:  # two names that become one are told apart in the files only
                family.add_metric(list(labels.values()), float(value))
        return families.values()

    @property
    def _age_s(self) -> float:
        return time.monotonic() - self._moved_at_s

    def _health(self) -> tuple[int, dict[str, float]]:
        age_s = self._age_s
        return (200 if age_s < self._stall_s else 503), {"progress_age_s": round(age_s, 3), "stall_s": self._stall_s}


def gauge(name: str, meaning: str, value: float) -> GaugeMetricFamily:
    """A family of one number."""
    return GaugeMetricFamily(name, meaning, value=value)


def _handler(registry: CollectorRegistry, health: Callable[[], tuple[int, dict[str, float]]]) -> type[MetricsHandler]:
    class Handler(MetricsHandler):
        def do_GET(self) -> None:
            match self.path.partition("?")[0]:
                case "/metrics":
                    super().do_GET()
                case "/health":
                    status, said = health()
                    body = json.dumps(said).encode()
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
                f"telemetry.prometheus_host is {host}, port {port}: {error}; give an address of this machine (127.0.0.1 for "
                "itself only) and a port above 1023"
            ) from error
        log.warning("port %d of %s for metrics is taken; any free one is used", port, host)
        return ThreadingHTTPServer((host, 0), handler)


def _announce(target: Path, host: str, port: int, labels: Mapping[str, str]) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_text(target, json.dumps([{"targets": [f"{host}:{port}"], "labels": labels}]))
    except OSError as error:
        log.warning("%s cannot be written, by which Prometheus finds %s:%d: %s", target, host, port, error)
