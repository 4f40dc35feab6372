"""A learner on two hosts, which are networks of this machine: the same steps, and an end for all at once."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import torch

from asyncrl.cluster.local import Namespace, Network, obstacle
from asyncrl.commands.down import processes_of
from tests.support.models import tiny_qwen2
from tests.support.ranks import forked_ranks
from tests.support.waiting import wait_until
from tests.support.whole_run import call, start, steps, tiny_run, wait

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(obstacle()), reason=f"makes networks: {obstacle()}"),
]
TIMEOUT_S = 10
OVERRIDES = [
    "cluster.kind=local",
    "cluster.learner_hosts=2",
    "learner.ranks=2",
    "learner.steps=100000",
    "generator.count=1",
    f"control.timeout_s={TIMEOUT_S}",
]
WAIT_S = 600.0


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_on_two_hosts_whose_docker0_comes_first_make_the_steps_of_ranks_on_one(
    tmp_path, monkeypatch, ranks
):
    begin = Namespace.begin

    def with_docker() -> Namespace:
        made = begin()
        made.ip("link", "add", "docker0", "type", "bridge")
        made.ip("address", "add", "172.17.0.1/16", "dev", "docker0")
        made.ip("link", "set", "docker0", "up")
        return made

    monkeypatch.setattr(Namespace, "begin", with_docker)
    model = tiny_qwen2(tmp_path / "model")
    scenarios = [
        {"run": "two_steps", "name": str(stage), "stage": stage, "budget": 60, "critic": True}
        for stage in (0, 2, 3)
    ]
    with closing(Network()) as network, forked_ranks() as learner:
        hosts = [network.host(name).file for name in ("learner-0", "learner-1")]
        networks = [host for host in hosts for _ in range(ranks // 2)]
        address = network.address("learner-0")
        here = learner.run(ranks, model, scenarios, tmp_path / "here")
        there = learner.run(ranks, model, scenarios, tmp_path / "there", networks=networks, address=address)
    for name, (expected, report) in here.items():
        found, other = there[name]
        assert found.keys() == expected.keys() and other["norms"] == pytest.approx(report["norms"], rel=1e-6)
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, atol=1e-6, rtol=0)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended, though nobody may have asked for their status yet."""
    return [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


class Run:
    """A run that is up, and the processes of its hosts."""

    def __init__(self, config: Path) -> None:
        self.config, self.directory = config, config.parent / "runs" / "whole"
        self.up = start(config, *OVERRIDES)

    def wait(self, condition) -> None:
        wait(condition, self.up, self.config, WAIT_S)

    def host(self, number: int) -> dict:
        """What the driver knows of a host of the learner."""
        return json.loads((self.directory / "hosts.json").read_text())[f"learner-{number}"]

    def rank(self, number: int) -> psutil.Process:
        """The process of a rank, each of which has a host of its own."""
        supervisor, name = [("supervisor", "learner"), ("supervisor-1", "ranks-1")][number]
        launcher = re.findall(rf'"{name} started as process (\d+)', self.log(supervisor))[-1]
        return psutil.Process(int(launcher)).children()[0]

    def cable(self, number: int, what: str) -> None:
        """Set the cable of a host `up` or `down`, at the switch."""
        holders = [child for child in psutil.Process(self.up.pid).children() if child.name() == "sleep"]
        switch = min(holders, key=lambda holder: holder.create_time())
        cable = int(self.host(number)["address"].rpartition(".")[2]) - 1
        command = ["nsenter", f"--net=/proc/{switch.pid}/ns/net", "ip", "link", "set", f"cable{cable}", what]
        subprocess.run(command, check=True)

    def log(self, name: str) -> str:
        return (self.directory / "logs" / f"{name}.jsonl").read_text()

    def goes_on_after(self, fault, seen: str) -> None:
        """Both hosts end the attempt within the limit, and a new one trains."""
        old = [self.rank(0), self.rank(1)]
        before = len(steps(self.directory))
        fault()
        wait_until(lambda: not alive(old), TIMEOUT_S + 20)
        self.wait(lambda: len(steps(self.directory)) >= before + 2)
        logs = ("driver", "supervisor", "learner", "ranks-1")
        assert any(seen in self.log(name) for name in logs), seen


@pytest.fixture
def run(tmp_path) -> Iterator[Run]:
    with tiny_run(tmp_path) as config:
        found = Run(config)
        try:
            yield found
        finally:
            found.up.kill()
            found.up.wait(60)


def test_a_cut_link_or_a_dead_host_hangs_nobody_until_a_watchdog_and_the_run_goes_on(run):
    directory = run.directory
    run.wait(lambda: len(steps(directory)) >= 3)
    run.goes_on_after(lambda: run.rank(1).kill(), "the ranks of learner-1 have ended (killed by SIGKILL)")
    before = [run.rank(0), run.rank(1)]
    run.cable(1, "down")
    until_s, done = time.monotonic() + TIMEOUT_S / 2, len(steps(directory))
    wait_until(lambda: time.monotonic() > until_s)
    run.cable(1, "up")
    run.wait(lambda: len(steps(directory)) >= done + 2)
    assert alive(before) == before, "a short interruption costs no attempt"
    run.cable(1, "down")
    wait_until(lambda: not alive(before), TIMEOUT_S + 20)
    assert "has been silent for" in run.log("learner") and "learner-0 has been silent" in run.log("ranks-1")
    done = len(steps(directory))
    run.cable(1, "up")
    run.wait(lambda: len(steps(directory)) >= done + 2)
    run.goes_on_after(
        lambda: os.kill(run.host(1)["pid"], signal.SIGKILL), "learner-1 died (killed by SIGKILL)"
    )
    run.goes_on_after(lambda: run.rank(0).kill(), "learner died (exit status 137)")
    run.goes_on_after(
        lambda: os.kill(run.host(0)["pid"], signal.SIGKILL), "learner-0 died (killed by SIGKILL)"
    )
    said = call("down", str(directory))
    assert "no process is left" in said and "is saved" in said
    assert not processes_of(directory)
    audit = json.loads(call("audit", str(directory)))
    assert audit["missing"] == 0
