"""What four staleness rules do to slow answers: a simulation of the queue, not of the mathematics.

All admit groups by the same credit, trained + rejected + (L + 1) B, and differ in what they take when B
groups could be trained:

    count     the oldest B finished ones, whatever their age
    in order  exactly the next B tickets
    drop      the oldest B finished ones, after discarding those older than L
    window x  the anchored window of asyncrl.algo.staleness, W = x (L + 1) B; 0.3 is the default

Latencies are independent of load and of weight updates; weights change in flight; tokens are sampled evenly
over the latency, so a token's age follows from its time. Length ratio: mean latency of trained over all
finished groups.

    python -m bench.staleness [--steps 200] [--seeds 5] [--out bench/results/staleness.json]
"""

import argparse
import heapq
import json
import random
import statistics
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.algo.staleness import choose, credit_limit, lag_bound
from bench.environment import describe

GROUPS, RUNNING, STEP_TIME = 64, 256, 0.3
LATENCIES = {
    "exponential": lambda rng: rng.expovariate(1.0),
    "log-normal 1.0": lambda rng: rng.lognormvariate(0.0, 1.0),
    "log-normal 1.5": lambda rng: rng.lognormvariate(0.0, 1.5),
}
RULES = ("count", "in order", "drop", "window 0.3", "window 1", "window 2")


@dataclass
class Simulation:
    """One rule, one latency, one seed. `ready`: id -> (version at the start, start, finish)."""

    rule: str
    max_lag: int
    latency: Callable[[Any], float]
    rng: random.Random
    now: float = 0.0
    version: int = 0
    issued: int = 0
    dropped: int = 0
    running: list = field(default_factory=list)
    ready: dict = field(default_factory=dict)
    changes: list = field(default_factory=lambda: [0.0])
    """When each version came into use."""
    ages: list = field(default_factory=list)
    old_tokens: list = field(default_factory=list)
    """Per trained group: the share of its tokens that is older than the lag allows."""
    trained: list = field(default_factory=list)
    finished: list = field(default_factory=list)

    @property
    def window(self):
        return (
            1 if self.rule == "in order" else int(float(self.rule.split()[1]) * (self.max_lag + 1) * GROUPS)
        )

    @property
    def bound(self):
        return (
            lag_bound(self.max_lag, window=self.window, groups=GROUPS)
            if self.rule.startswith("window")
            else self.max_lag
        )

    def admit(self):
        limit = credit_limit(
            self.version * GROUPS, max_lag=self.max_lag, groups=GROUPS, rejected=self.dropped
        )
        while len(self.running) < RUNNING and self.issued < limit:
            self.issued += 1
            heapq.heappush(
                self.running, (self.now + self.latency(self.rng), self.issued, self.version, self.now)
            )

    def finish_until(self, time):
        """Let groups finish, and others start in their places, up to `time`."""
        self.admit()
        while self.running and self.running[0][0] <= time:
            self.now, ticket_id, version, start = heapq.heappop(self.running)
            self.ready[ticket_id] = (version, start, self.now)
            self.finished.append(self.now - start)
            self.admit()
        self.now = time

    def pick(self):
        """Ids of the next batch, or None."""
        if self.rule == "drop":
            for ticket_id in [i for i, group in self.ready.items() if self.version - group[0] > self.max_lag]:
                del self.ready[ticket_id]
                self.dropped += 1
        ready = sorted(self.ready)
        if self.rule in ("count", "drop"):
            return ready[:GROUPS] if len(ready) >= GROUPS else None
        anchor = min((group[1] for group in self.running), default=self.issued + 1)
        return choose(ready, anchor=anchor, count=GROUPS, window=self.window)

    def step(self):
        while (chosen := self.pick()) is None:
            self.admit()
            self.finish_until(self.running[0][0])
        first_fresh = self.changes[self.version - self.max_lag] if self.version > self.max_lag else 0.0
        for ticket_id in chosen:
            version, start, finish = self.ready.pop(ticket_id)
            self.ages.append(self.version - version)
            self.old_tokens.append(min(1.0, max(0.0, (first_fresh - start) / (finish - start))))
            self.trained.append(finish - start)
        self.finish_until(self.now + STEP_TIME)
        self.version += 1
        self.changes.append(self.now)

    def run(self, steps):
        for _ in range(steps):
            self.step()
        assert bisect_right(self.changes, self.now) == self.version + 1
        return {
            "max_age": max(self.ages),
            "bound": self.bound,
            "mean_age": statistics.fmean(self.ages),
            "groups_over_lag": statistics.fmean(age > self.max_lag for age in self.ages),
            "groups_over_bound": statistics.fmean(age > self.bound for age in self.ages),
            "tokens_over_lag": statistics.fmean(
                old * latency for old, latency in zip(self.old_tokens, self.trained, strict=True)
            )
            / statistics.fmean(self.trained),
            "dropped": self.dropped / (self.dropped + len(self.trained)),
            "length_ratio": statistics.fmean(self.trained) / statistics.fmean(self.finished),
            "steps_per_time": steps / self.now,
        }


def measure(rule, max_lag, latency, *, steps, seeds):
    """The worst maximum and the mean of everything else over the seeds."""
    runs = [
        Simulation(rule, max_lag, LATENCIES[latency], random.Random(seed)).run(steps) for seed in range(seeds)
    ]
    merged = {name: round(statistics.fmean(run[name] for run in runs), 4) for name in runs[0]}
    return {
        "latency": latency,
        "max_lag": max_lag,
        "rule": rule,
        **merged,
        "max_age": max(run["max_age"] for run in runs),
    }


def table(rows):
    yield (
        "latency         L  rule       max age (bound)  mean  groups > L  tokens > L  dropped  length "
        "ratio  steps/time"
    )
    for row in rows:
        yield (
            f"{row['latency']:<15} {row['max_lag']}  {row['rule']:<10} {row['max_age']:>4} "
            f"({row['bound']:>2.0f}){row['mean_age']:>13.2f}  {row['groups_over_lag']:>9.1%}  "
            f"{row['tokens_over_lag']:>9.1%}  {row['dropped']:>6.1%}  {row['length_ratio']:>11.2f}  "
            f"{row['steps_per_time']:>10.2f}"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cases = [(latency, 4) for latency in LATENCIES] + [("log-normal 1.0", 8)]
    rows = [
        measure(rule, max_lag, latency, steps=options.steps, seeds=options.seeds)
        for latency, max_lag in cases
        for rule in RULES
    ]
    workload = {
        "groups": GROUPS,
        "running": RUNNING,
        "step_time": STEP_TIME,
        "steps": options.steps,
        "seeds": options.seeds,
    }
    result = {**describe("asyncrl"), "workload": workload, "rows": rows}
    print(json.dumps({name: value for name, value in result.items() if name != "rows"}, indent=2))
    print("\n".join(table(rows)))
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
