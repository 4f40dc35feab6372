"""The learner's side of the control plane: one thread that owns the membership, the senders and the update schedule.

In the learner process, rank 0:

    publisher = SharedMemoryPublisher(layout, probe_ids=..., directory=run / "weights", deadline_s=..., interface=...)
    hub = ControlHub("ipc://runs/x/control.sock", publisher, config.control, transport="gloo",
                     deadline_s=config.weights.deadline_s, release=__version__, config_hash=..., on_dead=buffer_revoke)
    publisher.publish(version, parameters, probe_logprobs)      # a copy
    hub.announce(version)                                       # returns at once; generators follow on their own
    hub.members(), hub.counters()                               # snapshots, at most a tenth of a second old
    hub.stop("training is complete"); publisher.close()

`endpoint` is ipc://path (publisher without an interface) or tcp://ADDRESS:PORT on one interface of this host (give the
publisher that address, and the hub the run's `keys`: over a network only those who know them are heard).
`on_dead(holder)` is called from a thread of its own when a generator died or was replaced; it may take its time. A failure of
it is logged: the leases that it should revoke run out by themselves.

One update: the sender prepares -> order to the generator, and the sender starts -> both meet in their two-party group
-> the generator reports. Whatever goes wrong costs the sender its life and a back-off; see `updates`.
"""

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from asyncrl.config.schema import ControlConfig
from asyncrl.control.base import Heartbeat, Hello, Leave, MemberStatus, Refused, Stop, Welcome
from asyncrl.control.curve import LearnerKeys, guard
from asyncrl.control.membership import AlreadyMember, Joined, Membership, holder_name
from asyncrl.control.messages import CODEC, MAX_REPORT_BYTES, UnknownMember, set_options
from asyncrl.control.updates import Action, CloseSender, Deliver, Prepare, RestartSender, UpdateSchedule
from asyncrl.errors import AsyncRLError, ControlError, WireError
from asyncrl.weights.base import Failed, Publisher, Sender, Sent, UpdateOrder, UpdateReport

log = logging.getLogger(__name__)

_ROUND_MS = 100
"""Longest pause between two looks at deadlines."""
_MESSAGES_PER_ROUND = 1000
_SENDER_START_S = 60.0
"""On top of the transfer deadline, for a sender to start and to prepare: the generator samples on meanwhile."""
_STOP_S = 10.0
_FLUSH_MS = 1000
_MAX_SOCKET_PATH_BYTES = 107


class ControlHub:
    """Implements `control.base.LearnerControl`. See the module for its use."""

    def __init__(
        self,
        endpoint: str,
        publisher: Publisher,
        config: ControlConfig,
        *,
        transport: str,
        deadline_s: float,
        release: str,
        config_hash: str,
        wire_key: bytes = b"",
        keys: LearnerKeys | None = None,
        on_dead: Callable[[str], None] = lambda holder: None,
        on_report: Callable[[str, UpdateReport], None] = lambda generator_id, report: None,
    ) -> None:
        """Binds and starts the thread, in which `on_report` hears of every update.

        Raises ControlError when `endpoint` cannot be used.
        """
        self._publisher = publisher
        self._wire_key = wire_key
        self._on_dead = on_dead
        self._on_report = on_report
        self._membership = Membership(
            release=release, config_hash=config_hash, timeout_s=config.timeout_s, challenge_s=3 * config.heartbeat_s
        )
        self._schedule = UpdateSchedule(
            transport, deadline_s, preparation_s=deadline_s + _SENDER_START_S, one_host=publisher.one_host
        )
        self._senders: dict[str, Sender] = {}
        self._killed = 0
        self._rejected = 0
        self._announced: int | None = None
        self._stop_reason: str | None = None
        self._farewell = True
        self._failure: BaseException | None = None
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._revoker = ThreadPoolExecutor(1, thread_name_prefix="asyncrl-revoke")
        self._context: zmq.Context[Any] = zmq.Context()
        self._gate: ThreadAuthenticator | None = None
        self._router = self._bind(endpoint, keys)
        self.endpoint: str = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        """What generators connect to."""
        self._take_snapshot()
        self._thread = threading.Thread(target=self._run, name="asyncrl-control", daemon=True)
        self._thread.start()

    # --- what the learner may ask; any thread ------------------------------------------------------------------------

    def announce(self, version: int) -> None:
        """See `LearnerControl`. Raises ControlError when the control plane has broken down."""
        self.check()
        self._announced = version
        self._wake_up()

    def check(self) -> None:
        """See `LearnerControl`."""
        if self._failure is not None:
            raise ControlError(f"the control thread died: {self._failure!r}; its traceback is in the log") from self._failure

    def members(self) -> list[MemberStatus]:
        """See `LearnerControl`."""
        return list(self._statuses)

    def counters(self) -> Mapping[str, float]:
        """See `LearnerControl`; also `messages_rejected`."""
        return dict(self._counters)

    def stop(self, reason: str, *, farewell: bool = True) -> None:
        """See `LearnerControl`. Kills the senders."""
        self._farewell = farewell
        self._stop_reason = reason
        self._wake_up()
        self._thread.join(_STOP_S)
        if self._thread.is_alive():
            log.error("the control thread did not end within %g s; it ends with this process", _STOP_S)
        self._revoker.shutdown(wait=False)

    def _wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full of wake-ups already
            self._wake.send(b"x")

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._stop_reason is None:
                self._round()
            for member in self._membership.members.values() if self._farewell else ():
                self._send(member.holder, Stop(reason=self._stop_reason))
        except BaseException as error:
            self._failure = error
            raise
        finally:
            for sender in self._senders.values():
                sender.close()
            self._router.close(linger=_FLUSH_MS)
            self._close_context()

    def _close_context(self) -> None:
        if self._gate is not None:
            self._gate.stop()
        self._context.term()

    def _round(self) -> None:
        self._wait()
        # Messages first: after a pause of this process nobody may be counted dead whose heartbeat is in the queue.
        self._read_messages()
        now_s = time.monotonic()
        for holder, sender in self._senders_up().items():
            for reply in sender.replies():
                self._hear_sender(holder, reply, now_s)
        for holder in self._membership.expire(now_s):
            log.warning("generator %s has been silent too long and is counted dead", holder)
            self._bury(holder)
        if self._announced is not None:
            version, self._announced = self._announced, None
            self._obey(self._schedule.announce(version, now_s))
        self._obey(self._schedule.tick(now_s))
        self._take_snapshot()

    def _wait(self) -> None:
        poller = zmq.Poller()
        for readable in (self._router, self._woken, *self._senders_up().values()):
            poller.register(readable, zmq.POLLIN)
        poller.poll(_ROUND_MS)
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)

    def _senders_up(self) -> dict[str, Sender]:
        """A dead one has nothing to say, and its end of stream would wake this thread without a pause."""
        return {holder: sender for holder, sender in self._senders.items() if self._schedule.has_sender(holder)}

    def _read_messages(self) -> None:
        for _ in range(_MESSAGES_PER_ROUND):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._handle(*frames)
            except (WireError, TypeError) as error:
                self._rejected += 1
                log.warning("control plane: a message was rejected: %s", error)

    def _handle(self, identity: bytes, data: bytes) -> None:
        message = CODEC.decode(data, self._wire_key)
        holder, now_s = identity.decode(errors="replace"), time.monotonic()
        if isinstance(message, UpdateReport):
            self._hear_report(holder, message, now_s)
            return
        if not isinstance(message, Hello | Heartbeat | Leave):
            raise WireError(f"{type(message).__name__} is for generators, {holder} sent it to the learner")
        if holder != holder_name(message.generator_id, message.incarnation):
            raise WireError(f"{holder} speaks for {message.generator_id}:{message.incarnation}; everybody speaks for himself")
        if isinstance(message, Hello):
            self._welcome(holder, message, now_s)
        elif isinstance(message, Leave):
            if self._membership.leave(message) is not None:
                log.info("generator %s left", holder)
                self._obey(self._schedule.remove(holder))
        elif self._membership.heartbeat(message, now_s):
            self._send(holder, Welcome(version=self._schedule.newest))
        else:
            self._send(holder, UnknownMember())

    def _welcome(self, holder: str, hello: Hello, now_s: float) -> None:
        transport = self._schedule.common_transport(hello.transports)
        answer = self._membership.hello(hello, now_s) if transport else self._no_transport(hello)
        if isinstance(answer, Refused):
            log.warning("generator %s was refused: %s", holder, answer.reason)
            self._send(holder, answer)
        elif isinstance(answer, AlreadyMember):
            self._send(holder, Welcome(version=self._schedule.newest))
        elif isinstance(answer, Joined):
            log.info("generator %s joined with version %d", holder, hello.version)
            if answer.replaced is not None:
                log.warning("generator %s has been replaced by %s and is counted dead", answer.replaced, holder)
                self._bury(answer.replaced)
            self._send(holder, Welcome(version=self._schedule.newest))
            if transport != self._schedule.transport:
                log.warning(
                    "generator %s takes %s but not %s: its weights go over %s, which is slower; start it with "
                    "the learner's weights.transport, on a device that has it",
                    *(holder, ", ".join(hello.transports), self._schedule.transport, transport),
                )
            self._senders[holder] = self._publisher.open_sender(hello.tensor_parallel)
            self._obey(self._schedule.join(holder, version=hello.version, transports=hello.transports, now_s=now_s))

    def _no_transport(self, hello: Hello) -> Refused:
        return Refused(
            reason=f"generator takes weights over {', '.join(hello.transports) or 'nothing'}, the learner sends over "
            f"{self._schedule.transport}; set the same weights.transport for both"
        )

    def _hear_report(self, holder: str, report: UpdateReport, now_s: float) -> None:
        if not report.applied:
            log.warning("generator %s did not apply version %d: %s", holder, report.version, report.reason)
        self._on_report(holder.rpartition(":")[0], report)
        self._obey(self._schedule.reported(holder, report, now_s))

    def _hear_sender(self, holder: str, reply: UpdateOrder | Sent | Failed, now_s: float) -> None:
        if isinstance(reply, UpdateOrder):
            self._obey(self._schedule.prepared(holder, reply, now_s))
        elif isinstance(reply, Sent):
            self._obey(self._schedule.sent(holder, now_s))
        else:
            log.warning("sender of generator %s failed: %s", holder, reply.reason)
            self._obey(self._schedule.sender_failed(holder, now_s))

    def _obey(self, actions: list[Action]) -> None:
        for action in actions:
            sender = self._senders[action.holder]
            match action:
                case Prepare(holder, transport):
                    if not sender.prepare(transport):
                        self._schedule.postpone(holder)
                case Deliver(holder, order):
                    if self._send(holder, order):
                        sender.transfer()
                    else:
                        self._obey(self._schedule.sender_failed(holder, time.monotonic()))
                case RestartSender():
                    self._killed += 1
                    sender.restart()
                case CloseSender(holder):
                    sender.close()
                    del self._senders[holder]

    def _bury(self, holder: str) -> None:
        self._obey(self._schedule.remove(holder))
        self._revoker.submit(self._revoke, holder)

    def _revoke(self, holder: str) -> None:
        try:
            self._on_dead(holder)
        except AsyncRLError:
            log.exception("the leases of %s could not be revoked; they run out by themselves", holder)

    def _send(self, holder: str, message: Any) -> bool:
        """False when the generator cannot be reached at this moment."""
        try:
            self._router.send_multipart([holder.encode(), CODEC.encode(message, self._wire_key)], zmq.NOBLOCK)
        except zmq.Again:
            reason = "its queue is full"
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            reason = "it is not connected"
        else:
            return True
        log.warning("%s for generator %s was not sent: %s", type(message).__name__, holder, reason)
        return False

    def _take_snapshot(self) -> None:
        self._statuses = self._membership.statuses(time.monotonic())
        self._counters = {
            "joined": self._membership.joined,
            "left": self._membership.left,
            "died": self._membership.died,
            "updates": self._schedule.updates,
            "updates_failed": self._schedule.failed,
            "senders_killed": self._killed,
            "probe_max": self._schedule.probe_max,
            "messages_rejected": self._rejected,
        }

    def _bind(self, endpoint: str, keys: LearnerKeys | None) -> "zmq.Socket[bytes]":
        _require_private(endpoint, keys)
        router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        set_options(router, max_bytes=MAX_REPORT_BYTES)
        if endpoint.startswith("tcp://") and keys is not None:
            self._gate = guard(router, keys)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            router.bind(endpoint)
        except zmq.ZMQError as error:
            router.close()
            self._close_context()
            raise ControlError(
                f"control plane: cannot listen on {endpoint}: {error}; set control.bind to a free address"
            ) from error
        if endpoint.startswith("ipc://"):
            os.chmod(endpoint.removeprefix("ipc://"), 0o600)
        return router


def _require_private(endpoint: str, keys: LearnerKeys | None) -> None:
    """Raises ControlError for an address that everybody can reach, or that the system cannot have."""
    scheme, _, address = endpoint.partition("://")
    if scheme == "ipc" and len(os.fsencode(address)) > _MAX_SOCKET_PATH_BYTES:
        raise ControlError(
            f"control plane: socket path {address} has {len(os.fsencode(address))} bytes, the system allows "
            f"{_MAX_SOCKET_PATH_BYTES}; use a shorter run directory or control.bind"
        )
    if scheme not in ("ipc", "tcp") or (scheme == "tcp" and address.rpartition(":")[0] in ("*", "0.0.0.0", "[::]", "")):
        raise ControlError(
            f"control plane: {endpoint} is no address of one interface; use ipc://PATH, or tcp://ADDRESS:PORT with this "
            "host's address in the network of the generators"
        )
    if scheme == "tcp" and keys is None:
        raise ControlError(f"control plane: {endpoint} would listen to everybody; over a network the run's keys are needed")
