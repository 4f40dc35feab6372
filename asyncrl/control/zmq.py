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
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import zmq

from asyncrl.config.schema import ControlConfig
from asyncrl.control.base import Heartbeat, Hello, Leave, MemberStatus, Refused, Stop, Welcome
from asyncrl.control.curve import LearnerKeys
from asyncrl.control.listening import listen
from asyncrl.control.membership import AlreadyMember, Joined, Membership, holder_name
from asyncrl.control.messages import CODEC, Complaints, UnknownMember
from asyncrl.control.peers import Peers
from asyncrl.control.updates import MOST_REFUSALS, Action, CloseSender, Deliver, Prepare, RestartSender, UpdateSchedule
from asyncrl.errors import AsyncRLError, ControlError, UpdatesRefused, WireError
from asyncrl.progress import Attention
from asyncrl.weights.base import Failed, Publisher, Sender, Sent, UpdateOrder, UpdateReport

log = logging.getLogger(__name__)

# Longest pause between two looks at deadlines.
_ROUND_MS = 100
_MESSAGES_PER_ROUND = 1000
# On top of the transfer deadline, for a sender to start and to prepare: the generator samples on meanwhile.
_SENDER_START_S = 60.0
_STOP_S = 10.0
_FLUSH_MS = 1000
MAX_MEMBERS = 1024
# Newcomers at a time that have been welcomed and have not spoken again: only who does gets a sender, which is
# a process.
MAX_GREETED = 64


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
        host_digest: str = "",
        rows: str = "",
        wire_key: bytes = b"",
        keys: LearnerKeys | None = None,
        on_dead: Callable[[str], None] = lambda holder: None,
        on_report: Callable[[str, UpdateReport], None] = lambda generator_id, report: None,
    ) -> None:
        """Binds and starts the thread, in which `on_report` hears of every update.

        Raises ControlError when `endpoint` cannot be used.
        """
        self._publisher, self._wire_key = publisher, wire_key
        self._on_dead = on_dead
        self._on_report = on_report
        patience = {"timeout_s": config.timeout_s, "challenge_s": 3 * config.heartbeat_s}
        self._membership = Membership(release=release, config_hash=config_hash, host_digest=host_digest, rows=rows, **patience)
        self._schedule = UpdateSchedule(
            transport, deadline_s, preparation_s=deadline_s + _SENDER_START_S, one_host=publisher.one_host
        )
        self._peers, self._attention = Peers(heartbeat_s=config.heartbeat_s), Attention(lambda: time.monotonic())
        self._greeted: dict[str, Hello] = {}
        self._senders: dict[str, Sender] = {}
        self._killed = self._not_started = 0
        self.rounds = 0
        """Of the thread: it grows ten times a second while the thread gets on."""
        self._complaints = Complaints()
        self._announced: int | None = None
        self._stop_reason: str | None = None
        self._farewell = True
        self._failure: BaseException | None = None
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._revoker = ThreadPoolExecutor(1, thread_name_prefix="asyncrl-revoke")
        self._context: zmq.Context[Any] = zmq.Context()
        try:
            self._router, self._gate = listen(self._context, endpoint, keys)
        except ControlError:
            self._context.term()
            raise
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
        if self._hopeless is not None:
            raise UpdatesRefused(
                f"every generator refused {MOST_REFUSALS} updates in a row, so none can sample: {self._hopeless}"
            )

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
            if self._gate is not None:
                self._gate.stop()
            self._context.term()

    def _round(self) -> None:
        self._wait()
        # A pause of this process is nobody's silence: the heartbeats of that time may not have reached ZeroMQ's queue yet.
        self._attention.look()
        self._read_messages()
        now_s = time.monotonic()
        for holder, sender in self._senders_up().items():
            for reply in sender.replies():
                self._hear_sender(holder, reply, now_s)
        for holder in self._membership.expire(self._attention.now_s):
            log.warning("generator %s has been silent too long and is counted dead", holder)
            self._bury(holder)
        if self._announced is not None:
            version, self._announced = self._announced, None
            self._obey(self._schedule.announce(version, now_s))
        self._obey(self._schedule.tick(now_s))
        self._take_snapshot()
        self.rounds += 1

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
            except Exception as error:  # noqa: BLE001 - whatever one message does, the others are heard
                self._complaints.add(error)

    def _handle(self, peer: bytes, data: bytes) -> None:
        now_s = time.monotonic()
        if not self._peers.admit(peer, now_s):
            raise WireError(f"{self._peers.holder(peer) or 'those who are no members'} said too much at once")
        message, member = CODEC.decode(data, self._wire_key), self._peers.holder(peer)
        if isinstance(message, UpdateReport):
            if member is None:
                raise WireError(f"a report on version {message.version} of somebody who is no member")
            self._hear_report(member, message, now_s)
            return
        if not isinstance(message, Hello | Heartbeat | Leave):
            raise WireError(f"{type(message).__name__} is for generators, {member} sent it to the learner")
        holder = holder_name(message.generator_id, message.incarnation)
        if (member or holder) != holder or (self._peers.peer(holder) or peer) != peer:
            raise WireError(f"{member or 'somebody'} speaks for {holder}; every generator speaks for itself")
        if isinstance(message, Hello):
            self._welcome(peer, message, now_s)
        elif member is None:
            self._answer(peer, UnknownMember())
        elif isinstance(message, Leave):
            self._membership.leave(message)
            log.info("generator %s left", holder)
            self._remove(holder)
        else:
            self._membership.heartbeat(message, self._attention.now_s)
            self._send(holder, Welcome(version=self._schedule.newest))
            self._begin_to_serve(holder, now_s)

    def _welcome(self, peer: bytes, hello: Hello, now_s: float) -> None:
        holder = holder_name(hello.generator_id, hello.incarnation)
        if self._peers.holder(peer) is None and len(self._greeted) >= MAX_GREETED:
            raise WireError(f"{MAX_GREETED} newcomers have been welcomed and said nothing since; {holder} has to call again")
        transport = self._schedule.common_transport(hello.transports)
        answer = self._objection(hello, transport) or self._membership.hello(hello, self._attention.now_s)
        if isinstance(answer, Refused):
            log.warning("generator %s was refused: %s", holder, answer.reason)
            self._answer(peer, answer)
        elif isinstance(answer, AlreadyMember):
            self._send(holder, Welcome(version=self._schedule.newest))
            self._begin_to_serve(holder, now_s)
        elif isinstance(answer, Joined):
            log.info("generator %s joined with version %d", holder, hello.version)
            if answer.replaced is not None:
                log.warning("generator %s has been replaced by %s and is counted dead", answer.replaced, holder)
                self._bury(answer.replaced)
            self._peers.bind(peer, holder, now_s)
            self._greeted[holder] = hello
            self._send(holder, Welcome(version=self._schedule.newest))
            if transport != self._schedule.transport:
                log.warning(
                    "generator %s takes %s but not %s: its weights go over %s, which is slower; start it with "
                    "the learner's weights.transport, on a device that has it",
                    *(holder, ", ".join(hello.transports), self._schedule.transport, transport),
                )

    def _begin_to_serve(self, holder: str, now_s: float) -> None:
        """It has heard the welcome and speaks again: from now on it has a sender."""
        hello = self._greeted.pop(holder, None)
        if hello is None:
            return
        try:
            self._senders[holder] = self._publisher.open_sender(hello.tensor_parallel)
        except OSError as error:
            self._greeted[holder] = hello  # its next sign of life tries again
            self._no_sender(holder, error)
            return
        self._obey(self._schedule.join(holder, version=hello.version, transports=hello.transports, now_s=now_s))

    def _objection(self, hello: Hello, transport: str | None) -> Refused | None:
        if transport is None:
            return Refused(
                reason=f"generator takes weights over {', '.join(hello.transports) or 'nothing'}, the learner sends over "
                f"{self._schedule.transport}; set the same weights.transport for both"
            )
        members = self._membership.members
        if len(members) >= MAX_MEMBERS and hello.generator_id not in members:
            return Refused(
                reason=f"the run has {MAX_MEMBERS} generators, each with a process that sends to it; no more are let in"
            )
        return None

    def _hear_report(self, holder: str, report: UpdateReport, now_s: float) -> None:
        if not report.applied:
            log.warning("generator %s refused version %d: %s", holder.rpartition(":")[0], report.version, report.reason)
        try:
            self._on_report(holder.rpartition(":")[0], report)
        finally:
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
                case RestartSender(holder):
                    self._killed += 1
                    try:
                        sender.restart()
                    except OSError as error:
                        self._no_sender(holder, error)
                        self._obey(self._schedule.sender_failed(holder, time.monotonic()))
                case CloseSender(holder):
                    sender.close()
                    del self._senders[holder]

    def _no_sender(self, holder: str, error: OSError) -> None:
        self._not_started += 1
        log.warning(
            "the sender of generator %s cannot be started and is tried again: %s; this host may lack memory, processes "
            "(ulimit -u), open files (ulimit -n) or room on its disk",
            *(holder, error),
        )

    def _remove(self, holder: str) -> None:
        self._peers.release(holder)
        self._greeted.pop(holder, None)
        self._obey(self._schedule.remove(holder))

    def _bury(self, holder: str) -> None:
        self._remove(holder)
        try:
            self._revoker.submit(self._revoke, holder)
        except RuntimeError as error:  # its thread is started by the first call, where this host may lack room for one
            log.warning("the leases of %s are not revoked (%s); they run out by themselves", holder, error)

    def _revoke(self, holder: str) -> None:
        try:
            self._on_dead(holder)
        except AsyncRLError:
            log.exception("the leases of %s could not be revoked; they run out by themselves", holder)

    def _send(self, holder: str, message: Any) -> bool:
        """To a member. False when it cannot be reached at this moment."""
        peer = self._peers.peer(holder)
        return peer is not None and self._answer(peer, message, holder)

    def _answer(self, peer: bytes, message: Any, holder: str = "that is no member") -> bool:
        try:
            self._router.send_multipart([peer, CODEC.encode(message, self._wire_key)], zmq.NOBLOCK)
        except WireError as error:  # such as an order with a probe that is not finite
            reason = str(error)
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
        self._statuses = self._membership.statuses(self._attention.now_s)
        self._counters: dict[str, float] = {
            "joined": self._membership.joined,
            "left": self._membership.left,
            "died": self._membership.died,
            "updates": self._schedule.updates,
            "updates_failed": self._schedule.failed,
            "senders_killed": self._killed,
            "senders_not_started": self._not_started,
            "messages_rejected": self._complaints.count,
        }
        if self._schedule.probe_max is not None:
            self._counters["probe_max"] = self._schedule.probe_max
        self._hopeless = self._schedule.hopeless
