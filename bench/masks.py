"""What masks for age take from long answers, and what it costs to take nothing: the queue of bench.staleness,
by length.

"masked" is the share of the trained tokens that are older than L, which leave the loss with
`staleness.policy: mask`: of the longest tenth of the answers, and of all others. "oldest" is the age of the
oldest token trained with `correct_only`, "mean age" that of all, "speed" optimizer steps per time, relative
to the default window.

    python -m bench.masks [--steps 200] [--seeds 3] [--out bench/results/masks.json]
"""

import argparse
import json
import random
import statistics
from pathlib import Path

from asyncrl.algo.staleness import lag_bound
from bench.environment import describe
from bench.staleness import GROUPS, LATENCIES, Simulation

LENGTHS = {
    **LATENCIES,
    "bimodal": lambda rng: rng.uniform(0.3, 0.7) if rng.random() < 0.9 else rng.uniform(3.5, 4.5),
}
RULES = {"in order": "W = 1", "window 0.3": "default W", "window 1": "W = (L + 1) B"}


def run(name, max_lag, rule, seed, steps):
    """Masked shares of long and other answers, oldest and mean age, steps per time."""
    queue = Simulation(rule, max_lag, LENGTHS[name], random.Random(seed))
    speed = queue.run(steps)["steps_per_time"]
    threshold = statistics.quantiles(queue.trained, n=10)[-1]
    pairs = list(zip(queue.old_tokens, queue.trained, strict=True))
    parts = ([p for p in pairs if p[1] >= threshold], [p for p in pairs if p[1] < threshold])
    masked = [sum(old * length for old, length in part) / sum(length for _, length in part) for part in parts]
    return (*masked, max(queue.ages), statistics.fmean(queue.ages), speed)


def measure(name, max_lag, *, steps, seeds):
    """One row per rule; means over the seeds, the oldest age of all."""
    found = {rule: [run(name, max_lag, rule, seed, steps) for seed in range(seeds)] for rule in RULES}
    base = statistics.fmean(one[4] for one in found["window 0.3"])
    for rule, runs in found.items():
        long, other, _, mean_age, speed = (statistics.fmean(column) for column in zip(*runs, strict=True))
        window = 1 if rule == "in order" else int(float(rule.split()[1]) * (max_lag + 1) * GROUPS)
        yield {
            "lengths": name,
            "max_lag": max_lag,
            "window": RULES[rule],
            "masked_long": round(long, 4),
            "masked_other": round(other, 4),
            "oldest": max(one[2] for one in runs),
            "bound": lag_bound(max_lag, window=window, groups=GROUPS),
            "mean_age": round(mean_age, 2),
            "speed": round(speed / base, 3),
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = [
        row
        for name in LENGTHS
        for max_lag in (2, 4, 8)
        for row in measure(name, max_lag, steps=options.steps, seeds=options.seeds)
    ]
    print("lengths         L  window          masked: longest tenth  others  oldest (bound)  mean age  speed")
    for row in rows:
        print(
            f"{row['lengths']:<15} {row['max_lag']}  "
            f"{row['window']:<14}{row['masked_long']:>16.1%}{row['masked_other']:>14.1%}{row['oldest']:>8} "
            f"({row['bound']:>2}){row['mean_age']:>14.2f}{row['speed']:>7.2f}"
        )
    if options.out:
        workload = {"groups": GROUPS, "steps": options.steps, "seeds": options.seeds}
        options.out.write_text(
            json.dumps({**describe("asyncrl"), "workload": workload, "rows": rows}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
