"""The sender of one generator: it pins the newest version in its slot, and says in the order where that is.

    slot, disk   the generator reads the slot
    tcp          the generator fetches the slot from the learner's `SlotServer`
    nccl         a process of this sender broadcasts the slot, see asyncrl/weights/nccl.py

The next `prepare`, `give_up` and `close` unpin the version.
"""

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgpack

from asyncrl.weights.base import Failed, Sent, UpdateOrder
from asyncrl.weights.layout import Layout
from asyncrl.weights.slots import Published
from asyncrl.workers import Worker

Answer = Callable[[dict[str, Any]], None]

# Bound on the start of an NCCL process, on top of the deadline of a transfer.
_START_S = 60.0


class SlotSender:
    """Implements `weights.base.Sender`.

    `take` pins a version, as `SlotPublisher._take` says; `give_back` unpins it. `describe` returns the
    details of an order over a transport that needs no process.
    """

    def __init__(
        self,
        *,
        take: Callable[[str, int], Published | int],
        give_back: Callable[[Published], None],
        describe: Callable[[Published, str], dict[str, Any]],
        start_process: Callable[[], "NcclProcess"],
    ) -> None:
        """Raises OSError."""
        self._take, self._give_back = take, give_back
        self._describe, self._start_process = describe, start_process
        self._lock = threading.RLock()  # answers of a process come in a thread of its own
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
        return self._woken

    def prepare(self, transport: str) -> bool:
        with self._lock:
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
                    self._process.prepare(found, partial(self._hear, self._process, found))
                else:
                    self._reply(found.order(transport, self._describe(found, transport)))
            except OSError as error:
                self._release()
                self._reply(Failed(reason=f"weights over {transport} cannot be prepared: {error}"))
            return True

    def transfer(self) -> None:
        """A generator that reads or fetches does so by itself."""
        with self._lock:
            if self._process and self._held:
                self._process.transfer(self._held, partial(self._hear, self._process, self._held))
            else:
                self._reply(Sent(seconds=0.0))

    def replies(self) -> list[UpdateOrder | Sent | Failed]:
        with self._lock:
            if self._replies:
                os.eventfd_read(self._woken)
            replies, self._replies = self._replies, []
            return replies

    def give_up(self) -> None:
        with self._lock:
            self._end_process()
            self._release()

    def close(self) -> None:
        with self._lock:
            if self._woken >= 0:
                self.give_up()
                os.close(self._woken)
                self._woken = -1

    def _hear(self, process: "NcclProcess", published: Published, answer: dict[str, Any]) -> None:
        """The answer of the process on this version, in its thread."""
        with self._lock:
            if process is not self._process or published is not self._held:
                return  # given up
            if answer["op"] == "prepared":
                self._reply(published.order("nccl", answer["details"]))
                return
            self._release()
            sent = answer["op"] == "sent"
            self._reply(Sent(seconds=answer["seconds"]) if sent else Failed(reason=answer["reason"]))

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
    """The learner's end of a process of asyncrl/weights/nccl.py. No call waits for it."""

    def __init__(self, layout: Layout, workers: int) -> None:
        """Start it for a generator of `workers` tensor-parallel workers. Raises OSError."""
        self._worker = Worker("asyncrl.weights.nccl")
        self._setup = {"layout": layout.to_plain(), "workers": workers}
        self._thread = ThreadPoolExecutor(1, "asyncrl-nccl")

    @property
    def pid(self) -> int:
        return self._worker.pid

    def prepare(self, published: Published, on_answer: Answer) -> None:
        """Ask for the details of an order to receive this version."""
        slot, sums = published.slot.describe(), published.checksums
        self._ask({"op": "prepare", **self._setup, "slot": slot, "checksums": sums}, published, on_answer)

    def transfer(self, published: Published, on_answer: Answer) -> None:
        """Ask to send what was prepared."""
        self._ask({"op": "transfer"}, published, on_answer)

    def close(self) -> None:
        """Kill the process; its thread ends with it."""
        os.kill(self._worker.pid, signal.SIGKILL)  # only `end` reaps it, so the number is still its own
        self._thread.submit(self._worker.end)
        self._thread.shutdown(wait=False)

    def _ask(self, message: dict[str, Any], published: Published, on_answer: Answer) -> None:
        def ask() -> None:
            try:
                data = self._worker.ask(msgpack.packb(message), published.template.deadline_s + _START_S)
                answer = msgpack.unpackb(data)
            except (OSError, EOFError) as error:
                reason = f"the NCCL sender process died or hangs ({error!r}); see the learner's log"
                answer = {"op": "failed", "reason": reason}
            on_answer(answer)

        self._thread.submit(ask)
