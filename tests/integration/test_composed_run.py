"""deploy/compose.yaml without containers: its commands with its environment, each in a session of its own, in
its order.

bubblewrap stands in for Docker: the services of our image see the system, this Python, their volumes and
their own processes.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

import asyncrl
from asyncrl.buffer.server import find_server
from asyncrl.commands.down import processes_of
from asyncrl.rewards.sandbox import reward_sandbox
from tests.support.command import ASYNCRL
from tests.support.compose import DEPLOY, compose, env_file, mounts, words
from tests.support.models import tiny_qwen2
from tests.support.ports import free_ports
from tests.support.waiting import wait_until

PROBLEM = reward_sandbox((), Path("runs")).problem()
pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(900),
    pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM)),
]

CLIENT = f"""#!{sys.executable}
import os, sys, redis
assert sys.argv[-1] == "ping"
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
client = redis.Redis(port=int(given["-p"]), username=given["--user"], password=os.environ["REDISCLI_AUTH"])
print("PONG" if client.ping() else "")
"""
"""valkey-cli, as far as the health check needs it: the bundled store comes without."""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """What a user mounts as /work: a config, data, rewards and a model, all named by relative paths."""
    project = tmp_path / "project"
    project.mkdir()
    tiny_qwen2(project / "model")
    (project / "task.py").write_text(
        "def odd(prompt, response, **row):\n    return sum(c in '13579' for c in response) / 4\n"
    )
    rows = [{"prompt": f"{a}+{b}="} for a in range(10, 20) for b in range(10, 20)]
    (project / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "run": {"name": "composed"},
        "model": {"path": "./model", "dtype": "float32"},
        "data": {"train": "train.jsonl"},
        "reward": {"functions": [{"function": "task.py:odd"}]},
        "batch": {"groups": 4, "group_size": 4},
        "sampling": {"max_prompt_tokens": 8, "max_response_tokens": 8},
        "staleness": {"max_lag": 2},
        "learner": {"steps": 500, "device": "cpu", "threads": 1, "optimizer": {"lr": 1e-3}},
        "generator": {"threads": 1, "max_running": 16, "kv_cache_gib": 0.25},
        "checkpoint": {"every": 2},
    }
    (project / "task.yaml").write_text(yaml.safe_dump(config))
    for directory in ("prometheus", "join", "generators/prometheus"):
        (project / "runs" / directory).mkdir(parents=True)
    return project


class Box:
    """The services of a Compose file as processes of this machine."""

    def __init__(self, project: Path, variables: dict[str, str]) -> None:
        self.project = project
        self.services: dict[str, Any] = compose(variables)["services"]
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.aside = project.parent
        tools = self.aside / "bin"
        tools.mkdir()
        (tools / "valkey-server").symlink_to(find_server("bundled"))
        (tools / "valkey-cli").write_text(CLIENT)
        (tools / "valkey-cli").chmod(0o700)
        (self.aside / "data").mkdir()
        self._tools = f"{tools}:{os.environ['PATH']}"

    def start(self, name: str) -> None:
        for needed in self.services[name].get("depends_on", {}):
            self.wait(lambda needed=needed: self.is_healthy(needed))
        command = [word.replace("dir /data", f"dir {self.aside}/data") for word in words(self.services[name])]
        argv = command if command[0] == "sh" else [*self.container(name), *ASYNCRL, *command]
        with (self.aside / f"{name}.out").open("ab") as output:
            self.running[name] = subprocess.Popen(
                argv,
                cwd=self.project,
                env=self.environment(name),
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def container(self, name: str) -> list[str]:
        """What begins a command in a view of the file system that has the image, as far as it is here, and
        the volumes.

        The project lies at its own place instead of /work, and the caches of this user stand in for the
        volume.
        """
        own = [
            "/sys",
            "/usr",
            "/bin",
            "/sbin",
            "/lib",
            "/lib64",
            "/etc",
            sys.base_prefix,
            sys.prefix,
            str(Path(asyncrl.__file__).parent),
        ]
        argv = [
            "bwrap",
            "--die-with-parent",
            "--unshare-pid",
            "--proc",
            "/proc",
            "--dev-bind",
            "/dev",
            "/dev",
            "--tmpfs",
            "/tmp",
        ]
        for path in own:
            argv += ["--ro-bind-try", path, path]
        for source, target, read_only in mounts(self.services[name]):
            here = target.replace("/work", str(self.project), 1)
            if target == "/cache":
                source = here = str(Path.home() / ".cache")
            argv += ["--ro-bind" if read_only else "--bind", source, here]
        return [*argv, "--chdir", str(self.project), "--"]

    def environment(self, name: str) -> dict[str, str]:
        own = {
            key: str(value) for key, value in self.services[name]["environment"].items() if value is not None
        }
        return os.environ | {"PATH": self._tools} | own

    def is_healthy(self, name: str) -> bool:
        if "healthcheck" in self.services[name]:
            command = self.services[name]["healthcheck"]["test"][1]
        else:
            (line,) = [
                line
                for line in (DEPLOY / "Dockerfile").read_text().splitlines()
                if line.startswith('    CMD ["bash"')
            ]
            command = json.loads(line.removeprefix("    CMD "))[-1]
        argv = [*([] if name == "store" else self.container(name)), "bash", "-c", command]
        done = subprocess.run(
            argv, cwd=self.project, env=self.environment(name), capture_output=True, check=False
        )
        return done.returncode == 0

    def wait(self, condition: Callable[[], bool], wait_s: float = 400.0) -> None:
        def said() -> str:
            return "\n".join(
                f"{name}:\n{(self.aside / f'{name}.out').read_text()[-2000:]}" for name in self.running
            )

        def is_so() -> bool:
            assert all(process.poll() is None for process in self.running.values()), said()
            return condition()

        wait_until(is_so, wait_s, said)

    def stop(self, name: str) -> int:
        """As Docker stops a container: its command gets the signal, which bubblewrap would keep to itself."""
        process = self.running.pop(name)
        inner = [
            one
            for one in psutil.Process(process.pid).children(recursive=True)
            if one.cmdline()[: len(ASYNCRL)] == ASYNCRL
        ]
        os.kill(inner[0].pid if inner else process.pid, signal.SIGTERM)
        return process.wait(timeout=120)

    def close(self) -> None:
        for process in self.running.values():
            process.kill()
        for process in processes_of(self.project / "runs" / "composed"):
            process.kill()


@pytest.fixture
def box(project: Path) -> Iterator[Box]:
    variables = env_file() | {
        "ASYNCRL_PROJECT": str(project),
        "ASYNCRL_CONFIG": "task.yaml",
        "GENERATORS_ALLOW": "--allow task.py",
        "ASYNCRL_STORE_PASSWORD": secrets.token_hex(32),
        "ASYNCRL_GENERATOR_PASSWORD": secrets.token_hex(32),
        **dict(zip(("STORE_PORT", "CONTROL_PORT", "METRICS_PORT"), map(str, free_ports(3)), strict=True)),
        "GRAFANA_PASSWORD": "unused",
        "GENERATORS": "2",
    }
    box = Box(project, variables)
    yield box
    box.close()


def test_the_services_train_together_and_leave_nothing(box: Box) -> None:
    run = box.project / "runs" / "composed"

    def steps() -> int:
        path = run / "metrics" / "learner.jsonl"
        return (
            sum("time/step" in json.loads(line) for line in path.read_text().splitlines())
            if path.exists()
            else 0
        )

    def members() -> int:
        path = run / "status.json"
        return len(json.loads(path.read_text())["members"]) if path.exists() else 0

    for name in ("store", "learner", "generators"):
        box.start(name)
    sessions = [process.pid for process in box.running.values()]
    box.wait(lambda: steps() >= 4 and members() == 2)
    assert box.is_healthy("generators")
    check_what_generators_see(box, run)

    audit = [*ASYNCRL, "audit", str(run)]
    done = subprocess.run(
        audit, cwd=box.project, env=box.environment("learner"), capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["missing"] == 0
    refused = subprocess.run(
        audit, cwd=box.project, env=os.environ, capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2 and refused.stderr.startswith("StoreRefused"), (
        "the store answers who knows its password"
    )
    targets = [
        len(list(box.project.glob(f"{place}/prometheus/*.json"))) for place in ("runs", "runs/generators")
    ]
    assert targets == [1, 2], "where Prometheus looks"

    ended = 128 + signal.SIGTERM  # what Docker stops it does not restart, whatever the status
    assert [box.stop(name) for name in ("generators", "learner", "store")] == [ended, ended, 0]
    assert processes_of(run) == []
    # The kernel ends what bubblewrap has left behind.
    wait_until(lambda: not any(_session(pid) in sessions for pid in psutil.pids()))
    assert sorted((run / "checkpoints").glob("step-*"))


LOOK = """
import json, os, pathlib, sys
project, *secrets = json.load(sys.stdin)
paths = [path for top in (project, "/join") for path in [pathlib.Path(top), *pathlib.Path(top).rglob("*")]]
files = [path for path in paths if path.is_file()]
def writable(directory):
    try:
        (directory / "mine").touch()
        (directory / "mine").unlink()
        return True
    except OSError:
        return False
processes = [path for path in pathlib.Path("/proc").iterdir() if path.name.isdecimal()]
environments = [path / "environ" for path in processes]
print(json.dumps({
    "files": sorted(map(str, files)),
    "leaks": [str(path) for path in files + environments if any(secret.encode() in path.read_bytes() for secret in secrets)],
    "writable": sorted(str(path) for path in paths if path.is_dir() and writable(path)),
    "processes": len(processes),
}))
"""


def check_what_generators_see(box: Box, run: Path) -> None:
    """While the run is up: only the user's project and join.key, and no other container's process."""
    runs, learner = box.project / "runs", box.services["learner"]["environment"]
    secrets_of_others = [(run / "run.key").read_text().strip(), learner["ASYNCRL_STORE_PASSWORD"]]
    argv = [*box.container("generators"), sys.executable, "-c", LOOK]
    told = json.dumps([str(box.project), *secrets_of_others])
    done = subprocess.run(
        argv, input=told, env=box.environment("generators"), capture_output=True, text=True, check=True
    )
    seen = json.loads(done.stdout)
    own = {path for path in seen["files"] if Path(path).is_relative_to(runs)}
    given = {str(path) for path in box.project.rglob("*") if path.is_file() and not path.is_relative_to(runs)}
    assert {*seen["files"]} - own == given | {"/join/join.key"}
    assert own and all((runs / "generators" / Path(path).relative_to(runs)).exists() for path in own)
    assert seen["writable"] and all(Path(path).is_relative_to(runs) for path in seen["writable"])
    assert (seen["leaks"], seen["processes"]) == ([], 2), "bubblewrap and this"


def _session(pid: int) -> int | None:
    """Of a process that lives."""
    try:
        return None if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE else os.getsid(pid)
    except (OSError, psutil.NoSuchProcess):
        return None  # gone
