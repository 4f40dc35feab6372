"""A whole run as a user starts it, and what it leaves in its directory."""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from asyncrl.commands.down import processes_of
from tests.support.command import ASYNCRL
from tests.support.models import tiny_qwen2
from tests.support.waiting import wait_until

B = 4


@contextmanager
def tiny_run(tmp_path: Path, engine: str = "transformers") -> Iterator[Path]:
    """A run of a tiny model with a reward from a file of the user's own.

    Its engine starts in seconds. Tests of what a run does to vLLM, or vLLM to a run, name vllm.
    """
    tiny_qwen2(tmp_path / "model")
    code = "def odd(prompt, response, **row):\n    return sum(c in '13579' for c in response) / 4\n"
    (tmp_path / "rewards.py").write_text(code)
    for name, start in (("train", 10), ("test", 60)):
        rows = [{"prompt": f"{a}+{b}="} for a in range(start, start + 10) for b in range(start, start + 10)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "run": {"name": "whole", "root": str(tmp_path / "runs")},
        "model": {"path": str(tmp_path / "model"), "dtype": "float32"},
        "data": {"train": str(tmp_path / "train.jsonl"), "eval": str(tmp_path / "test.jsonl")},
        "reward": {"functions": [{"function": f"{tmp_path}/rewards.py:odd"}]},
        "batch": {"groups": B, "group_size": 4},
        "sampling": {"max_prompt_tokens": 8, "max_response_tokens": 8},
        "staleness": {"max_lag": 2},
        "learner": {"steps": 6, "device": "cpu", "threads": 1, "optimizer": {"lr": 1e-3}},
        "generator": {
            "engine": engine,
            "count": 2,
            "threads": 1,
            "max_running": 16,
            "kv_cache_gib": 0.25,
            "lease_s": 10,
        },
        "eval": {"every": 3, "prompts": 8},
        "checkpoint": {"every": 2},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    yield path
    for process in processes_of(tmp_path / "runs" / "whole"):
        process.kill()


def start(config: Path, *overrides: str) -> "subprocess.Popen[bytes]":
    output = (config.parent / "up.out").open("ab")
    return subprocess.Popen(
        [*ASYNCRL, "up", "--plain", "--config", str(config), *overrides], stdout=output, stderr=output
    )


def call(*arguments: str, timeout_s: float = 120.0) -> str:
    command = [*ASYNCRL, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows(run: Path, process: str = "learner") -> list[dict[str, float]]:
    path = run / "metrics" / f"{process}.jsonl"
    text = path.read_text() if path.exists() else ""
    # The last one may be half written.
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def steps(run: Path) -> list[int]:
    return [int(row["step"]) for row in rows(run) if "time/step" in row]


def wait(
    condition: Callable[[], bool], process: "subprocess.Popen[bytes]", config: Path, wait_s: float = 400.0
) -> None:
    def said() -> str:
        return (config.parent / "up.out").read_text()[-3000:]

    def is_so() -> bool:
        assert process.poll() is None, f"ended with status {process.returncode}:\n{said()}"
        return condition()

    wait_until(is_so, wait_s, said)


def member_versions(run: Path) -> list[int]:
    return [member["version"] for member in json.loads(call("status", str(run), "--json"))["members"]]


def kill(run: Path, name: str) -> int:
    pid = json.loads((run / "processes.json").read_text())["children"][name]
    os.kill(pid, signal.SIGKILL)
    return pid
