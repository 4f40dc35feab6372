"""What watching a run costs: CPU time of the dashboard's process per second of showing, as `asyncrl up` shows
it.

A synthetic run directory with a whole history grows by one step a second; each frame reads what is new and
draws all of it.

    python -m bench.dashboard [--generators 64] [--steps 2000] [--seconds 20]
"""

import argparse
import io
import json
import tempfile
import time
from pathlib import Path

from rich.console import Console

from asyncrl.telemetry.live import INTERVAL_S, Dashboard
from asyncrl.telemetry.state import RunReader
from bench.environment import describe
from tests.support.synthetic_run import SyntheticRun


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--generators", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        run = SyntheticRun(Path(directory), generators=options.generators, total_steps=10 * options.steps)
        for _ in range(options.steps):
            run.advance()
        console = Console(file=io.StringIO(), width=120, height=40, force_terminal=True)
        view, reader = Dashboard(console), RunReader(Path(directory))
        view.show(reader.read())  # the history is read once
        cpu_s, frames, started_s = 0.0, 0, time.perf_counter()
        while time.perf_counter() - started_s < options.seconds:
            if frames % round(1 / INTERVAL_S) == 0:
                run.advance()
            before_s = time.process_time()
            view.show(reader.read())
            cpu_s += time.process_time() - before_s
            frames += 1
            time.sleep(INTERVAL_S)
        view.close()
    per_frame_s = cpu_s / frames
    result = {
        "generators": options.generators,
        "steps": options.steps,
        "frames": frames,
        "cpu_ms_per_frame": round(1000 * per_frame_s, 2),
        "share_of_one_core": round(per_frame_s / INTERVAL_S, 4),
        "environment": describe("rich", "plotext"),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
