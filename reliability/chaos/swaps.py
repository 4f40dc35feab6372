"""A whole run that trains an adapter; its processes are killed in each phase of a swap of adapters.

    first lap   stale rollouts; learner, generator or vLLM's own process dies where a function begins or ends
    resume      the supervisor is killed, and the same command goes on, with `model.lora.start` still in it
    second lap  nothing may be stale, so that the learner scores each token with the adapter that its version
                names: a token of another adapter would differ by what the steps between have moved

A generator that is started again is a late joiner: its first adapter is the newest one, not the start.
"""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.models import peft_adapter

from .real import RealRun

HERE = Path(__file__).parent
ADAPTER = ("model.lora.rank=8", "model.lora.alpha=16", "model.lora.targets=[q_proj,up_proj]")
# Learner and engine round differently; a step of this learning rate moves the probe by far more.
LIMIT, OPTIONS = 1e-4, ("learner.optimizer.lr=0.02", "learner.ranks=1", "run.environment=[STRIKE_IN]")
_PUBLISHER, _VLLM = "weights.publisher:SlotPublisher", "engine.vllm.engine:VLLMEngine"
_RECEIVER, _ADAPTER = "engine.vllm.receiver", "engine.vllm.adapter:Adapter"
LEARNER = {
    "before the copy": f"{_PUBLISHER}.publish:start",
    "copied, without checksums": f"{_PUBLISHER}._finish:start",
    "newest, not announced": f"{_PUBLISHER}._finish:end",
    "a generator asks": f"{_PUBLISHER}.order:start",
    "ordered": f"{_PUBLISHER}.order:end",
}
GENERATOR = {
    "before staging": "weights.staging:HostStaging.stage:start",
    "staged": "weights.staging:HostStaging.stage:end",
    "paused": f"{_VLLM}.begin_update:end",
    "loaded": f"{_VLLM}.receive:end",
    "sampling again, before the probe": f"{_VLLM}.finish_update:end",
    "probed, not reported": "weights.agreement:Agreement.judge:end",
}
WORKER = {
    "told to load": f"{_RECEIVER}:_load_adapter:start",
    "slot open, nothing copied": "weights.slots:open_slot:end",
    "copied, nothing replaced": f"{_ADAPTER}.replace:start",
    "replaced": f"{_ADAPTER}.replace:end",
    "loaded, not answered": f"{_RECEIVER}:_load_adapter:end",
}
PHASES = [
    (process, *each)
    for process, phases in (("learner", LEARNER), ("generator", GENERATOR), ("vLLM", WORKER))
    for each in phases.items()
]
"""What dies, what has happened before, and where the process kills itself."""


class SwapRun(RealRun):
    """A run that begins with an adapter that PEFT has written."""

    def __enter__(self) -> "SwapRun":
        super().__enter__()
        peft_adapter(self.root / "model", self.root / "start")
        os.environ |= {"PYTHONPATH": str(HERE / "struck"), "STRIKE_IN": str(self.root / "strike")}
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        for name in ("PYTHONPATH", "STRIKE_IN"):
            del os.environ[name]

    def go(self, *overrides: str) -> None:
        """`asyncrl up`, until all generators are there."""
        start = f"model.lora.start={self.root / 'start'}"
        self.begin(*ADAPTER, start, *OPTIONS, *overrides)

    def strike(self, process: str, phase: str, place: str) -> None:
        """Have the next process that comes to `place` die; the run must make steps and be whole. Raises Stuck."""
        order, struck = self.root / "strike", self.root / "strike.struck"
        struck.unlink(missing_ok=True)
        waiting = order.with_suffix(".new")
        waiting.write_text(f"asyncrl.{place}")
        waiting.rename(order)
        self.wait(lambda: struck.exists() or self._check(), f"{process} at {place}")
        at = time.time()
        self.killed[f"{process}: {phase}"] = self.killed.get(f"{process}: {phase}", 0) + 1
        sys.stdout.write(f"{process} killed, {phase}, after step {self.furthest()}\n")
        sys.stdout.flush()
        self.wait_steps(2)
        self.wait(lambda: self.is_whole(at + 5.0) or self._check(), f"return after {process}, {phase}")


def _moved(rows: Sequence[Mapping[str, Any]]) -> float:
    return max(row.get("weights/moved", 0.0) for row in rows)


def run(root: Path) -> dict[str, Any]:
    """Strike at every other phase in the first lap, and at the others in the second. Raises Stuck."""
    with SwapRun(root) as real:
        real.go()
        for phase in PHASES[::2]:
            real.strike(*phase)
        real.kill_supervisor()
        before = len(real.rows())
        real.go("staleness.max_lag=0")
        for phase in PHASES[1::2]:
            real.strike(*phase)
        rows = real.rows()
        # The store still had stale groups for the first steps after the resume.
        fresh = [row["mismatch/abs_log_ratio/max"] for row in rows if row["staleness/max"] == 0]
        return {
            "killed": real.killed,
            "probe_max": max(row.get("weights/probe_max", 0.0) for row in rows),
            "moved_max": [_moved(rows[:before]), _moved(rows[before:])],
            "steps_without_lag": len(fresh),
            "apart_without_lag_max": max(fresh),
            **real.stop(),
        }
