"""A whole run with a tiny model, started as a user starts it, while its processes are killed one kind after
the other.

    heal        kill -9 of every kind of process; the run goes on by itself, and is whole again before the next
    supervisor  kill -9 of the one that looks after the others: nothing survives it
    down        the same command goes on from the checkpoint; `asyncrl down` ends it
    crash loop  a process that always dies ends the run with its last words
    pace        a run of its own: a generator killed every minute, the learner once in ten; what that costs

Everything is read from what the run leaves behind: metrics, checkpoints, the store's audit, the table of
processes.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import yaml

from asyncrl.commands.down import processes_of
from tests.support.models import tiny_qwen2

from .members import Stuck

B, EVERY = 4, 5
PACE_EVERY = 40
"""About 20 s: sqrt(2 * 0.4 s per save * 600 s between deaths of the learner), after J. W. Young (1974)."""
GENERATORS = 2
PATIENCE_S = 600.0
VICTIMS = {
    "generator": "asyncrl.launch.generator_process",
    "engine core": "VLLM::EngineCore",
    "reward worker": "asyncrl.rewards.worker",
    "learner rank": "asyncrl.launch.learner_process",
    "store": "(redis|valkey)-server",
}
"""Kind of process, and what its command line has, as a regular expression."""
ASYNCRL = [sys.executable, "-m", "asyncrl.cli.main"]


@dataclass(slots=True)
class RealRun:
    """One run directory and the command that looks after it."""

    root: Path
    killed: dict[str, int] = field(default_factory=dict)
    longest_pause_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    to_whole_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    up: "subprocess.Popen[bytes] | None" = None

    @property
    def directory(self) -> Path:
        return self.root / "runs" / "chaos"

    def __enter__(self) -> "RealRun":
        """Model, data and config."""
        tiny_qwen2(self.root / "model")
        code = "def odd(prompt, response, **row):\n    return sum(c in '13579' for c in response) / 4\n"
        (self.root / "rewards.py").write_text(code)
        rows = [json.dumps({"prompt": f"{a}+{b}="}) for a in range(10, 30) for b in range(10, 30)]
        (self.root / "train.jsonl").write_text("\n".join(rows) + "\n")
        values = {
            "run": {"name": "chaos", "root": str(self.root / "runs")},
            "model": {"path": str(self.root / "model"), "dtype": "float32"},
            "data": {"train": str(self.root / "train.jsonl")},
            "reward": {"functions": [{"function": f"{self.root}/rewards.py:odd"}]},
            "batch": {"groups": B, "group_size": 4},
            "sampling": {"max_prompt_tokens": 8, "max_response_tokens": 8},
            "staleness": {"max_lag": 2},
            "learner": {
                "steps": 100_000,
                "ranks": 2,
                "device": "cpu",
                "threads": 1,
                "optimizer": {"lr": 1e-3},
            },
            "generator": {
                "count": GENERATORS,
                "threads": 1,
                "max_running": 16,
                "kv_cache_gib": 0.25,
                "lease_s": 10,
            },
            "checkpoint": {"every": EVERY},
            "control": {"max_restarts": 1000, "timeout_s": 5},
        }
        (self.root / "run.yaml").write_text(yaml.safe_dump(values))
        return self

    def start(self, *overrides: str) -> None:
        """`asyncrl up`."""
        with (self.root / "up.out").open("ab") as output:
            argv = [*ASYNCRL, "up", "--plain", "--config", str(self.root / "run.yaml"), *overrides]
            self.up = subprocess.Popen(argv, stdout=output, stderr=output)

    def __exit__(self, *_: object) -> None:
        """Leave nothing behind."""
        if self.up is not None:
            self.up.kill()
            self.up.wait(10.0)
        for process in processes_of(self.directory):
            process.kill()

    # --- what it says about itself ----------------------------------------------------------------

    def rows(self) -> list[dict[str, Any]]:
        """Of the learner's steps, oldest first."""
        path = self.directory / "metrics" / "learner.jsonl"
        if not path.exists():
            return []
        found = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        return [row for row in found if "time/step" in row]

    def furthest(self) -> int:
        """The highest step so far."""
        return max((row["step"] for row in self.rows()), default=0)

    def find(self, kind: str) -> list[psutil.Process]:
        """The live processes of one kind, in a steady order; a standby is no learner."""
        learner = json.loads((self.directory / "processes.json").read_text())["children"].get("learner")
        found = []
        for process in processes_of(self.directory):
            try:
                is_one = re.search(VICTIMS[kind], " ".join(process.cmdline()))
                if is_one and (kind != "learner rank" or os.getsid(process.pid) == learner):
                    found.append(process)
            except (psutil.Error, ProcessLookupError):
                continue
        return sorted(found, key=lambda process: process.pid)

    def wait(self, condition: Callable[[], Any], what: str, wait_s: float = PATIENCE_S) -> None:
        """Raises Stuck with the end of the supervisor's output."""
        until_s = time.monotonic() + wait_s
        while not condition():
            if time.monotonic() > until_s:
                raise Stuck(f"no {what} within {wait_s:.0f} s:\n{self.said()}")
            time.sleep(0.1)

    def said(self) -> str:
        """The end of the supervisor's output."""
        return (self.root / "up.out").read_text()[-3000:]

    def wait_steps(self, more: int) -> None:
        """Until `more` new steps are made. Raises Stuck."""
        target = self.furthest() + more
        self.wait(lambda: self.furthest() >= target or self._check(), f"step {target}")

    def _check(self) -> bool:
        if self.up is not None and self.up.poll() is not None:
            raise Stuck(f"the run ended with status {self.up.returncode}:\n{self.said()}")
        return False

    def is_whole(self, since: float) -> bool:
        """Whether the learner has said after `since` (Unix time) that every generator is there."""
        path = self.directory / "status.json"
        status: dict[str, Any] = {"updated_at": 0.0, "members": []}
        if path.exists():
            status = json.loads(path.read_text())
        return status["updated_at"] > since and len(status["members"]) == GENERATORS

    # --- the parts --------------------------------------------------------------------------------

    def begin(self, *overrides: str) -> None:
        """`asyncrl up`, until everybody is there and steps are made."""
        self.start(*overrides)
        self.wait_steps(2)
        self.wait(lambda: self.is_whole(0.0) or self._check(), "second generator")

    def kill(self, kind: str, draw: random.Random) -> float:
        """kill -9 of one process of `kind`, when there is one. Returns when (Unix time)."""
        victims: list[psutil.Process] = []
        while not victims:
            self.wait(lambda: self.find(kind), kind)
            victims = self.find(kind)
        victim, at = draw.choice(victims), time.time()
        sys.stdout.write(f"kill -9 of a {kind}, process {victim.pid}, after step {self.furthest()}\n")
        sys.stdout.flush()
        victim.kill()
        self.killed[kind] = self.killed.get(kind, 0) + 1
        return at

    def kill_one(self, kind: str, draw: random.Random) -> None:
        """The run must make steps that it had not made before, and have everybody again."""
        before = len(self.find(kind))
        at = self.kill(kind, draw)
        self.wait_steps(2)
        self.wait(
            lambda: (self.is_whole(at + 5.0) and len(self.find(kind)) >= before) or self._check(),
            f"return of the {kind}",
        )
        self.to_whole_s[kind].append(round(time.time() - at, 2))
        self.longest_pause_s[kind].append(round(longest_pause(self.rows(), at), 2))

    def pace(self, minutes: float, draw: random.Random) -> dict[str, Any]:
        """A generator is killed in each minute, the learner in every tenth; the first minute is without."""
        calm_from = time.time()
        self.run_until(calm_from + 60.0)
        began = time.time()
        learner_killed_at = []
        for minute in range(round(minutes)):
            if minute % 10 == min(5, round(minutes) // 2):
                learner_killed_at.append(self.kill("learner rank", draw))
            self.run_until(began + 60.0 * minute + 30.0)
            self.kill("generator", draw)
            self.run_until(began + 60.0 * (minute + 1))
        ended, rows = time.time(), self.rows()
        calm = {row["step"]: row["time/step"] for row in within(rows, calm_from, began)}
        lasting = lasting_steps(rows, began)
        return {
            "seconds": round(ended - began, 1),
            "killed": self.killed,
            "pauses_for_the_learner_s": [
                round(longest_pause(within(rows, at, at + 30.0), at), 2) for at in learner_killed_at
            ],
            "steps_per_minute_calm": round(60.0 * len(calm) / (began - calm_from), 1),
            "steps_per_minute": round(60.0 * len(lasting) / (ended - began), 1),
            "share_of_steps_calm": round(sum(calm.values()) / (began - calm_from), 3),
            "share_of_lasting_steps": round(sum(lasting.values()) / (ended - began), 3),
            "share_of_waiting": round(
                sum(lasting_steps(rows, began, "time/wait_groups").values()) / (ended - began), 3
            ),
        }

    def run_until(self, at: float) -> None:
        """Let it run until a Unix time. Raises Stuck."""
        while time.time() < at:
            self._check()
            time.sleep(0.2)

    def kill_supervisor(self) -> float:
        """Seconds until nothing of the run is left. Raises Stuck."""
        assert self.up is not None
        self.up.kill()
        self.up.wait(10.0)
        at_s = time.monotonic()
        self.wait(
            lambda: not processes_of(self.directory), "end of all processes after the supervisor's", 60.0
        )
        self.killed["supervisor"] = 1
        return round(time.monotonic() - at_s, 2)

    def resume_and_stop(self) -> dict[str, Any]:
        """The same command goes on from the checkpoint. Raises Stuck."""
        self.start()
        self.wait_steps(2)
        return self.stop()

    def stop(self) -> dict[str, Any]:
        """`asyncrl down`, and what is left. Raises Stuck."""
        self.command("down", str(self.directory))
        assert self.up is not None
        status, left = self.up.wait(60.0), len(processes_of(self.directory))
        newest = max(
            (self.directory / "checkpoints").glob("step-*"),
            key=lambda path: int(path.name.removeprefix("step-")),
        )
        state = json.loads((newest / "state.json").read_text())
        ledger, audit = state["ledger"], json.loads(self.command("audit", str(self.directory)))
        consumed, rejected = ledger["watermark"] + len(ledger["above"]), sum(ledger["rejected"].values())
        return {
            "steps": state["version"],
            "groups": consumed,
            "unaccounted": consumed - state["version"] * B - rejected,
            "missing_in_audit": audit["missing"],
            "steps_in_a_row": lineage_of(self.rows())[: state["version"]]
            == list(range(1, state["version"] + 1)),
            "down_leaves_nothing": status == 128 + signal.SIGTERM and left == 0,
        }

    def crash_loop(self) -> bool:
        """A generator that dies again and again ends the run, which says so and leaves nothing."""
        self.start("control.max_restarts=2")
        assert self.up is not None
        until_s = time.monotonic() + PATIENCE_S
        while self.up.poll() is None and time.monotonic() < until_s:
            for process in self.find("generator")[:1]:
                process.kill()
            time.sleep(0.5)
        return (
            self.up.poll() not in (0, None)
            and "died 3 times" in self.said()
            and not processes_of(self.directory)
        )

    def command(self, *arguments: str) -> str:
        """A command's output. Raises Stuck."""
        done = subprocess.run(
            [*ASYNCRL, *arguments], capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        if done.returncode:
            raise Stuck(f"asyncrl {' '.join(arguments)}: {done.stderr}")
        return done.stdout


def lineage_of(rows: list[dict[str, Any]]) -> list[int]:
    """The steps that lasted: a step that is made again replaces itself and all after it."""
    steps: list[int] = []
    for row in rows:
        steps = [*(step for step in steps if step < row["step"]), row["step"]]
    return steps


def longest_pause(rows: list[dict[str, Any]], since: float) -> float:
    """Seconds without a new step, at most, since a Unix time."""
    ends = [since, *(row["time"] for row in rows if row["time"] > since)]
    return max(later - earlier for earlier, later in pairwise(ends))


def within(rows: list[dict[str, Any]], since: float, until: float) -> list[dict[str, Any]]:
    """The steps that ended between two Unix times."""
    return [row for row in rows if since < row["time"] <= until]


def lasting_steps(rows: list[dict[str, Any]], began: float, part: str = "time/step") -> dict[int, float]:
    """Seconds of each step since `began` (Unix time) that was not made again, or of a part of it."""
    lasting: dict[int, float] = {}
    for row in rows:
        if row["time"] > began:
            lasting = {step: s for step, s in lasting.items() if step < row["step"]} | {
                row["step"]: row[part]
            }
    return lasting


def run(seed: int, rounds: int, root: Path) -> dict[str, Any]:
    """All parts but the last; every kind of process is killed `rounds` times."""
    draw = random.Random(seed)
    with RealRun(root) as real:
        real.begin()
        began_s = time.monotonic()
        for _ in range(rounds):
            for kind in draw.sample(sorted(VICTIMS), len(VICTIMS)):
                real.kill_one(kind, draw)
        healing_s = time.monotonic() - began_s
        gone_s = real.kill_supervisor()
        found = real.resume_and_stop()
        return {
            "seed": seed,
            "seconds": round(healing_s, 1),
            "killed": real.killed,
            "longest_pause_s": real.longest_pause_s,
            "to_whole_s": real.to_whole_s,
            "nothing_left_after_supervisor_s": gone_s,
            **found,
            "crash_loop_ends_the_run": real.crash_loop(),
        }


def run_pace(seed: int, minutes: float, root: Path) -> dict[str, Any]:
    """The last part."""
    with RealRun(root) as real:
        real.begin(f"checkpoint.every={PACE_EVERY}")
        found = real.pace(minutes, random.Random(seed))
        return {"seed": seed, **found, **real.stop()}
