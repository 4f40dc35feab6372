"""`auto` is the address at which the other hosts reach this one, on a host whose first network is docker0."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.config.schema import Config
from asyncrl.hosting.route import PEERS_VARIABLE

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("ip"),
        reason="makes a network of its own: needs root and ip (apt-get install iproute2)",
    ),
]
LINKS = """
ip link add docker0 type veth peer name container; ip address add 172.17.0.1/16 dev docker0
ip link add lan type veth peer name lan2; ip address add 10.0.0.1/24 dev lan; ip -6 address add fd00::1/64 dev lan nodad
ip link add wan type veth peer name wan2; ip address add 192.168.0.1/24 dev wan
for link in lo docker0 container lan lan2 wan wan2; do ip link set $link up; done
"""
DEFAULT = "ip route add default dev lan\n"
METRICS = """
import json, sys
from contextlib import closing
from pathlib import Path
from asyncrl.config.schema import Config
from asyncrl.errors import RunError
from asyncrl.telemetry.exporter import Exporter
config, file = Config.model_validate_json(sys.argv[1]), Path("target.json")
for process in ("b.g1", "learner"):
    try:
        with closing(Exporter(config, 9400, process, file)):
            print(*json.loads(file.read_text())[0]["targets"])
    except RunError as error:
        print(error)
"""
CODE = """
import os, sys
from asyncrl.config.schema import Config
from asyncrl.errors import RunError
from asyncrl.hosting.route import peers_in, with_addresses
config = Config.model_validate_json(sys.argv[1])
try:
    found = with_addresses(config, peers_in(os.environ))
    print(found.store.bind, found.control.bind)
except RunError as error:
    print(error)
"""


def config(**sections: dict) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "far"},
            "model": {"path": "none"},
            "data": {"train": "none.jsonl"},
            "reward": {"functions": [{"function": "exact_match"}]},
            **sections,
        }
    )


def printed(code: str, config: Config, *, peers: str = "", routes: str = "") -> str:
    """What code prints in the network, which has the config as its argument."""
    done = subprocess.run(
        [
            *("unshare", "--net", "sh", "-ec", f'{LINKS}{routes}exec "$@"', "sh"),
            *(sys.executable, "-c", code, config.model_dump_json()),
        ],
        env=os.environ | {PEERS_VARIABLE: peers},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.strip()


def found(store: str | None, control: str | None, *, peers: str, routes: str = "") -> str:
    return printed(CODE, config(store={"bind": store}, control={"bind": control}), peers=peers, routes=routes)


def test_metrics_of_generators_are_on_their_hosts_interface_towards_that_of_the_learner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address of the learner is not one of this host, which is a generator's."""
    monkeypatch.chdir(tmp_path)
    for host, ours in (("10.0.0.2", "10.0.0.1"), ("10.0.0.1", "10.0.0.1"), ("fd00::2", "[fd00::1]")):
        said = printed(METRICS, config(telemetry={"prometheus_host": host})).splitlines()
        assert said[0] == f"{ours}:9402"
        assert said[1].startswith(
            "10.0.0.1:9400" if host == "10.0.0.1" else f"telemetry.prometheus_host is {host}"
        )


def test_auto_is_the_address_of_the_route_to_the_others_though_docker0_comes_first():
    both = "tcp://10.0.0.1:16379 tcp://10.0.0.1:16380"
    assert found("auto", "auto", peers="10.0.0.7 10.0.0.8") == both
    assert (
        found("auto", "tcp://auto:7000", peers="192.168.0.9")
        == "tcp://192.168.0.1:16379 tcp://192.168.0.1:7000"
    )
    assert found(None, "auto", peers="fd00::9") == "None tcp://[fd00::1]:16380"
    assert found("auto", "auto", peers="", routes=DEFAULT) == both, "without names it is the default route"
    as_written = "tcp://172.17.0.1:1 None"
    assert found("tcp://172.17.0.1:1", None, peers="") == as_written, (
        "what the user names stays, and needs no route"
    )


def test_where_no_single_address_reaches_the_others_the_message_says_what_to_write():
    for peers, said in {
        "": "this host has no default route",
        "10.9.9.9": "there is no route to 10.9.9.9 (Network is unreachable)",
        "10.0.0.7 192.168.0.9": "reaches 10.0.0.7 from 10.0.0.1, 192.168.0.9 from 192.168.0.1",
    }.items():
        text = found("auto", None, peers=peers)
        assert said in text and "store.bind is auto" in text and "store.bind=tcp://HOST:PORT" in text
