"""Where the ranks of a learner meet, nobody on another host can look in."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist

from asyncrl.errors import RunError
from asyncrl.trainer import collectives
from asyncrl.trainer.collectives import Ranks, Rendezvous, _keep_to_interface, _store
from tests.support.ports import free_ports

pytestmark = pytest.mark.integration


def listening(port=None):
    found = [
        one.laddr for one in psutil.Process().net_connections("inet") if one.status == psutil.CONN_LISTEN
    ]
    return {address.ip for address in found if port in (None, address.port)}


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_store_of_the_ranks_listens_on_their_address_alone(address):
    [port] = free_ports(1)
    meetings = [Rendezvous(rank=rank, ranks=2, address=address, port=port) for rank in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda meeting: _store(meeting, timedelta(seconds=60)), meetings)
    first.set("name", "value")
    assert second.get("name") == b"value"
    assert listening(port) == {address}


def test_gloo_listens_on_the_interface_of_that_address(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "restored after the test")
        monkeypatch.delenv(name)
    _keep_to_interface("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo" and "NCCL_SOCKET_IFNAME" not in os.environ
    before = listening()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert listening() - before <= {"127.0.0.1"}
    finally:
        dist.destroy_process_group()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    _keep_to_interface("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7", "what the user says counts"


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip"),
    reason="makes a network of its own: needs root and ip (apt-get install iproute2)",
)
def test_on_another_host_than_the_masters_it_is_the_interface_of_the_route_to_it():
    network = (
        "ip link add wan type veth peer name wan2; ip link add lan type veth peer name lan2; ip link set "
        "lan2 up"
    )
    network += "; ip address add 192.0.2.7/24 dev wan"
    network += "; ip address add 10.9.0.2/24 dev lan; ip link set wan up; ip link set lan up"
    code = "import os; from asyncrl.trainer.collectives import _keep_to_interface as keep; keep('10.9.0.1')"
    code += "; from asyncrl.hosting.route import interface_towards"
    code += "; print(os.environ['GLOO_SOCKET_IFNAME'], interface_towards('10.9.0.1'))"
    script = f'{network}; exec {sys.executable} -c "{code}"'
    without = {name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}
    told = subprocess.run(
        ["unshare", "--net", "sh", "-ec", script], env=without, capture_output=True, text=True, timeout=120
    )
    assert told.stdout.strip() == "lan lan", told.stderr


@pytest.mark.parametrize(
    ("text", "kind"),
    [("Failed to CUDA calloc async 608 bytes", RuntimeError), ("Connection reset by peer", RunError)],
)
def test_a_gpu_without_room_for_a_meeting_is_not_a_port_that_is_closed(monkeypatch, text, kind):
    def refuse(*_, **__):
        raise RuntimeError(text)

    monkeypatch.setattr(collectives, "_store", lambda *_: None)
    monkeypatch.setattr(collectives, "_keep_to_interface", lambda address: None)
    monkeypatch.setattr(dist, "init_process_group", refuse)
    with pytest.raises(kind, match=text):
        Ranks(Rendezvous(), torch.device("cpu"))
