"""The learner's side of the control plane: one thread, in rank 0, owns membership and schedule.

    publisher = SlotPublisher(layout, ...)
    hub = ControlHub("ipc://runs/x/control.sock", publisher, config.control, transport="slot", ...)
    publisher.publish(version, parameters, probe_logprobs)      # copies the weights; when that is done:
    hub.announce(version)                                       # does not wait for generators
    hub.members(), hub.counters()                               # snapshots, at most a tenth of a second old
    hub.stop("training is complete"); publisher.close()

One update: the publisher pins a version -> the generator gets the order, reads or fetches, and reports -> the
version is released. After a failure the next update begins after a back-off.
"""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import zmq

from asyncrl.config.resolved import config_hash, host_digest
from asyncrl.config.schema import Config
from asyncrl.config.sections import ControlConfig
from asyncrl.control.base import Heartbeat, Hello, Leave, MemberStatus, Refused, Stop, Welcome
from asyncrl.control.membership import AlreadyMember, Joined, Membership, Peers, RunIdentity
from asyncrl.control.messages import CODEC, FromLearner, Rejections, UnknownMember
from asyncrl.control.sockets import LearnerKeys, listen
from asyncrl.control.updates import Action, Begin, Release, UpdateSchedule
from asyncrl.errors import AsyncRLError, ControlError, UpdatesRefused, WireError
from asyncrl.files import socket_path
from asyncrl.hosting.placement import choose_transport
from asyncrl.hosting.progress import Attention
from asyncrl.version import __version__
from asyncrl.weights.base import Publisher, UpdateReport

log = logging.getLogger(__name__)

# Longest and shortest time between two checks of the deadlines.
_ROUND_MS, _LOOK_S = 100, 0.05
_MESSAGES_PER_ROUND = 1000
_STOP_S = 10.0
_FLUSH_MS = 1000
# Most time for members to answer the farewell.
_FAREWELL_S = 5.0
# Most welcomed newcomers that have not answered; they get weights after their second message.
MAX_GREETED = 64


class ControlHub:
    """The learner's connection to its generators; the module's docstring shows its use."""

    def __init__(
        self,
        endpoint: str,
        publisher: Publisher,
        config: ControlConfig,
        run: RunIdentity,
        *,
        transport: str,
        deadline_s: float,
        wire_key: bytes = b"",
        keys: LearnerKeys | None = None,
        on_dead: Callable[[str], object] = lambda holder: None,
        on_report: Callable[[str, UpdateReport], None] = lambda generator_id, report: None,
    ) -> None:
        """Bind the endpoint and start the thread. Raises ControlError if `endpoint` cannot be used.

        Args:
            endpoint: ipc://PATH, or tcp://ADDRESS:PORT of one interface, as for the publisher, with `keys`.
            run: a generator whose `Hello` names another one is refused.
            on_dead: revokes the leases of a generator (by holder name) that died or was replaced; called in a
                thread of its own. Its failure is logged, because leases expire anyway.
            on_report: called in the hub's thread with generator id and report of every update.
        """
        self._publisher, self._wire_key = publisher, wire_key
        self._on_dead, self._on_report = on_dead, on_report
        self._membership = Membership(run, timeout_s=config.timeout_s, challenge_s=3 * config.heartbeat_s)
        self._schedule = UpdateSchedule(transport, deadline_s, one_host=publisher.one_host)
        self._peers = Peers(heartbeat_s=config.heartbeat_s)
        self._attention = Attention()
        self._greeted: dict[str, Hello] = {}
        self._encoded: dict[str, tuple[FromLearner, bytes]] = {}  # the last order, by transport
        # Checks of the deadlines, ten to twenty a second. If the number does not grow, the thread hangs.
        self.rounds = 0
        self._looks_at_s = 0.0
        self._rejections = Rejections()
        self._announced: int | None = None
        self._stop_reason: str | None = None
        self._farewell = True
        self._failure: BaseException | None = None
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._revoker = ThreadPoolExecutor(1, thread_name_prefix="asyncrl-revoke")
        self._router, self._close = listen(endpoint, keys)
        # The endpoint to which generators connect.
        self.endpoint: str = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._take_snapshot()
        self._thread = threading.Thread(target=self._run, name="asyncrl-control", daemon=True)
        self._thread.start()

    # --- called by the learner, from any thread ---------------------------------------------------

    def announce(self, version: int) -> None:
        """Bring every generator to the newly published version; a newer version replaces an older one."""
        self.check()
        self._announced = version
        self._wake_up()

    def check(self) -> None:
        """Raise ControlError if the control plane has broken down, or no generator accepts updates. Cheap."""
        if self._failure is not None:
            died = f"the control thread died: {self._failure!r}; its traceback is in the log"
            raise ControlError(died) from self._failure
        if self._hopeless is not None:
            raise UpdatesRefused(self._hopeless)

    def members(self) -> list[MemberStatus]:
        """The generators that have joined and have neither left nor died."""
        return list(self._statuses)

    def counters(self) -> Mapping[str, float]:
        """Counts since the start, and what was measured of the last update and its probe."""
        return dict(self._counters)

    def stop(self, reason: str, *, farewell: bool = True) -> None:
        """End the thread; with `farewell`, also the generators.

        Without it, they continue, and join the next learner at the same endpoint.
        """
        self._farewell = farewell
        self._stop_reason = reason
        self._wake_up()
        self._thread.join(_STOP_S)
        if self._thread.is_alive():
            log.error("the control thread did not end within %g s; it ends with this process", _STOP_S)
        self._revoker.shutdown(wait=False)

    def _wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the buffer is full of earlier wake-ups
            self._wake.send(b"x")

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._stop_reason is None:
                self._round()
            # A connection that is closed while its other end sends loses what has not been read there.
            members = self._membership.members if self._farewell else {}
            told, until_s = set[str](), time.monotonic() + _FAREWELL_S
            while members and time.monotonic() < until_s:
                for holder in {member.holder for member in members.values()} - told:
                    if self._send(holder, Stop(reason=self._stop_reason)):
                        told.add(holder)
                self._wait()
                self._read_messages()
            if members:
                log.warning("%s did not answer the learner's farewell", ", ".join(members))
        except BaseException as error:
            self._failure = error
            raise
        finally:
            for holder in self._schedule.members:
                self._publisher.release(holder)
            self._close(_FLUSH_MS)

    def _round(self) -> None:
        self._wait()
        # A pause of this process is not silence of the generators: their heartbeats may not be queued yet.
        self._attention.look()
        self._read_messages()
        now_s = time.monotonic()
        if self._announced is not None:
            version, self._announced = self._announced, None
            self._carry_out(self._schedule.announce(version, now_s))
        # What follows looks at every member, so it must not follow every message of one.
        if now_s < self._looks_at_s:
            return
        self._looks_at_s = now_s + _LOOK_S
        for holder in self._membership.expire(self._attention.now_s):
            log.warning("generator %s has been silent too long and is counted dead", holder)
            self._remove_dead(holder)
        self._carry_out(self._schedule.tick(now_s))
        self._take_snapshot()
        self.rounds += 1

    def _wait(self) -> None:
        zmq.select([self._router, self._woken], [], [], _ROUND_MS / 1000)
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)

    def _read_messages(self) -> None:
        for _ in range(_MESSAGES_PER_ROUND):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._handle(*frames)
            except Exception as error:  # noqa: BLE001 - a bad message must not stop the handling of others
                self._rejections.add(error)

    def _handle(self, peer: bytes, data: bytes) -> None:
        now_s, member = time.monotonic(), self._peers.holder(peer)
        sender = f"the connection of {member}" if member else "a connection that is not a member"
        if not self._peers.admit(peer, now_s):
            raise WireError(f"{sender} sent too many messages")
        message = CODEC.decode(data, self._wire_key)
        if isinstance(message, UpdateReport) and member is not None:
            self._handle_report(member, message, now_s)
            return
        if not isinstance(message, Hello | Heartbeat | Leave):
            raise WireError(f"{sender} must not send the learner this message: {type(message).__name__}")
        holder = message.holder
        if (member or holder) != holder or (self._peers.peer(holder) or peer) != peer:
            raise WireError(
                f"{sender} sent a message in the name of {holder}: identity and generator_id do not match"
            )
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
            self._add(holder, now_s)

    def _welcome(self, peer: bytes, hello: Hello, now_s: float) -> None:
        holder = hello.holder
        if self._peers.holder(peer) is None and len(self._greeted) >= MAX_GREETED:
            raise WireError(
                f"{MAX_GREETED} newcomers have not answered yet; {holder} must send another hello"
            )
        transport, offered = self._schedule.common_transport(hello.transports), ", ".join(hello.transports)
        refused = Refused(
            reason=f"the generator receives weights over {offered or 'nothing'}, the learner sends over "
            f"{self._schedule.transport}; set the same weights.transport for both"
        )
        match answer := self._membership.hello(hello, self._attention.now_s) if transport else refused:
            case Refused(reason=reason):
                log.warning("generator %s was refused: %s", holder, reason)
                self._answer(peer, answer)
            case AlreadyMember():
                self._send(holder, Welcome(version=self._schedule.newest))
                # It has missed our answers: its connection may have taken an order or a report with it.
                if order := self._schedule.outstanding(holder):
                    self._send(holder, order)
                self._add(holder, now_s)
            case Joined(replaced=dead):
                log.info("generator %s joined with version %d", holder, hello.version)
                if dead is not None:
                    log.warning("generator %s has been replaced by %s and is counted dead", dead, holder)
                    self._remove_dead(dead)
                self._peers.bind(peer, holder, now_s)
                self._greeted[holder] = hello
                self._send(holder, Welcome(version=self._schedule.newest))
                if transport != self._schedule.transport:
                    log.warning(
                        "generator %s supports %s, but not %s: its weights go over %s, which is "
                        "slower; start it with the learner's weights.transport, on a device that has it",
                        *(holder, offered, self._schedule.transport, transport),
                    )

    def _add(self, holder: str, now_s: float) -> None:
        """Bring weights to a member that has answered the welcome from now on."""
        if hello := self._greeted.pop(holder, None):
            self._carry_out(self._schedule.join(holder, transports=hello.transports, now_s=now_s))

    def _handle_report(self, holder: str, report: UpdateReport, now_s: float) -> None:
        generator_id, _, _ = holder.rpartition(":")
        if not report.applied:
            log.warning("generator %s refused version %d: %s", generator_id, report.version, report.reason)
        try:
            self._on_report(generator_id, report)
        finally:
            self._carry_out(self._schedule.reported(holder, report, now_s))

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Begin(holder, transport):
                    self._order(holder, transport)
                case Release(holder):
                    self._publisher.release(holder)

    def _order(self, holder: str, transport: str) -> None:
        """Begin an update; the next tick tries again if the publisher has no version at this moment."""
        now_s = time.monotonic()
        try:
            order = self._publisher.order(holder, transport)
        except (OSError, RuntimeError) as error:  # the latter, for example, without room for a thread
            log.warning("weights for generator %s over %s: %s", holder, transport, error)
            self._carry_out(self._schedule.fail(holder, now_s))
            return
        if order is not None:
            self._schedule.ordered(holder, order, now_s)
            if not self._send(holder, order):
                self._carry_out(self._schedule.fail(holder, now_s))

    def _remove(self, holder: str) -> None:
        self._peers.release(holder)
        self._greeted.pop(holder, None)
        self._carry_out(self._schedule.remove(holder))

    def _remove_dead(self, holder: str) -> None:
        def revoke() -> None:
            try:
                self._on_dead(holder)
            except AsyncRLError:
                log.exception("the leases of %s could not be revoked; they expire anyway", holder)

        self._remove(holder)
        try:
            self._revoker.submit(revoke)
        except RuntimeError as error:  # the host cannot start the thread, which starts with the first call
            log.warning("the leases of %s are not revoked (%s); they expire anyway", holder, error)

    def _send(self, holder: str, message: FromLearner) -> bool:
        """Send to a member; False if it cannot be reached at this moment."""
        peer = self._peers.peer(holder)
        return peer is not None and self._answer(peer, message, holder)

    def _answer(self, peer: bytes, message: FromLearner, holder: str = "(not a member)") -> bool:
        try:
            # An order goes to many, and takes long: it has an entry for each tensor.
            over = getattr(message, "transport", "")
            if over not in self._encoded or self._encoded[over][0] is not message:
                self._encoded[over] = message, CODEC.encode(message, self._wire_key)
            self._router.send_multipart([peer, self._encoded[over][1]], zmq.NOBLOCK)
        except WireError as error:  # for example an order with a probe that is not finite
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
            "messages_rejected": self._rejections.count,
            **self._schedule.measured,
        }
        self._hopeless = self._schedule.hopeless


def open_hub(
    config: Config,
    publisher: Publisher,
    *,
    place: Path,
    rows: str,
    code: tuple[str, ...],
    wire_key: bytes,
    keys: LearnerKeys,
    on_dead: Callable[[str], object],
    on_report: Callable[[str, UpdateReport], None],
) -> ControlHub:
    """Open the control plane where the config says, by default at `place`. See `ControlHub`."""
    return ControlHub(
        config.control.bind or f"ipc://{socket_path(place)}",
        publisher,
        config.control,
        RunIdentity(
            release=__version__,
            config_hash=config_hash(config),
            host_digest=host_digest(config),
            rows=rows,
            code=code,
        ),
        transport=choose_transport(config.weights.transport, one_host=config.control.bind is None),
        deadline_s=config.weights.deadline_s,
        wire_key=wire_key,
        keys=keys,
        on_dead=on_dead,
        on_report=on_report,
    )
