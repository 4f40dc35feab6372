"""A Slurm of this machine: a controller and three nodes, each in a network of its own."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from asyncrl.cluster.network import Network, obstacle
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
PartitionName=all Nodes=n[1-3] Default=YES MaxTime=INFINITE State=UP
"""


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

    def jobs(self) -> dict[str, str]:
        """Return the states of all jobs, by name."""
        lines = self.run("squeue", "--noheader", "--format=%j %T").splitlines()
        return dict(line.split() for line in lines)


@contextmanager
def three_nodes(at: Path) -> Iterator[Slurm]:
    """Start it; at the end nothing of it is left."""
    (at / "state").mkdir()
    slurm = Slurm(at, Network(), {})
    host = os.uname().nodename.partition(".")[0]
    conf = CONF.format(host=host, gateway=slurm.network.gateway, at=at)
    for name in NODES:
        slurm.network.host(name)
        (at / name).mkdir()
        address = slurm.network.address(name)
        conf += f"NodeName={name} NodeHostname={host} NodeAddr={address} CPUs=1 State=UNKNOWN\n"
    (at / "slurm.conf").write_text(conf)
    (at / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    try:
        slurm.begin("controller", shutil.which("slurmctld") or "slurmctld", "-D")
        for name in NODES:
            slurm.node(name)
        wait_until(lambda: slurm.run("sinfo", "--noheader", "--format=%T %D").strip() == "idle 3", 60)
        yield slurm
    finally:
        slurm.network.close()
        for daemon in slurm.daemons.values():
            daemon.send_signal(signal.SIGKILL)
            daemon.wait()
