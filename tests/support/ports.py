"""Ports of this machine that nobody has."""

import contextlib
import os
import random
import socket

# Below the ports that the kernel hands out for port 0, so that it gives none of them to others. A port may be
# used minutes after it was chosen, so tests that run at the same time choose from different ranges.
RANGES, SIZE = 4, 3_000
_FIRST = 20_000 + SIZE * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % RANGES)
PORTS = range(_FIRST, _FIRST + SIZE)


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
