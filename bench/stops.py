"""Seconds from `asyncrl down` until a run is saved, for steps of several lengths, in whole runs here.

    python -m bench.stops --step-s 1 30 160 --json bench/results/stops.json

A run with the engine `transformers` on a CPU saves nothing before its end. `batch.epochs` makes its steps
about as long as asked: the learner passes over each batch so many times. `down` is typed while a step is
trained, soon after its beginning, so that nearly a whole step is left. `saved_s` is from there until the
checkpoint of this step is in its place, and `down_s` until the command returns; `within_s` is the limit that
it announces. Then the run is resumed for one step: a step that is missing, or trained twice, is an error.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from asyncrl.commands.down import read_stop
from asyncrl.run.checkpoint import NEWEST
from asyncrl.run.directory import RunDirectory
from asyncrl.telemetry.status import read_status
from bench.environment import describe, report
from tests.support.models import tiny_qwen2
from tests.support.waiting import wait_until
from tests.support.whole_run import call, rows, start, steps, tiny_run

PASSES = 8
LONGEST_S = 3600.0
# A pass over a batch of 16 short answers takes about a tenth of a second.
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
}
SETTINGS = (
    "generator.count=1",
    "data.eval=null",
    "checkpoint.every=1000",
    "learner.optimizer.lr=1e-6",
)


@contextmanager
def task(root: Path) -> Iterator[Path]:
    """The config of a run below `root`."""
    with tiny_run(root) as config:
        tiny_qwen2(root / "model", **SIZES)
        yield config


def finish(config: Path, *overrides: str) -> None:
    """Run to the end."""
    if status := start(config, *SETTINGS, *overrides).wait(timeout=LONGEST_S):
        raise SystemExit(f"status {status}:\n{said(config)}")


def said(config: Path) -> str:
    """The end of what the run printed."""
    return (config.parent / "up.out").read_text()[-3000:]


def pass_s(root: Path) -> float:
    """How long one pass over a batch takes, in the last of three steps."""
    with task(root) as config:
        finish(config, f"batch.epochs={PASSES}", "learner.steps=3")
        return [row["time/train"] for row in rows(root / "runs" / "whole") if "time/train" in row][
            -1
        ] / PASSES


def measure(epochs: int, root: Path) -> dict[str, float]:
    """One run, stopped in its second step or, if steps are short, in a later one, and resumed."""
    with task(root) as config:
        run = RunDirectory(root / "runs" / "whole")
        up = start(config, *SETTINGS, f"batch.epochs={epochs}", "learner.steps=1000")

        def is_training() -> bool:
            if up.poll() is not None:
                raise SystemExit(f"the run ended by itself:\n{said(config)}")
            status = read_status(run.status)
            return status is not None and status.step >= 1 and status.doing == "train"

        wait_until(is_training, LONGEST_S)
        begun, begun_s = time.time(), time.monotonic()
        text = call("down", str(run.path), timeout_s=LONGEST_S)
        down_s = time.monotonic() - begun_s
        up.wait(timeout=60)
        made, announced, newest = steps(run.path), read_stop(run), run.checkpoints / NEWEST
        if announced is None or f"step {made[-1]} is saved" not in text:
            raise SystemExit(f"step {made[-1]} is not saved:\n{text}")
        saved_s = newest.stat().st_mtime - begun
        finish(config, f"learner.steps={made[-1] + 1}")
        if (resumed := steps(run.path)) != [*made, made[-1] + 1] or made != [*range(1, made[-1] + 1)]:
            raise SystemExit(f"the steps were {made}, and {resumed} after the resume")
        took = {int(row["step"]): row["time/step"] for row in rows(run.path) if "time/step" in row}
        return {
            "epochs": epochs,
            "step_s": round(took[made[-1]], 1),
            "stopped_in_step": made[-1],
            "within_s": round(announced.within_s, 1),
            "saved_s": round(saved_s, 1),
            "down_s": round(down_s, 1),
        }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-s", type=float, nargs="+", default=[1.0, 30.0, 160.0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="asyncrl-stops-") as root:
        one_s, found = pass_s(Path(root)), []
        for number, step_s in enumerate(options.step_s):
            (directory := Path(root) / str(number)).mkdir()
            found.append(measure(max(1, round(step_s / one_s)), directory))
    report({"found": found, **describe("torch", "deepspeed", "transformers")}, options.json)


if __name__ == "__main__":
    main()
