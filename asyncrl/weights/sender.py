"""The sender of one generator: it pins the newest version in its slot, and says in the order where that is.

    slot, disk   the generator reads the slot
    tcp          the generator fetches the slot from the learner's `SlotServer`
    nccl         a process of all senders broadcasts the slot, see asyncrl/weights/nccl.py

The next `prepare`, `give_up` and `close` unpin the version.
"""

import os
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgpack

from asyncrl.weights.base import Failed, Sent, UpdateOrder
from asyncrl.weights.slots import Published
from asyncrl.workers import Channel, Worker

# Bound on the start of an NCCL process, on top of the deadline of a transfer.
_START_S = 60.0


class SlotSender:
    """Implements `weights.base.Sender`.

    `take` pins a version, as `SlotPublisher._take` says; `give_back` unpins it. `order` makes the order
    over a transport that needs no process. `workers` of the generator are to receive.
    """

    def __init__(
        self,
        *,
        take: Callable[[str, int], Published | int],
        give_back: Callable[[Published], None],
        order: Callable[[Published, str], UpdateOrder],
        nccl: "NcclProcess",
        workers: int,
    ) -> None:
        """Raises OSError."""
        self._take, self._give_back, self._order = take, give_back, order
        self._nccl, self._workers = nccl, workers
        self._lock = threading.RLock()  # answers over a channel come in a thread of its own
        self._held: Published | None = None
        self._wanted = -1
        self._channel: NcclChannel | None = None
        self._replies: list[UpdateOrder | Sent | Failed] = []
        self._woken = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # readable while there are replies

    @property
    def is_closed(self) -> bool:
        """Whether `close` has been called."""
        return self._woken < 0

    def fileno(self) -> int:
        return self._woken

    def prepare(self, transport: str) -> bool:
        with self._lock:
            self._release()
            if transport != "nccl" or self._channel not in self._nccl.channels:
                self._hang_up()
            if transport == "nccl" and self._nccl.must_end:
                return False
            try:
                found = self._take(transport, self._wanted)
                if isinstance(found, int):
                    self._wanted = found
                    return False
                self._held, self._wanted = found, -1
                if transport == "nccl":
                    self._channel = self._channel or NcclChannel(self._nccl, self._hear)
                    layout, slot = found.layout.to_plain(), found.slot.describe()
                    message = {"op": "prepare", "layout": layout, "workers": self._workers, "slot": slot}
                    self._channel.say(message, found)
                else:
                    self._reply(self._order(found, transport))
            except OSError as error:
                self._release()
                self._reply(Failed(reason=f"weights over {transport} cannot be prepared: {error}"))
            return True

    def transfer(self) -> None:
        """A generator that reads or fetches does so by itself."""
        with self._lock:
            if self._channel and self._held:
                self._channel.say({"op": "transfer"}, self._held)
            else:
                self._reply(Sent())

    def replies(self) -> list[UpdateOrder | Sent | Failed]:
        with self._lock:
            if self._replies:
                os.eventfd_read(self._woken)
            replies, self._replies = self._replies, []
            return replies

    def give_up(self) -> None:
        with self._lock:
            self._hang_up()
            self._release()

    def close(self) -> None:
        with self._lock:
            if self._woken >= 0:
                self.give_up()
                os.close(self._woken)
                self._woken = -1

    def _hear(self, channel: "NcclChannel", published: Published, answer: dict[str, Any]) -> None:
        """The answer of the process on this version, in the channel's thread."""
        with self._lock:
            if channel is not self._channel or published is not self._held:
                return  # given up
            if answer["op"] == "prepared":
                self._reply(published.order("nccl", **answer["details"]))
                return
            self._release()
            self._reply(Sent() if answer["op"] == "sent" else Failed(reason=answer["reason"]))

    def _reply(self, reply: UpdateOrder | Sent | Failed) -> None:
        self._replies.append(reply)
        os.eventfd_write(self._woken, 1)

    def _hang_up(self) -> None:
        if self._channel:
            self._channel.close()
            self._channel = None

    def _release(self) -> None:
        if self._held:
            self._give_back(self._held)
            self._held = None
        if self._channel:
            self._nccl.note(self._channel, under_way=False)


class NcclProcess:
    """The process of asyncrl/weights/nccl.py, which all senders share. No call waits for it.

    It starts for the first channel and ends with the last. A channel that breaks or is closed during an
    update may hang in NCCL, and only the end of the process ends that. Then no further update begins, and the
    process is killed when those of other channels are over.
    """

    def __init__(self) -> None:
        """Nothing is started yet."""
        self.must_end = False
        # Whether an update is under way, by open channel.
        self.channels: dict[NcclChannel | None, bool] = {}
        self._worker: Worker | None = None
        self._lock = threading.Lock()

    def connect(self, channel: "NcclChannel") -> socket.socket:
        """Return our end of a new channel. Raises OSError."""
        with self._lock:
            self._worker = self._worker or Worker("asyncrl.weights.nccl")
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    socket.send_fds(self._worker.channel, [b"+"], [theirs.fileno()])
                except OSError:  # it has died
                    ours.close()
                    self._kill(self._worker)
                    raise
            self.channels[channel] = False
            return ours

    def note(self, channel: "NcclChannel", *, under_way: bool | None) -> None:
        """Say whether an update is under way over this channel; None if it is closed or broken."""
        with self._lock:
            if under_way is None:
                self.must_end |= self.channels.pop(channel, False)
            elif channel in self.channels:
                self.channels[channel] = under_way
            is_due = not any(self.channels.values()) and (self.must_end or not self.channels)
            if self._worker and is_due:
                self._kill(self._worker)

    def _kill(self, worker: Worker) -> None:
        os.kill(worker.pid, signal.SIGKILL)  # only `end` reaps it, so the number is still its own
        threading.Thread(target=worker.end, name="asyncrl-nccl-end").start()
        self.channels.clear()
        self._worker, self.must_end = None, False


class NcclChannel(Channel):
    """One generator's channel to the process. No call waits for it; answers come in a thread of its own."""

    def __init__(
        self,
        process: NcclProcess,
        on_answer: Callable[["NcclChannel", Published, dict[str, Any]], None],
    ) -> None:
        """Raises OSError."""
        super().__init__(process.connect(self))
        self._process, self._on_answer = process, on_answer
        self._thread = ThreadPoolExecutor(1, "asyncrl-nccl")

    def say(self, message: dict[str, Any], published: Published) -> None:
        """Send a message about the update to this version, which is under way from now on."""
        self._process.note(self, under_way=True)
        self._thread.submit(self._ask, message, published)

    def close(self) -> None:
        self._process.note(self, under_way=None)
        self.channel.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.submit(super().close)
        self._thread.shutdown(wait=False)

    def _ask(self, message: dict[str, Any], published: Published) -> None:
        try:
            data = self.ask(msgpack.packb(message), published.template.deadline_s + _START_S)
            answer = msgpack.unpackb(data)
        except (OSError, EOFError) as error:
            self._process.note(self, under_way=None)
            reason = f"the NCCL sender process died or hangs ({error!r}); see the learner's log"
            answer = {"op": "failed", "reason": reason}
        self._on_answer(self, published, answer)
