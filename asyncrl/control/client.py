"""The generator's side of the control plane: an asyncio task that sends heartbeats and receives orders.

    joining --welcome--> member --no answer to heartbeats, or unknown to the learner--> joining again

A refusal of the first hello is an error; a later refusal (another learner took over the endpoint) ends the
generator with a `Stop`. A generator that has lost the learner keeps sampling, and keeps saying hello.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import zmq
import zmq.asyncio

from asyncrl.control import messages
from asyncrl.control.base import Heartbeat, Hello, Leave, Refused, Stop, Welcome
from asyncrl.control.messages import CODEC, FromGenerator, FromLearner, UnknownMember
from asyncrl.control.sockets import GeneratorKeys, connect
from asyncrl.errors import ControlError, ControlRefused, WireError
from asyncrl.weights.base import UpdateOrder, UpdateReport

log = logging.getLogger(__name__)

# Heartbeats without an answer after which the learner counts as lost.
_SILENT_BEATS = 3
_RETRY_S = 0.05
_FLUSH_MS = 500


class ControlClient:
    """Implements `control.base.GeneratorControl` on one asyncio loop."""

    def __init__(
        self,
        endpoint: str,
        *,
        heartbeat_s: float,
        timeout_s: float,
        join_s: float = 300.0,
        wire_key: bytes = b"",
        keys: GeneratorKeys | None = None,
        find_learner: Callable[[], Awaitable[str]] | None = None,
        on_order: Callable[[UpdateOrder], None] = lambda order: None,
    ) -> None:
        """Make a client that is not yet connected.

        Args:
            timeout_s: bound on sending a report.
            join_s: bound on the wait for the first answer.
            wire_key: key of the messages' checksums.
            keys: keys of the encrypted connection, which a tcp:// endpoint needs.
            find_learner: returns the learner's present endpoint, or "". Called while the learner is silent,
                because a restarted learner may have another address.
            on_order: called with every order when it arrives.
        """
        self.endpoint, self._find_learner, self._on_order = endpoint, find_learner, on_order
        self._heartbeat_s, self._timeout_s, self._join_s = heartbeat_s, timeout_s, join_s
        self._wire_key, self._keys = wire_key, keys
        self._hello: Hello | None = None
        self._beat: Heartbeat | None = None
        self._is_member = self._was_ordered = self._is_over = False
        self._unanswered = 0  # heartbeats and hellos since the learner's last message
        self._order: UpdateOrder | Stop | None = None
        self._arrived = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def join(self, hello: Hello) -> Welcome:
        self._hello = hello
        self._context: zmq.asyncio.Context = zmq.asyncio.Context()
        self._connect()
        self._answer: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._serve(), name="asyncrl-control")
        self._task.add_done_callback(lambda _: self._arrived.set())
        try:
            async with asyncio.timeout(self._join_s):  # `wait_for` of Python 3.11 forgets a cancellation
                return await asyncio.shield(self._answer)
        except (TimeoutError, ControlError) as error:
            await self.leave()
            if isinstance(error, ControlError):
                raise
            raise ControlError(
                f"control plane: no learner answered at {self.endpoint} within {self._join_s:g} s; "
                "check that it runs and listens there, and that this generator has the secret of this run"
            ) from error

    def _connect(self) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        try:
            connect(self._socket, self.endpoint, self._keys, max_bytes=messages.MAX_ORDER_BYTES)
        except ControlError:
            self._context.destroy(linger=0)
            raise

    async def next_order(self) -> UpdateOrder | Stop:
        """Raises ControlError if the background task has failed."""
        await self._arrived.wait()
        if self._order is None:
            assert self._task is not None
            failure = None if self._task.cancelled() else self._task.exception()
            raise ControlError(f"control plane: the connection was closed ({failure!r})") from failure
        self._arrived.clear()
        order, self._order = self._order, None
        return order

    async def report(self, report: UpdateReport) -> None:
        """Drop a report that cannot be sent in time: the learner repeats the update."""
        report = replace(report, reason=report.reason[: messages.MAX_REASON_CHARACTERS])
        deadline_s = time.monotonic() + self._timeout_s
        while not await self._send(report):
            if time.monotonic() > deadline_s:
                dropped = "the report on version %d is dropped: no learner was connected for %g s"
                log.warning(dropped, report.version, self._timeout_s)
                return
            await asyncio.sleep(_RETRY_S)

    def beat(self, heartbeat: Heartbeat) -> None:
        """Leave out metrics that are not finite: the learner would reject them."""
        finite = {name: value for name, value in heartbeat.metrics.items() if math.isfinite(value)}
        self._beat = replace(heartbeat, metrics=finite)

    async def leave(self) -> None:
        if self._task is None or self._hello is None:
            return
        self._task.cancel()
        await asyncio.wait([self._task], timeout=self._timeout_s)
        await self._say_leave()
        self._socket.close(linger=_FLUSH_MS)
        await asyncio.to_thread(self._context.term)
        self._task = None

    async def _say_leave(self) -> None:
        if self._is_member and self._hello is not None:
            self._is_member = False
            await self._send(
                Leave(generator_id=self._hello.generator_id, incarnation=self._hello.incarnation)
            )

    # --- the task ---------------------------------------------------------------------------------

    async def _serve(self) -> None:
        while not self._is_over:
            # Time in which this process was stopped, or its loop was busy, is not silence of the learner.
            if self._unanswered >= _SILENT_BEATS:
                if self._is_member:
                    log.warning(
                        "the learner is silent; sampling continues, and so do the attempts to reach it"
                    )
                    self._is_member = False
                await self._reconnect_if_moved()
            await self._send_heartbeat()
            self._unanswered += 1
            await self._listen_until(time.monotonic() + self._heartbeat_s)

    async def _reconnect_if_moved(self) -> None:
        """Connect to the learner's present endpoint if it has changed."""
        endpoint = ""
        if self._find_learner is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timeout_s):
                    endpoint = await self._find_learner()
        if endpoint not in ("", self.endpoint):
            log.warning("the learner has moved from %s to %s", self.endpoint, endpoint)
            self.endpoint = endpoint
            self._socket.close(linger=0)
            self._connect()

    async def _listen_until(self, until_s: float) -> None:
        # At least one look, because answers may have arrived while this process was stopped.
        is_late = False
        while not (is_late or self._is_over) and await self._socket.poll(
            max(until_s - time.monotonic(), 0.0) * 1000
        ):
            is_late = time.monotonic() >= until_s
            try:
                # The message that `poll` saw may be gone, together with the learner that sent it.
                await self._handle(CODEC.decode(await self._socket.recv(zmq.NOBLOCK), self._wire_key))
            except zmq.Again:
                continue
            except WireError as error:
                log.warning("a message from the learner was rejected: %s", error)

    async def _handle(self, message: FromGenerator | FromLearner) -> None:
        self._unanswered = 0
        match message:
            case Welcome():
                is_new, self._is_member = not self._is_member, True
                if not self._answer.done():
                    self._answer.set_result(message)
                if is_new:  # the learner brings weights only after a second message
                    await self._send_heartbeat()
            case Refused(reason=reason) if self._answer.done():
                self._put(Stop(reason=f"refused when coming back: {reason}"))
            case Refused(reason=reason):
                refusal = f"control plane: the learner refused this generator: {reason}"
                self._answer.set_exception(ControlRefused(refusal))
            case UnknownMember():
                self._is_member = False
                await self._send(self._current_hello())
            case UpdateOrder():
                self._was_ordered = True
                self._on_order(message)
                self._put(message)
            case Stop():
                self._put(message)
                self._is_over = True
                await self._say_leave()  # the learner waits for it
            case _:
                raise WireError(f"{type(message).__name__} is for the learner")

    def _put(self, order: UpdateOrder | Stop) -> None:
        """Set the next order, which replaces an older one, but not a stop."""
        if not isinstance(self._order, Stop):
            self._order = order
        self._arrived.set()

    async def _send_heartbeat(self) -> None:
        """Send a member's heartbeat, or the hello of a generator that is not a member."""
        await self._send(self._beat if self._is_member and self._beat is not None else self._current_hello())

    def _current_hello(self) -> Hello:
        assert self._hello is not None
        version = self._hello.version if self._beat is None else self._beat.version
        # An earlier learner's order may be on its way into an engine that still has the initial model.
        return replace(self._hello, version=-1 if self._was_ordered and version == 0 else version)

    async def _send(self, message: FromGenerator) -> bool:
        """Send, or return False if no learner is connected."""
        try:
            await self._socket.send(CODEC.encode(message, self._wire_key), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True
