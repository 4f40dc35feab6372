"""The learner's handle on the fork server of its senders (asyncrl/weights/sender.py)."""

import socket

from asyncrl.processes import start_worker

_TIMEOUT_S = 60.0
"""A fork server that has not finished its imports by then hangs. It is asked much later than it is started."""


class ForkServer:
    """Forks senders; starts again when it has died or hangs, and all senders with it."""

    def __init__(self) -> None:
        self.generation = 0
        """Which one of its processes forks now."""
        self._start()

    def replace(self, generation: int) -> None:
        """After a sender of that generation was not forked in all its time: its fork server hangs."""
        if generation == self.generation:
            self.close()
            self._start()

    def fork(self) -> socket.socket:
        """Our end of a new sender's channel, at once."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._requests, [b"."], [theirs.fileno()])
            except (BrokenPipeError, ConnectionResetError, TimeoutError):  # it died, or has hung for long
                self.replace(self.generation)
                socket.send_fds(self._requests, [b"."], [theirs.fileno()])
        return ours

    def close(self) -> None:
        """Ends the senders too."""
        self._requests.close()
        self._process.kill()
        self._process.wait()

    def _start(self) -> None:
        self.generation += 1
        self._process, self._requests = start_worker("asyncrl.weights.sender")
        self._requests.settimeout(_TIMEOUT_S)
