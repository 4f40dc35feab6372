"""The learner's side of the sender processes (asyncrl/weights/sender.py). No call waits for a sender."""

import contextlib
import os
import select
import shutil
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncrl.weights.base import Failed, Sent, UpdateOrder
from asyncrl.weights.slots import Published
from asyncrl.weights.transports import SenderSetup
from asyncrl.workers import Worker, pack, take_message

# A killed process ends in milliseconds; the learner does not wait for one that the kernel holds longer.
_REAP_S = 2.0
# Bound on a request to the fork server, which may still be importing torch.
_FORK_S = 60.0


class ForkServer:
    """Forks senders. A fork server that has died or hangs is started again, and so are its senders.

    If this host cannot start it, `__init__` and `fork` raise OSError; each `fork` tries again.
    """

    def __init__(self) -> None:
        # Number of the process that forks now, from 1.
        self.generation = 0
        self._start()

    @property
    def pid(self) -> int:
        return self._worker.pid

    def replace(self, generation: int) -> None:
        """Replace the fork server of this generation, which hangs: it never forked a sender."""
        if generation == self.generation:
            self.close()
            self._start()

    def fork(self) -> socket.socket:
        """The learner's end of the channel of a new sender, which may be forked later."""
        ours, theirs = socket.socketpair()
        with theirs:
            if self._worker.channel.fileno() < 0:  # it could not be started when it was replaced
                self._start()
            try:
                socket.send_fds(self._worker.channel, [b"."], [theirs.fileno()])
            except (BrokenPipeError, ConnectionResetError, TimeoutError):  # it died, or has hung for long
                self.replace(self.generation)
                socket.send_fds(self._worker.channel, [b"."], [theirs.fileno()])
        return ours

    def close(self) -> None:
        """End the fork server and its senders."""
        self._worker.end()

    def _start(self) -> None:
        self._worker = Worker("asyncrl.weights.sender")
        self._worker.channel.settimeout(_FORK_S)
        self.generation += 1


class SenderProcess:
    """Implements `weights.base.Sender`. `take` pins a version, as `SlotPublisher._take` says; `give_back`
    unpins it."""

    def __init__(
        self,
        setup: SenderSetup,
        forks: ForkServer,
        *,
        take: Callable[[str, int], Published | int],
        give_back: Callable[[Published], None],
    ) -> None:
        self._setup, self._forks = setup, forks
        self._take, self._give_back = take, give_back
        self._held: Published | None = None
        self._wanted = -1
        self._transport = ""
        self._job = 0
        # A pidfd; None until the sender has been forked.
        self._process: int | None = None
        self.is_closed = False
        self._start()

    def fileno(self) -> int:
        return self._channel.fileno()

    def prepare(self, transport: str) -> bool:
        self._release()
        found = self._take(transport, self._wanted)
        if isinstance(found, int):
            self._wanted = found
            return False
        self._held, self._wanted = found, -1
        self._job += 1
        self._transport = transport
        self._say(
            op="prepare",
            job=self._job,
            transport=transport,
            slot=self._held.slot.describe(),
            checksums=self._held.checksums,
        )
        return True

    def transfer(self) -> None:
        self._say(op="transfer", job=self._job)

    def replies(self) -> list[UpdateOrder | Sent | Failed]:
        ended = self._receive()
        found: list[UpdateOrder | Sent | Failed] = []
        while (message := take_message(self._incoming)) is not None:
            if message["job"] == self._job:
                found.append(self._interpret(message))
        if ended:
            self._release()
            found.append(Failed(reason="the sender process died; see the learner's log"))
        return found

    def restart(self) -> None:
        if self._end():
            self._forks.replace(self._generation)
        self._start()

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._end()

    def _end(self) -> bool:
        """Kill the sender. Returns whether the fork server hangs: it lives, but has not forked the sender."""
        if self._channel.fileno() < 0:  # the sender could not be started
            return False
        is_hung = not self._receive() and self._process is None
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):  # it has died
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
            # With a thousand generators there are descriptors above the limit of `select`.
            gone = select.poll()
            gone.register(self._process, select.POLLIN)
            gone.poll(_REAP_S * 1000)
            os.close(self._process)
            self._process = None
        self._channel.close()  # a sender that is forked later ends by this
        shutil.rmtree(self._directory, ignore_errors=True)
        self._release()
        return is_hung

    def _start(self) -> None:
        # A killed process leaves its rendezvous files behind, so each one gets its own directory.
        self._directory = Path(self._setup.rendezvous_directory) / os.urandom(8).hex()
        self._directory.mkdir(parents=True, mode=0o700)
        self._process = None
        try:
            self._channel, self._generation = self._forks.fork(), self._forks.generation
        except OSError:
            self._directory.rmdir()
            raise
        self._channel.setblocking(False)
        self._incoming = bytearray()
        self._outgoing = bytearray()
        setup = replace(self._setup, rendezvous_directory=str(self._directory.absolute()))
        plain = {name: getattr(setup, name) for name in SenderSetup.__slots__}
        self._say(**plain | {"layout": setup.layout.to_plain()})

    def _say(self, **message: Any) -> None:
        """Write as much as the socket accepts; the next call of `replies` writes the rest."""
        self._outgoing += pack(message)
        self._flush()

    def _flush(self) -> None:
        # If the sender has died, `replies` reports it.
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._outgoing:
                del self._outgoing[: self._channel.send(self._outgoing)]

    def _receive(self) -> bool:
        """Read all that has arrived; returns whether the stream has ended."""
        self._flush()
        try:
            while True:
                piece, descriptors, _, _ = socket.recv_fds(self._channel, 1 << 20, 1)
                if descriptors:
                    self._process = descriptors[0]
                if not piece:
                    return True
                self._incoming += piece
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True

    def _interpret(self, message: dict[str, Any]) -> UpdateOrder | Sent | Failed:
        if message["op"] == "prepared":
            assert self._held is not None
            return self._held.order(self._transport, message["details"])
        self._release()
        if message["op"] == "sent":
            return Sent(seconds=message["seconds"])
        return Failed(reason=message["reason"])

    def _release(self) -> None:
        if self._held is not None:
            self._give_back(self._held)
            self._held = None
