"""Everything that the learner shows of its run: metrics, samples, timeline. Nothing in here can fail a
step."""

from collections.abc import Callable, Mapping, Sequence

from asyncrl.best_effort import BestEffort
from asyncrl.evaluation import EvalResult
from asyncrl.learner import Step
from asyncrl.report.records import dropped_records, eval_records, sample_records
from asyncrl.report.step_metrics import step_metrics
from asyncrl.report.timeline import Timeline
from asyncrl.telemetry.fanout import Trackers
from asyncrl.weights.base import UpdateReport

EVAL_SAMPLES = 4


class Reporting:
    """Trackers and timeline behind one guard."""

    def __init__(
        self,
        trackers: Trackers,
        timeline: Timeline,
        decode: Callable[[Sequence[int]], str],
        *,
        samples_per_step: int,
    ) -> None:
        self._trackers = trackers
        self._timeline = timeline
        self._decode = decode
        self._samples_per_step = samples_per_step
        self.guard = BestEffort()

    def step(self, step: Step, counters: Mapping[str, float]) -> None:
        """A finished step; `counters` are logged whatever becomes of its metrics."""
        metrics: dict[str, float] = {}
        with self.guard("metrics"):
            metrics = step_metrics(step)
        with self.guard("timeline"):
            self._timeline.step(step)
        with self.guard("samples"):
            dropped = dropped_records(step, self._decode, self._samples_per_step)
            trained = sample_records(step, self._decode, self._samples_per_step)
            self._trackers.samples([*dropped, *trained])  # newest last: what was trained
        self.log({**metrics, **counters, "telemetry/failed": self.guard.failures.total()}, step=step.version)

    def evaluation(self, results: Sequence[EvalResult]) -> None:
        """Rounds that have become complete."""
        for result in results:
            self.log(result.metrics, step=result.version)
            with self.guard("samples of an evaluation"):
                self._trackers.samples(
                    eval_records(result.groups, result.version, self._decode, EVAL_SAMPLES)
                )

    def checkpoint(self, version: int, seconds: float) -> None:
        """A checkpoint that has just been saved."""
        self.log({"time/checkpoint": seconds}, step=version)
        with self.guard("timeline"):
            self._timeline.checkpoint(version, seconds)

    def update(self, generator_id: str, report: UpdateReport) -> None:
        """An update that a generator has just reported."""
        with self.guard("timeline"):
            self._timeline.update(generator_id, report)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Numbers by name."""
        with self.guard("trackers and alarms"):
            self._trackers.log(metrics, step=step)

    def close(self) -> None:
        """Close all."""
        with self.guard("trackers and alarms"):
            self._trackers.close()
        with self.guard("timeline"):
            self._timeline.close()
