"""Ports of this machine that nobody has."""

import socket


def free_ports(count: int) -> list[int]:
    """All of them are chosen before the first is free again: they differ."""
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in taken]
    for one in taken:
        one.close()
    return ports
