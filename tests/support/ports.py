"""Ports of this machine that nobody has."""

import contextlib
import random
import socket

PORTS = range(20_000, 32_000)
"""Below those that the kernel gives to whoever asks for any port, so that nobody is given one before it is
used."""


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
