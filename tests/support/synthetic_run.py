"""A run directory as a learner and its generators would leave it, without any of them."""

import math
import random
import time
from dataclasses import asdict, replace
from pathlib import Path

from asyncrl.buffer.base import Audit
from asyncrl.control.base import MemberStatus
from asyncrl.run.starts import Start
from asyncrl.telemetry.base import SampleRecord
from asyncrl.telemetry.jsonl import Lines
from asyncrl.telemetry.status import StatusSnapshot, write_status
from asyncrl.telemetry.trackers import JsonlTracker

NASTY = "[red]<think>\x1b[31m 12 + 7\n= 19\u202e\u200b</think> 答案是 \U0001f600 [/red] \x07\x9b2J"


class SyntheticRun:
    """Writes one step after the other."""

    def __init__(
        self, directory: Path, *, generators: int = 4, total_steps: int = 400, seed: int = 0
    ) -> None:
        self.directory = directory
        self.total_steps = total_steps
        self.learner = JsonlTracker(directory / "metrics" / "learner.jsonl", directory / "samples.jsonl")
        self.ids = [f"g{index}" for index in range(generators)]
        self.trackers = {name: JsonlTracker(directory / "metrics" / f"{name}.jsonl") for name in self.ids}
        self.random = random.Random(seed)
        self.started_at = time.time() - 723
        self.step = 0
        start = Start(time=self.started_at, step=0, versions={"torch": "2"}, hardware="2 CPU cores")
        Lines(directory / "starts.jsonl").write([asdict(start)])

    def advance(self) -> None:
        self.step += 1
        step, noise = self.step, self.random.gauss(0, 0.03)
        reward = 0.9 / (1 + math.exp(-(step - 60) / 25)) + noise
        self.learner.log(
            {
                "reward/mean": reward, "reward/std": 0.31,
                "completions/length_mean": 212.4 - step / 10, "completions/length_max": 512,
                "completions/truncated_share": 0.031, "policy/entropy": 1.21, "policy/grad_norm": 0.314, "mismatch/k3": 0.00112,
                "mismatch/ess": 0.983, "weights/probe_max": 0.0131, "weights/transfer_gb_per_s": 1.27, "staleness/mean": 1.31, "staleness/max": 4,
                "staleness/in_flight": 0.91, "staleness/in_queue": 0.4, "staleness/masked_share": 0.002,
                "groups/rejected_zero_variance": 3,
                "time/step": 5.12, "idle/learner": 0.12, "perf/learner_tokens_per_s": 1380.2, "perf/learner_tflops_per_s": 0.0213, "policy/loss": math.nan,
            },
            step=step,
        )  # fmt: skip
        if step % 10 == 0:
            # Accuracy is not shown where rewards have parts: a story may use one of two words.
            score = {"reward_mean": max(0.0, reward - 0.1), "se/reward_mean": 0.014, "accuracy": 0.1 * reward}
            self.learner.log(
                {f"eval/{name}": value for name, value in score.items()} | {"eval/prompts": 1319}, step=step
            )
        self.learner.samples([self.sample(0), self.sample(1)])
        for name, tracker in self.trackers.items():
            tracker.log(self.generator_metrics(name, step))
        write_status(self.directory / "status.json", self.status())

    def generator_metrics(self, name: str, step: int) -> dict[str, float]:
        alive_s = 5.0 * step
        tokens_per_s = 300.0 + len(name)
        return {
            "tokens_per_s": tokens_per_s,
            "running_requests": 64,
            "alive_s": alive_s,
            "idle_s": 0.4 * alive_s,
            "paused_s": 0.02 * alive_s,
            "stalled_s": 0.03 * alive_s,
        }

    def sample(self, index: int) -> SampleRecord:
        return SampleRecord(
            step=self.step,
            ticket_id=self.step * 8 + index,
            prompt="Tom has 12 apples and gets 7 more. " * 4 + "How many apples does Tom have?",
            response=NASTY if index else "Tom starts with 12 apples, and 12 + 7 = 19. " * 12,
            reward=float(1 - index),
            parts={"exact_match": float(1 - index), "format": 0.0},
            advantage=0.71 if index else -0.71,
            versions=[(self.step - 3, 40), (self.step - 1, 22)],
            finish_reason="stop",
            generator_id="g1",
        )

    def status(self) -> StatusSnapshot:
        states = ["sampling", "sampling", "waiting_tickets", "updating", "dirty"]
        members = tuple(
            MemberStatus(
                generator_id=name,
                state=states[index % len(states)] if index != 4 else "dirty",
                version=self.step - index % 3,
                silent_s=0.4 if index != 7 else 31.0,
                metrics=self.generator_metrics(name, self.step),
            )
            for index, name in enumerate(self.ids)
        )
        done = self.step * 32
        audit = Audit(
            issued=done + 108, leased=64, reissue=0, ready=12, taken=32, done=done, payload_bytes=12_900_000,
            counters={"put": done, "duplicate": 2, "lease_expired": 3, "failed": 1, "dead": 0},
        )  # fmt: skip
        return StatusSnapshot(
            run="quickstart", state="training", step=self.step, total_steps=self.total_steps, version=self.step, lag_bound=6,
            members=members, audit=audit, counters={"died": 1, "updates": 480, "updates_failed": 2, "probe_max": 0.0131},
            started_at=self.started_at, updated_at=time.time(), pid=1,
        )  # fmt: skip

    def finish(self, state: str = "finished", message: str = "") -> None:
        write_status(self.directory / "status.json", replace(self.status(), state=state, message=message))
