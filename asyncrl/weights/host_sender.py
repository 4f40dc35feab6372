"""The sender of a generator on the learner's host: it names the slot, and the generator reads it there.

There is no process, no connection and no copy. `prepare` pins the newest version, the order says where it is,
and the next `prepare`, a passed deadline or the generator's death unpins it. Only files (transport `disk`)
are written by a sender process, which lives as long as they are needed.
"""

import os
from collections.abc import Callable

from asyncrl.weights.base import Failed, Sender, Sent, UpdateOrder
from asyncrl.weights.slots import Published


class HostSender:
    """Implements `weights.base.Sender`. `take` pins a published version in its slot, `give_back` unpins
    it."""

    def __init__(
        self,
        *,
        take: Callable[[], Published | None],
        give_back: Callable[[Published], None],
        start_process: Callable[[], Sender],
    ) -> None:
        self._take, self._give_back, self._start_process = take, give_back, start_process
        self._held: Published | None = None
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
        if transport == "slot":
            self.restart()  # what an earlier update used
            self._held = self._take()
            if self._held is None:
                return False
            self._reply(self._held.order("slot", self._held.slot_details()))
            return True
        try:
            self._process = self._process or self._start_process()
        except OSError as error:
            self._reply(Failed(reason=f"no process that writes files can be started: {error}"))
            return True
        return self._process.prepare(transport)

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
