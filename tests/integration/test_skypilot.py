"""SkyPilot gives every node one command: two networks of this machine stand in for two nodes."""

import os
import signal
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from asyncrl.cluster.local import Network, obstacle
from asyncrl.cluster.plans import node_plan, nodes_in
from asyncrl.config.schema import Config
from asyncrl.errors import RunError
from tests.support.command import ASYNCRL
from tests.support.waiting import wait_until
from tests.support.whole_run import call, rows, steps, tiny_run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
SECRET = "5e" * 32


@pytest.mark.skipif(bool(obstacle()), reason=f"makes networks: {obstacle()}")
def test_nodes_with_one_command_and_one_secret_train_together(tmp_path):
    with tiny_run(tmp_path) as config, closing(Network()) as network:
        hosts = [network.host(name) for name in ("a", "b")]
        nodes, running = "\n".join(map(network.address, ("a", "b"))), []
        # Nodes share no files.
        roots = [tmp_path / "runs", tmp_path / "elsewhere"]
        for number, (host, root) in enumerate(zip(hosts, roots, strict=True)):
            words = ["up", "--plain", "--config", str(config), "cluster.kind=local", f"run.root={root}"]
            with (tmp_path / f"{number}.out").open("wb") as output:
                process = subprocess.Popen(
                    host.command(*ASYNCRL, *words, "generator.count=1", "learner.steps=10000"),
                    env=os.environ
                    | {
                        "SKYPILOT_NODE_IPS": nodes,
                        "SKYPILOT_NODE_RANK": str(number),
                        "ASYNCRL_SECRET": SECRET,
                    },
                    stdout=output,
                    stderr=output,
                )
            running.append(process)

        def said() -> str:
            return "\n".join((tmp_path / f"{number}.out").read_text()[-3000:] for number in range(2))

        def has_trained_and_heard() -> bool:
            assert not any(process.poll() for process in running), said()
            return len(steps(roots[0] / "whole")) >= 3 and bool(rows(roots[0] / "whole", "generators-0.g0"))

        # A run of few steps may end before the learner hears of a generator.
        wait_until(has_trained_and_heard, 500.0, said)
        call("down", str(roots[0] / "whole"))
        assert [process.wait(timeout=500) for process in running] == [128 + signal.SIGTERM, 0], said()
    assert (roots[0] / "whole/run.key").read_text() == SECRET
    there, here = (rows(root / "whole", "generators-0.g0") for root in reversed(roots))
    assert there and "alive_s" in here[0], "the learner keeps what it hears"
    assert "the run is over" in call("logs", str(roots[1] / "whole"), "generators-0.g0"), (
        "which shares no directory"
    )
    assert not [path for path in roots[1].rglob("*") if path.is_file() and SECRET in path.read_text()]
    assert SECRET not in said()


def test_what_nodes_cannot_do_and_a_secret_that_is_not_there_are_named():
    values = {"run": {"name": "a"}, "model": {"path": "m"}, "data": {"train": "t"}}
    values |= {"reward": {"functions": [{"function": "exact_match"}]}, "generator": {"count": 1}}

    def config(**cluster) -> Config:
        return Config.model_validate(
            values | {"learner": {"ranks": 2}, "cluster": {"kind": "local", **cluster}}
        )

    one = {"SKYPILOT_NODE_IPS": "10.0.0.1", "SKYPILOT_NODE_RANK": "0", "ASYNCRL_SECRET": SECRET}
    assert not nodes_in({}) and not nodes_in(one), "one node alone is a machine"
    two = one | {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    assert nodes_in(two) == ["10.0.0.1", "10.0.0.2"]
    with pytest.raises(RunError, match=r"learner_hosts is 2, but under SkyPilot"):
        node_plan(config(learner_hosts=2), Path("f"), two)
    with pytest.raises(RunError, match=r"--secret ASYNCRL_SECRET=\$\(openssl rand -hex 32\)"):
        node_plan(config(), Path("f"), two | {"ASYNCRL_SECRET": ""})
    argv = node_plan(config(), Path("f"), two | {"SKYPILOT_NODE_RANK": "1"}).argv
    assert "redis://generator@10.0.0.1:16379/0" in argv
