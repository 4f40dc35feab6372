"""Ports for servers that cannot say which one they got."""

import random
import socket

# Below the ports that the kernel hands out for port 0, so that it gives none of them to others. A port may be
# used minutes after it was chosen, so its choice is held for as long as this process lives, by a name that
# only one process of the machine can have and that the kernel frees.
PORTS = range(20_000, 32_000)
_held: list[socket.socket] = []


def free_ports(count: int) -> list[int]:
    """Return ports that no process listens on, and that no other process of a test chooses meanwhile."""
    found: list[int] = []
    while len(found) < count:
        port, name = random.SystemRandom().choice(PORTS), socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0asyncrl-test-port-{port}")
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            name.close()
        else:
            _held.append(name)
            found.append(port)
    return found
