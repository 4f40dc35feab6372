"""The sender of one generator: it names the slot, and the generator reads it there.

There is no process, no connection and no copy. `prepare` pins the newest version, the order says where it is,
and the next `prepare`, a passed deadline or the generator's death unpins it. Only Gloo and NCCL have a sender
process, which lives as long as it is needed.
"""

import os
from collections.abc import Callable

from asyncrl.weights.base import Failed, Sender, Sent, UpdateOrder
from asyncrl.weights.slots import Published

# Transports that read a slot, in memory or in a file.
IN_SLOTS = ("slot", "disk")


class HostSender:
    """Implements `weights.base.Sender`.

    `take` pins a version, as `SlotPublisher._take` says; `give_back` unpins it.
    """

    def __init__(
        self,
        *,
        take: Callable[[str, int], Published | int],
        give_back: Callable[[Published], None],
        start_process: Callable[[], Sender],
    ) -> None:
        self._take, self._give_back, self._start_process = take, give_back, start_process
        self._held: Published | None = None
        self._wanted = -1
        self._process: Sender | None = None
        self._replies: list[UpdateOrder | Sent | Failed] = []
        self._woken = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # readable while there are replies

    @property
    def is_closed(self) -> bool:
        """Whether `close` has been called."""
        return self._woken < 0

    def fileno(self) -> int:
        return self._process.fileno() if self._process else self._woken

    def prepare(self, transport: str) -> bool:
        try:
            if transport not in IN_SLOTS:
                self._process = self._process or self._start_process()
                return self._process.prepare(transport)
            self.restart()  # what an earlier update used
            found = self._take(transport, self._wanted)
        except OSError as error:
            self._reply(Failed(reason=f"weights over {transport} cannot be prepared: {error}"))
            return True
        if isinstance(found, int):
            self._wanted = found
            return False
        self._held, self._wanted = found, -1
        self._reply(found.order(transport, found.slot_details()))
        return True

    def transfer(self) -> None:
        """The generator reads by itself."""
        if self._process:
            self._process.transfer()
        else:
            self._reply(Sent(seconds=0.0))

    def replies(self) -> list[UpdateOrder | Sent | Failed]:
        if self._process:
            return self._process.replies()
        if self._replies:
            os.eventfd_read(self._woken)
        replies, self._replies = self._replies, []
        return replies

    def restart(self) -> None:
        """The next `prepare` starts what it needs."""
        if self._process:
            self._process.close()
            self._process = None
        if self._held:
            self._give_back(self._held)
            self._held = None

    def close(self) -> None:
        if self._woken >= 0:
            self.restart()
            os.close(self._woken)
            self._woken = -1

    def _reply(self, reply: UpdateOrder | Sent | Failed) -> None:
        self._replies.append(reply)
        os.eventfd_write(self._woken, 1)
