"""Where the ranks of a learner meet, nobody on another host can look in."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

from asyncrl.trainer.collectives import Rendezvous, _keep_to_interface, _store

pytestmark = pytest.mark.integration


def listening(port=None):
    found = [one.laddr for one in psutil.Process().net_connections("inet") if one.status == psutil.CONN_LISTEN]
    return {address.ip for address in found if port in (None, address.port)}


def test_the_store_of_the_ranks_listens_on_their_address_alone():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    meetings = [Rendezvous(rank=rank, ranks=2, port=port) for rank in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda meeting: _store(meeting, timedelta(seconds=60)), meetings)
    first.set("name", "value")
    assert second.get("name") == b"value"
    assert listening(port) == {"127.0.0.1"}


def test_gloo_listens_on_the_interface_of_that_address(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    _keep_to_interface("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    before = listening()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert listening() - before <= {"127.0.0.1"}
    finally:
        dist.destroy_process_group()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    _keep_to_interface("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7", "what the user says counts"
