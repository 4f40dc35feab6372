"""The learner's handle on the fork server of its senders (asyncrl/weights/sender.py)."""

import socket

from asyncrl.processes import start_worker, stop_process

_TIMEOUT_S = 60.0
"""A fork server that has not finished its imports by then hangs. It is asked much later than it is started."""


class ForkServer:
    """Forks senders; starts again when it has died or hangs, and all senders with it.

    Where this host cannot start it, that raises OSError, and so does every `fork`, which tries it again.
    """

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
            if self._requests.fileno() < 0:  # it could not be started when it was replaced
                self._start()
            try:
                socket.send_fds(self._requests, [b"."], [theirs.fileno()])
            except (BrokenPipeError, ConnectionResetError, TimeoutError):  # it died, or has hung for long
                self.replace(self.generation)
                socket.send_fds(self._requests, [b"."], [theirs.fileno()])
        return ours

    def close(self) -> None:
        """Ends the senders too."""
        self._requests.close()
        stop_process(self._process, grace_s=0.0)

    def _start(self) -> None:
        self._process, self._requests = start_worker("asyncrl.weights.sender")
        self._requests.settimeout(_TIMEOUT_S)
        self.generation += 1
