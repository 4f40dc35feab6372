"""deploy/compose.yaml by podman-compose and runc, its services as containers.

An image has the lines of its Dockerfile that say how it starts; its file system is this machine's, read-only.
GPUs and limits that this machine does not give are left out.
"""

import json
import os
import re
import resource
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from asyncrl.buffer.server import find_server
from tests.support.command import ASYNCRL
from tests.support.compose import DEPLOY, env_file
from tests.support.libraries import ROOT, python_with
from tests.support.models import tiny_qwen2
from tests.support.ports import free_ports
from tests.support.waiting import wait_until
from tests.support.whole_run import steps

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not (shutil.which("podman") and shutil.which("runc")),
        reason="needs containers: apt-get install podman runc catatonit",
    ),
]

SERVICES = ("store", "learner", "generators")
SYSTEM = [*dict.fromkeys(["/usr", "/bin", "/sbin", "/lib", "/lib64", sys.base_prefix, sys.prefix, str(ROOT)])]
LIMITS = {
    "nofile": resource.RLIMIT_NOFILE,
    "nproc": resource.RLIMIT_NPROC,
    "memlock": resource.RLIMIT_MEMLOCK,
}
MOST = 1 << 14  # where the machine knows no limit; podman itself runs with a lower one of processes than we

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
        "generator": {"engine": "transformers", "threads": 1, "max_running": 16},
        "checkpoint": {"every": 2},
    }
    (project / "task.yaml").write_text(yaml.safe_dump(config))
    for directory in ("prometheus", "join", "generators/prometheus"):
        (project / "runs" / directory).mkdir(parents=True)
    return project


def container(name: str) -> str:
    return f"asyncrl_{name}_1"


class Box:
    """The containers of a Compose file, with a storage of their own."""

    def __init__(self, project: Path, variables: dict[str, str], compose: Path) -> None:
        self.project = project
        self._compose, self._aside = compose, project.parent
        # More than a hard limit nobody can give without the right to change it.
        hard = {name: min(MOST, resource.getrlimit(number)[1] % (1 << 63)) for name, number in LIMITS.items()}
        limits = [f"{name}={limit}:{limit}" for name, limit in hard.items()]
        containers, storage = self._aside / "containers.conf", self._aside / "storage.conf"
        containers.write_text(
            f"[containers]\ndefault_ulimits = {json.dumps(limits)}\n"
            f"volumes = {json.dumps([f'{path}:{path}:ro' for path in SYSTEM])}\n"
            "[engine]\nruntime = 'runc'\ncgroup_manager = 'cgroupfs'\nevents_logger = 'file'\n"
        )
        storage.write_text(
            f"[storage]\ndriver = 'vfs'\ngraphroot = '{self._aside}/storage'\nrunroot = '{self._aside}/run'\n"
        )
        own = {"CONTAINERS_CONF": str(containers), "CONTAINERS_STORAGE_CONF": str(storage)}
        self._environment = os.environ | own
        file = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
        self.services = {name: file["services"][name] for name in SERVICES}
        for service in self.services.values():
            service["deploy"]["resources"].pop("reservations", None)
            service.pop("ulimits", None)
        self.services["store"]["user"] = self.services["learner"]["user"]
        (self._aside / "compose.yaml").write_text(yaml.safe_dump({**file, "services": self.services}))
        (self._aside / ".env").write_text("".join(f"{name}={text}\n" for name, text in variables.items()))

    def podman(self, *words: str, check: bool = True, told: str = "") -> subprocess.CompletedProcess[str]:
        return self._call("podman", *words, check=check, told=told)

    def compose(self, *words: str) -> None:
        self._call(str(self._compose), "--profile", "split", *words)

    def _call(self, *argv: str, check: bool = True, told: str = "") -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            argv,
            cwd=self._aside,
            env=self._environment,
            input=told,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0 or not check, f"{argv}: {done.stdout[-1000:]}\n{done.stderr[-3000:]}"
        return done

    def build(self) -> None:
        """Both images. They begin with nothing, and see this machine's programs."""
        image = self._aside / "image"
        (image / "tools").mkdir(parents=True)
        (image / "cache").mkdir()
        (image / "cache").chmod(0o1777)
        server = f'#!/bin/sh\nexec {find_server("bundled")} "$@"\n'
        for name, text in {"valkey-server": server, "valkey-cli": CLIENT}.items():
            (image / "tools" / name).write_text(text)
            (image / "tools" / name).chmod(0o755)
        lines = (DEPLOY / "Dockerfile").read_text()
        own = [
            re.search(rf"^{first}(?:.*\\\n)*.*\n", lines, re.MULTILINE)[0] for first in ("ENV HOME", "HEALTH")
        ]
        path = f"ENV PATH=/tools:{Path(sys.executable).parent}:/usr/bin:/bin PYTHONPATH={ROOT}\n"
        files = {
            self.services["learner"]["image"]: [
                "COPY cache /cache\nCOPY cache /tmp\n",
                *own,
                f"ENTRYPOINT {json.dumps(ASYNCRL)}\n",
            ],
            self.services["store"]["image"]: ["COPY tools /tools\n"],
        }
        for name, said in files.items():
            (image / "Dockerfile").write_text("".join(["FROM scratch\n", path, *said]))
            self.podman("build", "--format", "docker", "-q", "-t", name, str(image))

    def start(self, name: str) -> None:
        """What it depends on is healthy before: without systemd podman looks at nobody's health by itself."""
        for needed in self.services[name].get("depends_on", {}):
            self.wait(lambda needed=needed: self.is_healthy(needed))
        self.compose("up", "--detach", "--no-deps", name)

    def is_healthy(self, name: str) -> bool:
        return self.podman("healthcheck", "run", container(name), check=False).returncode == 0

    def wait(self, condition: Callable[[], object], wait_s: float = 400.0) -> None:
        def said() -> str:
            found = [self.podman("logs", "--tail", "30", container(name), check=False) for name in SERVICES]
            return "\n".join(f"{done.args[-1]}:\n{done.stdout}{done.stderr}" for done in found)

        wait_until(condition, wait_s, said)

    def stop(self, name: str) -> int:
        self.compose("stop", name)
        return int(self.podman("inspect", "--format", "{{.State.ExitCode}}", container(name)).stdout)


@pytest.fixture
def box(project: Path, tmp_path: Path) -> Iterator[Box]:
    variables = env_file() | {
        "ASYNCRL_PROJECT": str(project),
        "ASYNCRL_CONFIG": "task.yaml",
        "GENERATORS_ALLOW": "--allow=task.py",
        "ASYNCRL_STORE_PASSWORD": secrets.token_hex(32),
        "ASYNCRL_GENERATOR_PASSWORD": secrets.token_hex(32),
        "ASYNCRL_UID": str(os.getuid()),
        "ASYNCRL_GID": str(os.getgid()),
        **dict(zip(("STORE_PORT", "CONTROL_PORT", "METRICS_PORT"), map(str, free_ports(3)), strict=True)),
        "GRAFANA_PASSWORD": "unused",
        "GENERATORS": "2",
    }
    python = python_with(tmp_path / "tools", ["podman-compose>=1.6,<2"], ["podman_compose"])
    box = Box(project, variables, python.parent / "podman-compose")
    box.build()
    image = box.services["store"]["image"]
    tried = box.podman("run", "--rm", "--init", "--network=host", image, "true", check=False)
    if tried.returncode:
        pytest.skip(f"this machine runs no container: {tried.stderr[-500:]}")
    try:
        yield box
    finally:
        box.compose("down", "--volumes")


def test_the_services_train_together_and_leave_nothing(box: Box) -> None:
    run = box.project / "runs" / "composed"

    def members() -> int:
        path = run / "status.json"
        return len(json.loads(path.read_text())["members"]) if path.exists() else 0

    for name in ("store", "learner", "generators"):
        box.start(name)
    box.wait(lambda: len(steps(run)) >= 4 and members() == 2)
    assert box.is_healthy("generators")
    check_what_generators_see(box, run)

    audit = [*ASYNCRL, "audit", "runs/composed"]
    assert json.loads(box.podman("exec", container("learner"), *audit).stdout)["missing"] == 0
    without = ("--env", "ASYNCRL_STORE_PASSWORD=", container("learner"))
    refused = box.podman("exec", *without, *audit, check=False)
    assert refused.returncode == 2 and refused.stderr.startswith("StoreRefused"), (
        "the store answers who knows its password"
    )
    targets = [
        len(list(box.project.glob(f"{place}/prometheus/*.json"))) for place in ("runs", "runs/generators")
    ]
    assert targets == [1, 2], "where Prometheus looks"

    ended = 128 + signal.SIGTERM  # what Docker stops it does not restart, whatever the status
    assert [box.stop(name) for name in ("generators", "learner", "store")] == [ended, ended, 0]
    assert box.podman("ps", "--quiet").stdout == ""
    assert sorted((run / "checkpoints").glob("step-*"))


LOOK = """
import json, os, pathlib, sys
image, *secrets = json.load(sys.stdin)
paths = []
for top, directories, names in (found for top in ("/work", "/join") for found in os.walk(top)):
    directories[:] = [name for name in directories if os.path.join(top, name) not in image]
    paths += [pathlib.Path(top), *(pathlib.Path(top, name) for name in names)]
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
    "processes": [(path / "cmdline").read_text() for path in processes],
}))
"""


def check_what_generators_see(box: Box, run: Path) -> None:
    """While the run is up: only the user's project and join.key, and no other container's process."""
    store = box.podman("exec", container("learner"), "printenv", "ASYNCRL_STORE_PASSWORD").stdout.strip()
    told = json.dumps([SYSTEM, (run / "run.key").read_text().strip(), store])
    look = ("exec", "--interactive", container("generators"), sys.executable, "-c", LOOK)
    seen = json.loads(box.podman(*look, told=told).stdout)
    own = {path for path in seen["files"] if path.startswith("/work/runs/")}
    project, runs = box.project, box.project / "runs"
    files = [path for path in project.rglob("*") if path.is_file() and not path.is_relative_to(runs)]
    assert {*seen["files"]} - own == {f"/work/{path.relative_to(project)}" for path in files} | {
        "/join/join.key"
    }
    assert own and all((runs / "generators" / Path(path).relative_to("/work/runs")).exists() for path in own)
    assert seen["writable"] and all(path.startswith("/work/runs") for path in seen["writable"])
    assert seen["leaks"] == [] and not any("learner" in line for line in seen["processes"])
