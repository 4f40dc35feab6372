"""Wall time per optimizer step, asynchronous against `max_lag: 0`, in whole runs of `asyncrl up` on this
machine.

    python -m bench.asynchrony --config configs/quickstart.yaml [--steps 40] [--lag 2] [--out FILE]
    [key.path=value ...]

One generator and one learner, each pinned with all its children to a core of its own; evaluation off; the
same model, prompts and batch. The first steps, in which engines warm up, do not count. The gain is largest
where sampling and training take equally long: `batch.epochs` balances the two.
"""

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from bench.environment import describe

WARM_STEPS = 8
CORE = {"asyncrl.launch.learner_process": 0, "asyncrl.launch.generator_process": 1}


def pin(parent: psutil.Process) -> None:
    """Every thread of every process below `parent` to the core of the role that it belongs to."""
    for role in parent.children():
        for name, core in CORE.items():
            if name in role.cmdline():
                for process in (role, *role.children(recursive=True)):
                    for thread in process.threads():
                        os.sched_setaffinity(thread.id, {core})


def run(config: Path, root: Path, lag: int, steps: int, overrides: list[str]) -> dict[str, float]:
    """Medians over the counted steps of one run."""
    arguments = [
        f"run.root={root}", f"run.name=lag{lag}", f"staleness.max_lag={lag}", f"learner.steps={steps}",
        "data.eval=null", "generator.count=1", "generator.threads=1", "learner.threads=1",
        f"checkpoint.every={steps}", *overrides,
    ]  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "asyncrl.cli.main",
        "up",
        "--plain",
        "--fresh",
        "--config",
        str(config),
        *arguments,
    ]
    until_s = time.monotonic() + 1800
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and time.monotonic() < until_s:
            # Where one of them has just ended, the next round pins the others.
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess, ProcessLookupError):
                pin(psutil.Process(process.pid))
            time.sleep(0.5)
        process.terminate()
    if process.returncode:
        raise SystemExit(f"the run with max_lag {lag} ended with status {process.returncode}; see {root}")
    lines = (root / f"lag{lag}" / "metrics" / "learner.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "time/step" in row][WARM_STEPS:]
    apart = [later["time"] - earlier["time"] for earlier, later in itertools.pairwise(rows)]
    return {
        "step_s": statistics.median(apart),
        "step_mean_s": statistics.mean(apart),
        "learner_waits_s": statistics.median(row["time/wait_groups"] for row in rows),
        "train_s": statistics.median(row["time/train"] + row["time/measure"] for row in rows),
        "sampling_s": statistics.median(row["time/sampling_s"] for row in rows),
        "publish_s": statistics.median(row["time/publish"] for row in rows),
        "staleness_mean": statistics.mean(row["staleness/mean"] for row in rows),
        "steps_counted": len(apart),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, default=Path("configs/quickstart.yaml"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lag", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*", help="key.path=value for both runs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as root:
        runs = {
            lag: run(options.config, Path(root), lag, options.steps, options.overrides)
            for lag in (0, options.lag)
        }
    result = {
        "benchmark": "asynchronous against max_lag 0, wall time per step",
        "ratio": runs[options.lag]["step_s"] / runs[0]["step_s"],
        "ratio_of_means": runs[options.lag]["step_mean_s"] / runs[0]["step_mean_s"],
        "aim": "<= 0.55 where sampling and training take equally long",
        "synchronous": runs[0],
        "asynchronous": runs[options.lag],
        "max_lag": options.lag,
        "overrides": options.overrides,
        "environment": describe("asyncrl", "torch", "deepspeed"),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
