"""Ports of this machine that nobody has."""

import contextlib
import random
import socket

PORTS = range(20_000, 32_000)
"""Below the ports that the kernel hands out for port 0, so that it gives none of them to others."""


def free_ports(count: int) -> list[int]:
    """All of them are chosen before the first is free again: they differ."""
    taken: list[socket.socket] = []
    while len(taken) < count:
        with contextlib.suppress(OSError):
            taken.append(socket.create_server(("127.0.0.1", random.SystemRandom().choice(PORTS))))
    ports = [one.getsockname()[1] for one in taken]
    for one in taken:
        one.close()
    return ports
