"""A Redis cluster of three nodes and a replica, on this machine."""

import contextlib
import itertools
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from redis.exceptions import RedisError

from asyncrl.buffer.server import Choice, find_server
from tests.support.ports import free_ports
from tests.support.waiting import wait_until

PRIMARIES, SLOTS = 3, 16384
READY_S = 120.0


@dataclass
class Node:
    process: "subprocess.Popen[bytes]"
    port: int
    bus_port: int

    def __post_init__(self) -> None:
        self.client = redis.Redis(port=self.port)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def cluster(self, command: str, *arguments: object) -> Any:
        return self.client.execute_command(f"CLUSTER {command}", *arguments)


@contextlib.contextmanager
def cluster(directory: Path, server: Choice = "auto") -> Iterator[list[Node]]:
    """A new one: node n has the n-th third of the slots, the last node is a replica of the one before."""
    with contextlib.ExitStack() as stack:
        ports = iter(free_ports(2 * (PRIMARIES + 1)))
        nodes = [
            _start_node(stack, find_server(server), directory, port, bus_port)
            for port, bus_port in zip(ports, ports, strict=True)
        ]
        for number, node in enumerate(nodes):
            _wait_until(node.client.ping)
            # Epochs that nodes choose themselves may collide: the others would refuse the replica's takeover.
            node.cluster("SET-CONFIG-EPOCH", number + 1)
            nodes[0].cluster("MEET", "127.0.0.1", node.port, node.bus_port)
            if number < PRIMARIES:
                node.cluster(
                    "ADDSLOTSRANGE", SLOTS * number // PRIMARIES, SLOTS * (number + 1) // PRIMARIES - 1
                )
        *_, primary, replica = nodes
        for node in nodes:
            _wait_until(lambda node=node: _knows_all(node, len(nodes)))
        replica.cluster("REPLICATE", primary.cluster("MYID").decode())
        _wait_until(lambda: replica.client.info("replication").get("master_link_status") == "up")
        yield nodes


def _start_node(stack: contextlib.ExitStack, binary: Path, directory: Path, port: int, bus_port: int) -> Node:
    (directory / str(port)).mkdir()
    settings = {
        "port": port,
        "cluster-port": bus_port,
        "cluster-enabled": "yes",
        "bind": "127.0.0.1",
        "dir": directory / str(port),
        "save": "",
    }
    argv = [
        str(binary),
        *itertools.chain.from_iterable((f"--{name}", str(value)) for name, value in settings.items()),
    ]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    stack.callback(process.wait, timeout=60)
    stack.callback(process.kill)
    return Node(process, port, bus_port)


def _knows_all(node: Node, count: int) -> bool:
    info = node.cluster("INFO")
    told = info if isinstance(info, dict) else dict(line.split(":") for line in info.decode().split())
    return (told["cluster_state"], told["cluster_known_nodes"]) == ("ok", str(count))


def _wait_until(condition: Callable[[], Any]) -> None:
    def is_so() -> bool:
        with contextlib.suppress(RedisError):
            return bool(condition())
        return False

    wait_until(is_so, READY_S, lambda: "no cluster")
