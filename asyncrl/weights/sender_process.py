"""The learner's side of the sender processes (asyncrl/weights/sender.py): forks, talks without ever waiting,
kills."""

import contextlib
import os
import select
import shutil
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from asyncrl.weights.base import Failed, Sent, UpdateOrder
from asyncrl.weights.slots import Slot
from asyncrl.weights.transports import SenderSetup
from asyncrl.workers import Worker, pack, take_message

# A killed process is gone in milliseconds; one that the kernel holds longer is left alone.
_REAP_S = 2.0
# A fork server that has not finished its imports by then hangs. It is asked much later than it is started.
_FORK_S = 60.0


class ForkServer:
    """Forks senders. One that has died or hangs is started again, and so are all its senders.

    Where this host cannot start it, `__init__` and every `fork` raise OSError; each `fork` tries it again.
    """

    def __init__(self) -> None:
        self.generation = 0
        """Number of the process that forks now; it starts with 1."""
        self._start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._worker.pid

    def replace(self, generation: int) -> None:
        """After a sender of that generation was not forked in all its time: its fork server hangs."""
        if generation == self.generation:
            self.close()
            self._start()

    def fork(self) -> socket.socket:
        """Our end of the channel of a new sender, which may be forked later."""
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
        """Ends the senders too."""
        self._worker.end()

    def _start(self) -> None:
        self._worker = Worker("asyncrl.weights.sender")
        self._worker.channel.settimeout(_FORK_S)
        self.generation += 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Published:
    """The newest version and where it lies."""

    version: int
    slot: Slot
    checksums: tuple[int, ...]
    probe_logprobs: tuple[float, ...]


class SenderProcess:
    """Implements `weights.base.Sender`. `take` pins a published version in its slot, `give_back` frees it."""

    def __init__(
        self,
        setup: SenderSetup,
        forks: ForkServer,
        *,
        probe_ids: tuple[int, ...],
        history: str,
        take: Callable[[], Published | None],
        give_back: Callable[[Published], None],
    ) -> None:
        self._setup = setup
        self._forks = forks
        self._probe_ids = probe_ids
        self._history = history
        self._take = take
        self._give_back = give_back
        self._held: Published | None = None
        self._transport = ""
        self._job = 0
        self._process: int | None = None
        """A descriptor of it (pidfd); None until it has been forked."""
        self.is_closed = False
        self._start()

    def fileno(self) -> int:
        """See `Sender`."""
        return self._channel.fileno()

    def prepare(self, transport: str) -> bool:
        """See `Sender`."""
        self._release()
        self._held = self._take()
        if self._held is None:
            return False
        self._job += 1
        self._transport = transport
        self._say(
            op="prepare",
            version=self._held.version,
            transport=transport,
            slot=self._held.slot.path,
            checksums=self._held.checksums,
        )
        return True

    def transfer(self) -> None:
        """See `Sender`."""
        self._say(op="transfer")

    def replies(self) -> list[UpdateOrder | Sent | Failed]:
        """See `Sender`."""
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
        """See `Sender`."""
        if self._end():
            self._forks.replace(self._generation)
        self._start()

    def close(self) -> None:
        """See `Sender`."""
        if not self.is_closed:
            self.is_closed = True
            self._end()

    def _end(self) -> bool:
        """Kill it, if there is one. True when it was not forked in all its time though the fork server lives:
        that one hangs."""
        if self._channel.fileno() < 0:  # it could not be started
            return False
        is_hung = not self._receive() and self._process is None
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):  # it has died
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
            # Not `select`: with a thousand generators there are descriptors above its limit.
            gone = select.poll()
            gone.register(self._process, select.POLLIN)
            gone.poll(_REAP_S * 1000)
            os.close(self._process)
            self._process = None
        self._channel.close()  # one that is only being forked ends by this
        shutil.rmtree(self._directory, ignore_errors=True)
        self._release()
        return is_hung

    def _start(self) -> None:
        # A directory per process: a killed one leaves its rendezvous files behind.
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
        self._write(pack({**plain, "layout": setup.layout.to_plain()}))

    def _say(self, **message: Any) -> None:
        self._write(pack({**message, "job": self._job}))

    def _write(self, data: bytes) -> None:
        """Into the socket as far as it goes; the rest follows with the next call of `replies`."""
        self._outgoing += data
        self._flush()

    def _flush(self) -> None:
        # A death shows in `replies`.
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._outgoing:
                del self._outgoing[: self._channel.send(self._outgoing)]

    def _receive(self) -> bool:
        """Read what is there; True at the end of the stream."""
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
            return UpdateOrder(
                version=self._held.version,
                transport=self._transport,
                deadline_s=self._setup.deadline_s,
                details=message["details"],
                probe_ids=self._probe_ids,
                probe_logprobs=self._held.probe_logprobs,
                history=self._history,
            )
        self._release()
        if message["op"] == "sent":
            return Sent(seconds=message["seconds"])
        return Failed(reason=message["reason"])

    def _release(self) -> None:
        if self._held is not None:
            self._give_back(self._held)
            self._held = None
