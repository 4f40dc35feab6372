"""A whole run with a tiny model; its processes are stopped, one kind after the other, and never woken."""

import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from .real import RealRun, longest_pause

HANG_S, DEADLINE_S = 60.0, 10.0
KINDS = ("learner rank", "store", "engine core", "generator")
BOUNDS_S = {"store": 20.0}
"""Of those that others than the supervisor replace, or sooner."""


def run(seed: int, root: Path) -> dict[str, Any]:
    """Each kind is stopped once; the run must replace it and make new steps."""
    draw = random.Random(seed)
    with RealRun(root) as real:
        options = {"control.hang_s": HANG_S, "control.slow_s": 300, "weights.deadline_s": DEADLINE_S}
        real.begin(*(f"{key}={value:g}" for key, value in options.items()))
        began_s = time.monotonic()
        times = {kind: _stop_one(real, kind, draw) for kind in KINDS}
        return {
            "seed": seed,
            "hang_s": HANG_S,
            "seconds": round(time.monotonic() - began_s, 1),
            "times": times,
            **real.stop(),
        }


def _stop_one(real: RealRun, kind: str, draw: random.Random) -> dict[str, float]:
    real.wait(lambda: real.find(kind) or real._check(), kind)
    before, victim, at = len(real.find(kind)), draw.choice(real.find(kind)), time.time()
    victim.send_signal(signal.SIGSTOP)
    real.wait(lambda: not _is_there(victim) or real._check(), f"replacement of the {kind}")
    replaced_s = time.time() - at
    real.wait_steps(2)
    step_s = time.time() - at
    real.wait(
        lambda: (real.is_whole(at + 5.0) and len(real.find(kind)) >= before) or real._check(),
        f"return of the {kind}",
    )
    found = {
        "bound_s": BOUNDS_S.get(kind, HANG_S),
        "replaced_s": round(replaced_s, 1),
        "pause_s": round(longest_pause(real.rows(), at), 1),
        "steps_again_s": round(step_s, 1),
        "whole_s": round(time.time() - at, 1),
    }
    sys.stdout.write(f"SIGSTOP of a {kind}: {found}\n")
    sys.stdout.flush()
    return found


def _is_there(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
