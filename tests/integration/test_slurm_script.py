"""deploy/slurm.sh with a Slurm of three lines: what it starts where, and how it ends. The store is a stand-in, too."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from asyncrl.cli.app import app
from asyncrl.config.load import load_config

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
STAND_INS = {
    "scontrol": "#!/bin/sh\nprintf 'n1\\nn2\\nn3\\n'\n",
    "hostname": "#!/bin/sh\necho 10.0.0.1 192.168.0.1\n",
    "store": "#!/bin/sh\ncat > $LOGS/store.conf\nexec sleep 60\n",
    # srun: its own options, then the command.
    "srun": f"""#!{sys.executable}
import json, os, pathlib, sys, time, signal
command = [word for word in sys.argv[1:] if word.startswith("asyncrl")][0]
at = sys.argv.index(command)
logs = pathlib.Path(os.environ["LOGS"])
role = sys.argv[at + 1]
known = "ASYNCRL_STORE_PASSWORD" in os.environ
with (logs / f"{{role}}.jsonl").open("a") as file:
    file.write(json.dumps([sys.argv[1:at], sys.argv[at:], known]) + "\\n")
if role == "learner":
    signal.signal(signal.SIGTERM, lambda *_: ((logs / "saved").touch(), sys.exit(0)))
    while not (logs / "over").exists():
        time.sleep(0.02)
    sys.exit(int((logs / "over").read_text()))
if len((logs / "generator.jsonl").read_text().splitlines()) < 3:
    sys.exit(2)  # no run yet
while not ((logs / "over").exists() or (logs / "saved").exists()):
    time.sleep(0.02)
""",
}


@pytest.fixture
def job(tmp_path):
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o700)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "LOGS": str(tmp_path),
        "STORE_SERVER": str(tmp_path / "store"),
        "SLURM_JOB_NODELIST": "n[1-3]",
        "RETRY_S": "0.05",
    }
    argv = ["bash", str(ROOT / "deploy" / "slurm.sh"), "configs/gsm8k-qwen2.5-0.5b-8gpu.yaml", "learner.steps=7"]
    process = subprocess.Popen(argv, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()


def started(tmp_path: Path, role: str) -> list:
    path = tmp_path / f"{role}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait(condition) -> None:
    until_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.02)


def test_who_runs_where_and_that_all_find_the_store(job, tmp_path):
    wait(lambda: len(started(tmp_path, "generator")) == 3)
    [(where, learner, knows)] = started(tmp_path, "learner")
    assert "--nodelist=n1" in where and "--nodes=1" in where and knows
    where, generator, knows = started(tmp_path, "generator")[-1]
    assert {"--nodelist=n2,n3", "--nodes=2", "--ntasks-per-node=1"} <= {*where} and knows
    group = typer.main.get_command(app)
    for command in (learner, generator):
        group.commands[command[1]].make_context(command[1], command[2:])
    config = load_config(tmp_path / learner[3], learner[4:])
    assert config.learner.steps == 7
    assert config.store.url == generator[-1] == "redis://10.0.0.1:16379/0"
    assert config.control.bind == "tcp://10.0.0.1:16380"
    settings = dict(line.split(" ", 1) for line in (tmp_path / "store.conf").read_text().splitlines())
    assert settings["bind"] == "127.0.0.1 10.0.0.1" and settings["port"] == "16379"
    assert re.fullmatch(r"[0-9a-f]{64}", settings["requirepass"])
    assert settings["requirepass"] not in str([learner, generator])
    (tmp_path / "over").write_text("0")
    assert job.wait(timeout=60) == 0


def test_the_learners_status_is_the_jobs(job, tmp_path):
    wait(lambda: started(tmp_path, "learner"))
    (tmp_path / "over").write_text("3")
    assert job.wait(timeout=60) == 3


def test_before_the_time_limit_the_learner_saves(job, tmp_path):
    wait(lambda: len(started(tmp_path, "generator")) == 3)
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=60) == 0
    assert (tmp_path / "saved").exists()


def test_one_node_is_told_what_to_do(tmp_path):
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho n1\n")
    (tmp_path / "scontrol").chmod(0o700)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n1"}
    done = subprocess.run(
        ["bash", str(ROOT / "deploy" / "slurm.sh"), "task.yaml"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1 and "asyncrl up --config task.yaml" in done.stderr
