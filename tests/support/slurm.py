"""A Slurm of this machine: a controller and three nodes, each in a network of its own."""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from asyncrl.cluster.local import Network, obstacle
from tests.support.command import ASYNCRL
from tests.support.waiting import wait_until

NODES = ("n1", "n2", "n3")
CONF = """
ClusterName=test
SlurmctldHost={host}({gateway})
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
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
SlurmdTimeout=10
KillWait=30
JobRequeue=1
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
# A node that is not up, with what no other one has: Slurm refuses a job that no node of it could ever run.
DOWN = "NodeName=n4 NodeHostname=none NodeAddr=10.77.1.1 CPUs=1 Gres=gpu:64 State=DOWN\n"
COMMANDS = ("sbatch", "scancel", "scontrol", "squeue", "srun")


def missing() -> str:
    """Say why there can be no Slurm here; empty if there can."""
    if shutil.which("slurmctld") is None or shutil.which("slurmd") is None:
        return "no slurmctld and slurmd here (apt-get install slurm-wlm)"
    return obstacle()


@dataclass(frozen=True)
class Slurm:
    """What a test asks it, from the switch's network: there is its controller, and the user logs in there."""

    at: Path
    network: Network
    daemons: dict[str, "subprocess.Popen[bytes]"]

    @property
    def env(self) -> dict[str, str]:
        return os.environ | {"SLURM_CONF": str(self.at / "slurm.conf")}

    def begin(self, name: str, *words: str) -> None:
        """Start a daemon."""
        where = self.network.switch if name == "controller" else self.network.host(name)
        with (self.at / f"{name}.out").open("ab") as out:
            self.daemons[name] = subprocess.Popen(where.command(*words), env=self.env, stdout=out, stderr=out)

    def node(self, name: str) -> None:
        """Start a node, which may have lost its power before. It has a directory that no other one sees."""
        daemon = f"mount -t tmpfs none {self.at}/{name} && exec slurmd -D -N {name}"
        self.begin(name, shutil.which("unshare") or "unshare", "--mount", "sh", "-c", daemon)

    def power_off(self, name: str) -> None:
        """End all processes of a node."""
        self.network.hosts[name].kill()
        self.daemons[name].wait(30)

    def run(self, *words: str, status: int = 0) -> str:
        """Return what a command prints on the host where users log in, also as an error."""
        done = subprocess.run(
            self.network.switch.command(*words), env=self.env, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == status, f"{words}: {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def asyncrl(self, *words: str, status: int = 0) -> str:
        """Return what asyncrl prints there. It sees no process of the nodes: they are other machines."""
        alone = ("unshare", "--pid", "--fork", "--mount-proc")
        return self.run(*alone, *ASYNCRL, *words, status=status)

    @contextlib.contextmanager
    def inside(self, *nodes: str) -> Iterator[str]:
        """Let this process command Slurm as one of a job that has these nodes; yield the job's id.

        It does so from the first node, which is none of these: our name, at which a controller reaches `srun`,
        is that of this node.
        """
        scripts = self.at / "bin"
        scripts.mkdir()
        for name in COMMANDS:
            command = self.network.host(NODES[0]).command(shutil.which(name) or name)
            (scripts / name).write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
            (scripts / name).chmod(0o755)
        where = (f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}")
        said = self.run("salloc", "--no-shell", "--exclusive", "--no-kill", *where)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATH", str(scripts), prepend=os.pathsep)
            patch.setenv("SLURM_CONF", self.env["SLURM_CONF"])
            patch.setenv("SLURM_JOB_ID", said.split("Granted job allocation ")[1].split()[0])
            yield os.environ["SLURM_JOB_ID"]

    def jobs(self) -> dict[str, str]:
        """Return the states of all jobs, by name."""
        lines = self.run("squeue", "--noheader", "--format=%j %T").splitlines()
        return dict(line.split() for line in lines)


def on_node(slurm: Slurm, node: str, word: str) -> list[psutil.Process]:
    """The processes of a node that have a word in their command."""
    found = []
    for pid in slurm.network.hosts[node].processes():
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            process = psutil.Process(pid)
            if word in process.cmdline() and process.name() != "srun":
                found.append(process)
    return found


@contextlib.contextmanager
def three_nodes(at: Path, *, gpus: bool = False) -> Iterator[Slurm]:
    """Start it; at the end nothing of it is left. With `gpus` the first node has one, and there is `DOWN`."""
    (at / "state").mkdir()
    slurm = Slurm(at, Network(), {})
    host = os.uname().nodename.partition(".")[0]
    conf = CONF.format(host=host, gateway=slurm.network.gateway, at=at)
    for name in NODES:
        slurm.network.host(name)
        (at / name).mkdir()
        address = slurm.network.address(name)
        gres = " Gres=gpu:1" if gpus and name == NODES[0] else ""
        conf += f"NodeName={name} NodeHostname={host} NodeAddr={address} CPUs=1 State=UNKNOWN{gres}\n"
    if gpus:
        conf += f"GresTypes=gpu\n{DOWN}"
        (at / "gres.conf").write_text(f"NodeName={NODES[0]} Name=gpu File=/dev/null\n")
    (at / "slurm.conf").write_text(conf)
    (at / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    try:
        slurm.begin("controller", shutil.which("slurmctld") or "slurmctld", "-D")
        for name in NODES:
            slurm.node(name)
        wait_until(lambda: "idle 3" in slurm.run("sinfo", "--noheader", "--format=%T %D").splitlines(), 60)
        yield slurm
    finally:
        slurm.network.close()
        for daemon in slurm.daemons.values():
            daemon.send_signal(signal.SIGKILL)
            daemon.wait()
