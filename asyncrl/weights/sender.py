"""The sender of one generator: it pins the newest version in its slot, and says in the order where that is.

    slot, disk   the generator reads the slot
    tcp          the generator fetches the slot from the learner's `SlotServer`
    nccl         a process of this sender broadcasts the slot, see asyncrl/weights/nccl.py

The next `prepare`, `give_up` and `close` unpin the version.
"""

import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any

from asyncrl.weights.base import Failed, Sent, UpdateOrder
from asyncrl.weights.layout import Layout
from asyncrl.weights.slots import Published
from asyncrl.workers import Worker, pack, take_message

log = logging.getLogger(__name__)

Take = Callable[[str, int], Published | int]


class SlotSender:
    """Implements `weights.base.Sender`.

    `take` pins a version, as `SlotPublisher._take` says; `give_back` unpins it. `describe` returns the
    details of an order over a transport that needs no process.
    """

    def __init__(
        self,
        *,
        take: Take,
        give_back: Callable[[Published], None],
        describe: Callable[[Published, str], dict[str, Any]],
        start_process: Callable[[], "NcclProcess"],
    ) -> None:
        """Raises OSError."""
        self._take, self._give_back = take, give_back
        self._describe, self._start_process = describe, start_process
        self._held: Published | None = None
        self._wanted = -1
        self._process: NcclProcess | None = None
        self._replies: list[UpdateOrder | Sent | Failed] = []
        self._woken = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # readable while there are replies

    @property
    def is_closed(self) -> bool:
        """Whether `close` has been called."""
        return self._woken < 0

    def fileno(self) -> int:
        return self._process.fileno() if self._process else self._woken

    def prepare(self, transport: str) -> bool:
        if transport != "nccl":
            self._end_process()
        self._release()
        try:
            found = self._take(transport, self._wanted)
            if isinstance(found, int):
                self._wanted = found
                return False
            self._held, self._wanted = found, -1
            if transport == "nccl":
                self._process = self._process or self._start_process()
                self._process.prepare(found)
            else:
                self._reply(found.order(transport, self._describe(found, transport)))
        except OSError as error:
            self._release()
            self._reply(Failed(reason=f"weights over {transport} cannot be prepared: {error}"))
        return True

    def transfer(self) -> None:
        """A generator that reads or fetches does so by itself."""
        if self._process:
            self._process.transfer()
        else:
            self._reply(Sent(seconds=0.0))

    def replies(self) -> list[UpdateOrder | Sent | Failed]:
        if self._replies:
            os.eventfd_read(self._woken)
        replies, self._replies = self._replies, []
        if self._process is None:
            return replies
        messages, has_ended = self._process.messages()
        replies += [self._interpret(message) for message in messages]
        if has_ended:
            if self._held:
                replies.append(Failed(reason="the NCCL sender process died; see the learner's log"))
            else:
                log.warning("an NCCL sender process died while it was idle; the next update starts another")
            self.give_up()
        return replies

    def give_up(self) -> None:
        self._end_process()
        self._release()

    def close(self) -> None:
        if self._woken >= 0:
            self.give_up()
            os.close(self._woken)
            self._woken = -1

    def _interpret(self, message: dict[str, Any]) -> UpdateOrder | Sent | Failed:
        if message["op"] == "prepared":
            assert self._held is not None
            return self._held.order("nccl", message["details"])
        self._release()
        if message["op"] == "sent":
            return Sent(seconds=message["seconds"])
        return Failed(reason=message["reason"])

    def _reply(self, reply: UpdateOrder | Sent | Failed) -> None:
        self._replies.append(reply)
        os.eventfd_write(self._woken, 1)

    def _end_process(self) -> None:
        if self._process:
            self._process.close()
            self._process = None

    def _release(self) -> None:
        if self._held:
            self._give_back(self._held)
            self._held = None


class NcclProcess:
    """The learner's end of a process of asyncrl/weights/nccl.py. No call waits for it, except for its end."""

    def __init__(self, layout: Layout, workers: int) -> None:
        """Start it for a generator of `workers` tensor-parallel workers. Raises OSError."""
        self._worker = Worker("asyncrl.weights.nccl")
        self._worker.channel.setblocking(False)
        self._incoming, self._outgoing, self._job = bytearray(), bytearray(), 0
        self._say(layout=layout.to_plain(), workers=workers)

    @property
    def pid(self) -> int:
        return self._worker.pid

    def fileno(self) -> int:
        return self._worker.channel.fileno()

    def prepare(self, published: Published) -> None:
        """Ask for the details of an order to receive this version."""
        self._job += 1
        slot, sums = published.slot.describe(), published.checksums
        self._say(op="prepare", job=self._job, slot=slot, checksums=sums)

    def transfer(self) -> None:
        """Ask to send what was prepared."""
        self._say(op="transfer", job=self._job)

    def messages(self) -> tuple[list[dict[str, Any]], bool]:
        """The answers on the newest job since the last call, and whether the process has ended."""
        has_ended = self._receive()
        found = []
        while (message := take_message(self._incoming)) is not None:
            if message["job"] == self._job:
                found.append(message)
        return found, has_ended

    def close(self) -> None:
        """Kill the process."""
        self._worker.end()

    def _say(self, **message: Any) -> None:
        """Write as much as the socket accepts; the next call of `messages` writes the rest."""
        self._outgoing += pack(message)
        self._flush()

    def _flush(self) -> None:
        # If the process has died, `messages` says so.
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._outgoing:
                del self._outgoing[: self._worker.channel.send(self._outgoing)]

    def _receive(self) -> bool:
        """Read all that has arrived; returns whether the stream has ended."""
        self._flush()
        try:
            while piece := self._worker.channel.recv(1 << 20):
                self._incoming += piece
        except BlockingIOError:
            return False
        except ConnectionResetError:
            pass
        return True
