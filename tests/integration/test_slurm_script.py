"""deploy/slurm.sh under a stand-in for Slurm, and under a real one of three nodes if it is installed."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from asyncrl.cli.app import app
from asyncrl.config.load import load_config
from tests.support.ports import free_ports
from tests.support.waiting import still, wait_until

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy" / "slurm.sh"
JOB_S = 90
STAND_INS = {
    "scontrol": "#!/bin/sh\nprintf 'n1\\nn2\\nn3\\n'\n",
    "hostname": "#!/bin/sh\necho 10.0.0.1 192.168.0.1\n",
    # Its own options, then the command. The real one sends the task's processes a TERM at the time limit.
    "srun": f"""#!{sys.executable}
import json, os, sys
at = sys.argv.index("asyncrl")
os.environ["SRUN"] = json.dumps(sys.argv[1:at])
os.execvp("asyncrl", sys.argv[at:])
""",
}
ASYNCRL = f"""#!{sys.executable}
import json, os, pathlib, signal, sys, threading
logs, role = pathlib.Path(os.environ["LOGS"]), sys.argv[1]
seen = {{name: os.environ.get(name) for name in ("SLURMD_NODENAME", "ASYNCRL_SECRET_FILE", "ASYNCRL_SECRET", "SRUN")}}
with (logs / f"{{role}}.jsonl").open("a") as file:
    file.write(json.dumps([os.getpid(), sys.argv[1:], seen]) + "\\n")
def over():
    over = logs / "over"  # it exists before it is written
    return (over.exists() and over.stat().st_size) or (logs / "saved").exists()
if role == "learner":
    key = pathlib.Path(sys.argv[sys.argv.index("--join-key") + 1])
    key.write_text("join.key")
    def save(*_):
        threading.Event().wait(1)  # a checkpoint takes its time
        (logs / "saved").touch()
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    while not over():
        threading.Event().wait(0.05)
    sys.exit(int((logs / "over").read_text()))
if (logs / "fail").exists():
    (logs / "fail").unlink()
    sys.exit(2)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
while not over():
    threading.Event().wait(0.05)
"""
OPTIONS = ["configs/gsm8k-qwen2.5-0.5b-8gpu.yaml", "learner.steps=7"]


def install(directory: Path, programs: dict[str, str]) -> dict[str, str]:
    """On PATH before all others; the environment of a job."""
    for name, text in {**programs, "asyncrl": ASYNCRL}.items():
        (directory / name).write_text(text)
        (directory / name).chmod(0o700)
    (directory / "configs").symlink_to(ROOT / "configs")
    return os.environ | {
        "PATH": f"{directory}:{os.environ['PATH']}",
        "LOGS": str(directory),
        "RETRY_S": "0.05",
    }


def started(directory: Path, role: str) -> list:
    path = directory / f"{role}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def job(tmp_path):
    environment = install(tmp_path, STAND_INS) | {"SLURM_JOB_NODELIST": "n[1-3]"}
    (tmp_path / "fail").touch()
    process = subprocess.Popen(
        ["bash", str(SCRIPT), *OPTIONS], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    process.wait()


def test_who_runs_where_with_which_secrets_and_that_all_find_the_store(job, tmp_path):
    wait_until(lambda: len(started(tmp_path, "generator")) == 2)  # the first has failed, and is started again
    [(_, learner, of_learner)] = started(tmp_path, "learner")
    _, generator, of_generator = started(tmp_path, "generator")[-1]
    assert {"--nodelist=n1", "--nodes=1", "--ntasks=1"} <= {*json.loads(of_learner["SRUN"])}
    assert {"--nodelist=n2,n3", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1"} <= {
        *json.loads(of_generator["SRUN"])
    }
    group = typer.main.get_command(app)
    for command in (learner, generator):
        group.commands[command[0]].make_context(command[0], command[1:])
    config = load_config(tmp_path / learner[2], [word for word in learner if re.match(r"[\w.]+=", word)])
    assert config.learner.steps == 7
    assert config.store.url is None, "the run's own, with a user for the learner and one for the generators"
    assert (
        generator[generator.index("--store") + 1]
        == config.store.bind.replace("tcp://", "redis://generator@") + "/0"
    )
    assert (config.store.bind, config.control.bind) == ("tcp://10.0.0.1:16379", "tcp://10.0.0.1:16380")
    key = Path(learner[learner.index("--join-key") + 1])
    assert of_generator["ASYNCRL_SECRET_FILE"] == str(key) and key.parent.stat().st_mode & 0o077 == 0
    assert of_generator["ASYNCRL_SECRET"] is of_learner["ASYNCRL_SECRET_FILE"] is None
    assert not re.search(r"(?i)password|requirepass|run\.key", SCRIPT.read_text())
    (tmp_path / "over").write_text("0")
    assert job.wait(timeout=JOB_S) == 0
    assert not key.parent.exists()


def test_the_learners_status_is_the_jobs(job, tmp_path):
    wait_until(lambda: started(tmp_path, "learner"))
    (tmp_path / "over").write_text("3")
    assert job.wait(timeout=JOB_S) == 3


def test_one_node_is_told_what_to_do(tmp_path):
    environment = install(tmp_path, {"scontrol": "#!/bin/sh\necho n1\n"}) | {"SLURM_JOB_NODELIST": "n1"}
    done = subprocess.run(
        ["bash", SCRIPT, "task.yaml"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1 and "asyncrl up --config task.yaml" in done.stderr


SLURM_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/none
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={at}/state
SlurmdSpoolDir={at}/spool-%n
SlurmctldPidFile={at}/ctld.pid
SlurmdPidFile={at}/%n.pid
SlurmctldLogFile={at}/ctld.log
SlurmdLogFile={at}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
PartitionName=all Nodes=n[1-3] Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A controller and three nodes, all on this machine. What asks it needs SLURM_CONF."""
    if os.geteuid() != 0 or shutil.which("slurmctld") is None or shutil.which("slurmd") is None:
        pytest.skip("no slurmctld and slurmd here, or not root (apt-get install slurm-wlm)")
    at, ports = tmp_path_factory.mktemp("slurm"), free_ports(4)
    (at / "state").mkdir()
    host = socket.gethostname().partition(".")[0]
    nodes = [
        f"NodeName=n{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[i]} CPUs=1 State=UNKNOWN\n"
        for i in (1, 2, 3)
    ]
    (at / "slurm.conf").write_text(
        SLURM_CONF.format(host=host, user="root", at=at, ports=ports) + "".join(nodes)
    )
    (at / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    environment = os.environ | {"SLURM_CONF": str(at / "slurm.conf")}
    lines = [["slurmctld", "-D"], *(["slurmd", "-D", "-N", f"n{i}"] for i in (1, 2, 3))]
    with (at / "out").open("wb") as out:
        daemons = [subprocess.Popen(line, env=environment, stdout=out, stderr=out) for line in lines]
        try:
            ask = ["sinfo", "--noheader", "--format=%T %D"]
            wait_until(
                lambda: (
                    subprocess.run(ask, env=environment, capture_output=True, text=True).stdout.strip()
                    == "idle 3"
                ),
                60,
            )
            yield environment
        finally:
            subprocess.run(["scancel", "--user=root"], env=environment, check=False)
            for daemon in reversed(daemons):
                daemon.send_signal(signal.SIGTERM)
            for daemon in daemons:
                try:
                    daemon.wait(120)
                except subprocess.TimeoutExpired:
                    daemon.kill()


def state_of(job: str, environment) -> dict[str, str]:
    told = subprocess.run(
        ["scontrol", "show", "job", job], env=environment, capture_output=True, text=True, check=True
    ).stdout
    return dict(word.split("=", 1) for word in told.split() if "=" in word)


def test_a_real_slurm_starts_one_generator_command_a_node_and_the_learner_saves_before_the_time_limit(
    slurm, tmp_path
):
    """The limit is as long as the warning before it, so the script's own #SBATCH line sends TERM at once."""
    store, control = free_ports(2)
    environment = install(tmp_path, {}) | {"SLURM_CONF": slurm["SLURM_CONF"], "ASYNCRL_ADDRESS": "127.0.0.1"}
    environment |= {"STORE_PORT": str(store), "CONTROL_PORT": str(control)}
    minutes = int(re.search(r"^#SBATCH --signal=TERM@(\d+)$", SCRIPT.read_text(), re.MULTILINE)[1]) // 60
    options = [
        "--parsable",
        "--nodes=3",
        f"--time={minutes}",
        "--gpus-per-node=0",
        "--no-requeue",
        f"--output={tmp_path}/job.out",
    ]
    job = subprocess.run(
        ["sbatch", *options, str(SCRIPT), *OPTIONS],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    wait_until(lambda: len(started(tmp_path, "generator")) >= 2)
    still(lambda: len(started(tmp_path, "generator")) == 2, 1.0)  # not one too many
    first = [seen["SLURMD_NODENAME"] for _, _, seen in started(tmp_path, "generator")]
    assert sorted(first) == ["n2", "n3"], "one command on each of the other nodes"
    wait_until(lambda: (tmp_path / "saved").exists(), 2 * JOB_S)
    wait_until(
        lambda: state_of(job, environment)["JobState"] in ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED")
    )
    assert state_of(job, environment)["JobState"] == "COMPLETED", (tmp_path / "job.out").read_text()
    assert state_of(job, environment)["ExitCode"] == "0:0"
    [(_, _, of_learner)] = started(tmp_path, "learner")
    assert of_learner["SLURMD_NODENAME"] == "n1"
    assert "forcing job termination" not in (tmp_path / "job.out").read_text()
