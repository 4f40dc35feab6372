"""Where the hosts of a learner meet: a socket between the processes that start their ranks, without torch.

    host 0    lead = LeadHost(terms, keys)
    host 1..  host = FollowerHost(terms, keys, number)
    each      port = host.meet()       all are there and agree; their ranks meet at this port of host 0
              host.look()              continually: None, or the status with which other hosts have ended
              host.finish(status)      the ranks here have ended

One attempt to train is one object on each host. It is over on all as soon as a rank fails on one of them, or
one is silent for too long. Then the supervisor of each host starts the next one, and all meet again.
"""

import contextlib
import logging
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import zmq

from asyncrl.config.addresses import host_of
from asyncrl.control.base import Refused
from asyncrl.control.messages import Rejections
from asyncrl.control.sockets import MAX_REPORT_BYTES, GeneratorKeys, LearnerKeys, connect, listen
from asyncrl.errors import RunError, WireError
from asyncrl.files import with_cure
from asyncrl.hosting.progress import Attention, beat, begin
from asyncrl.hosting.rank_group import free_port
from asyncrl.hosting.workers import ending
from asyncrl.version import __version__
from asyncrl.wire.codec import MessageCodec

log = logging.getLogger(__name__)

OVER = 1  # status of an attempt that other hosts have ended: it is started again
_PAUSE_S = 0.05
# Most time for the other end to answer the farewell.
_FAREWELL_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the hosts of a learner agree on."""

    endpoint: str  # at which host 0 listens
    wire_key: bytes
    config: str  # hash of what ranks read
    hosts: int
    # Returns the path of a file beside the checkpoints, with which a host proves that these are shared.
    probe: Callable[[str], Path]
    heartbeat_s: float
    silent_s: float
    pending_s: float
    release: str = __version__


@dataclass(frozen=True, slots=True)
class Arrival:
    """host -> lead, until the meeting."""

    host: int
    where: str
    release: str
    config: str
    token: str  # names its file


@dataclass(frozen=True, slots=True)
class Beat:
    """Both ways."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """lead -> hosts: all are there, and their ranks meet at this port."""

    port: int


@dataclass(frozen=True, slots=True)
class Ended:
    """Both ways: the ranks of the sender have ended with this status."""

    status: int


Message = Arrival | Beat | Meeting | Ended | Refused
CODEC: MessageCodec[Message] = MessageCodec(get_args(Message))


@dataclass(slots=True)
class _Host:
    """A host that has arrived."""

    number: int
    where: str
    peer: bytes
    heard_s: float
    has_ended: bool = False


class LeadHost(contextlib.AbstractContextManager["LeadHost"]):
    """The end of host 0, which has rank 0."""

    def __init__(self, terms: Terms, keys: LearnerKeys) -> None:
        """Listen. Raises ControlError if that is not possible."""
        self._terms, self._hosts = terms, dict[int, _Host]()
        self._has_met, self._over, self._status = False, "", OVER
        self._said: Message = Beat()  # to all hosts, and again whenever they speak
        self._attention, self._rejections = Attention(), Rejections()
        self._router, self._close = listen(terms.endpoint, keys)

    def meet(self) -> int:
        """Wait until all hosts are there, and let all begin. Raises RunError after `pending_s`."""
        begin("wait for the learner's other hosts")
        begun_s, endpoint = self._attention.look(), self._terms.endpoint
        while missing := [f"learner-{n}" for n in range(1, self._terms.hosts) if n not in self._hosts]:
            if self._attention.look() > begun_s + self._terms.pending_s:
                raise RunError(
                    f"{', '.join(missing)} did not come to {endpoint} within {self._terms.pending_s:g} s; "
                    "see RUN/logs, check that it reaches that address, or raise cluster.pending_s"
                )
            beat()
            time.sleep(_PAUSE_S)
            self._read()
            self._hosts = {n: host for n, host in self._hosts.items() if not self._is_silent(host)}
        port = free_port(host_of(endpoint))
        self._has_met, self._said = True, Meeting(port)
        for host in self._hosts.values():
            self._send(host.peer, self._said)
        return port

    def look(self) -> int | None:
        """Return `OVER` once another host has ended the attempt."""
        self._read()
        for host in self._hosts.values():
            if not host.has_ended and self._is_silent(host):
                silent_s = self._attention.now_s - host.heard_s
                self._over = f"learner-{host.number} ({host.where}) has been silent for {silent_s:.0f} s"
        if not self._over:
            return None
        log.error("%s: the ranks of all hosts end, and meet again", self._over)
        return OVER

    def finish(self, status: int) -> int:
        """Tell the others in the end that the ranks here have ended with `status`, and return that."""
        self._status = status
        return status

    def _is_silent(self, host: _Host) -> bool:
        return self._attention.look() - host.heard_s > self._terms.silent_s

    def _read(self) -> None:
        while True:
            try:
                peer, data = self._router.recv_multipart(zmq.NOBLOCK)
                self._handle(peer, CODEC.decode(data, self._terms.wire_key))
            except zmq.Again:
                return
            except (WireError, ValueError) as error:
                self._rejections.add(error)

    def _handle(self, peer: bytes, message: Message) -> None:
        host = next((host for host in self._hosts.values() if host.peer == peer), None)
        match message:
            case Beat() | Arrival() if host is not None:
                host.heard_s = self._attention.look()
                self._send(peer, self._said)  # a connection that broke may have lost it
            case Arrival(host=number):
                if refused := self._unfit(message):
                    log.warning("a host was refused: %s", refused)
                    self._send(peer, Refused(reason=refused))
                elif self._has_met and not ((known := self._hosts.get(number)) and known.has_ended):
                    self._over = f"learner-{number} has started again"
                else:
                    if not self._has_met:
                        self._hosts[number] = _Host(number, message.where, peer, self._attention.look())
                    self._send(peer, Beat())
            case Ended(status=status) if host is not None:
                self._send(peer, message)  # which the host repeats
                if not self._has_met:
                    del self._hosts[host.number]
                    return
                host.has_ended = True
                if status:  # else rank 0 may still evaluate, export and push
                    self._over = f"the ranks of learner-{host.number} have ended ({ending(status)})"
            case _:  # it comes from an attempt that is over
                self._send(peer, Ended(OVER))

    def _unfit(self, arrival: Arrival) -> str:
        """Say why a host cannot take part; empty if it can."""
        who, known = f"learner-{arrival.host} ({arrival.where})", self._hosts.get(arrival.host)
        if arrival.release != self._terms.release:
            return (
                f"{who} has asyncrl {arrival.release}, learner-0 has {self._terms.release}; install the same"
            )
        if arrival.config != self._terms.config:
            return f"{who} has another config than learner-0; give both the same file"
        if not (probe := self._terms.probe(arrival.token)).is_file():
            found = f"{who} has written {probe}, which learner-0 does not see"
            return f"{found}; set run.root to a directory that the hosts of the learner share"
        # The connection of a host that has ended is closed.
        if known is not None and self._send(known.peer, Beat()):
            return f"{who} is there already, at {known.where}; give each host a --host of its own"
        return ""

    def _send(self, peer: bytes, message: Message) -> bool:
        """Send to a host; False if it is not connected."""
        try:
            self._router.send_multipart([peer, CODEC.encode(message, self._terms.wire_key)], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def __exit__(self, *_: object) -> None:
        self._said = Ended(self._status)
        for host in self._hosts.values():
            self._send(host.peer, self._said)
        # A connection that is closed while its other end sends loses what has not been read there.
        until_s = time.monotonic() + _FAREWELL_S
        while time.monotonic() < until_s and not all(
            host.has_ended or self._is_silent(host) for host in self._hosts.values()
        ):
            time.sleep(_PAUSE_S)
            self._read()
        self._close(0)


class FollowerHost(contextlib.AbstractContextManager["FollowerHost"]):
    """The end of every other host."""

    def __init__(self, terms: Terms, keys: GeneratorKeys, number: int) -> None:
        """Call host 0, which may come later."""
        self._terms, self._number, self._token = terms, number, secrets.token_hex(16)
        self._heard: Message = Beat()
        self._heard_s, self._spoken_s, self._status = 0.0, float("-inf"), OVER
        self._attention = Attention()
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        connect(self._socket, terms.endpoint, keys, max_bytes=MAX_REPORT_BYTES)

    def meet(self) -> int:
        """Wait for host 0 to let all begin. Raises RunError if it refuses, or is silent for `pending_s`."""
        begin("wait for the learner's first host")
        terms, where = self._terms, socket.gethostname()
        arrival = Arrival(self._number, where, terms.release, terms.config, self._token)
        probe = self._terms.probe(self._token)
        try:
            while not isinstance(self._heard, Meeting):
                probe.touch()
                self._exchange(arrival)
                if isinstance(self._heard, Refused):
                    raise RunError(self._heard.reason)
                if self._silent_s > self._terms.pending_s:
                    raise RunError(
                        f"no learner answered at {self._terms.endpoint} for {self._terms.pending_s:g} s; "
                        "check that it runs and that this host reaches it, or raise cluster.pending_s"
                    )
                time.sleep(_PAUSE_S)
        except OSError as error:
            raise RunError(f"learner-{self._number} cannot write {with_cure(error, probe)}") from error
        finally:
            with contextlib.suppress(OSError):
                probe.unlink(missing_ok=True)
        return self._heard.port

    def look(self) -> int | None:
        """Return the status of the ranks of host 0 once they have ended, or `OVER` if it is silent."""
        self._exchange(Beat())
        if isinstance(self._heard, Ended):
            return self._heard.status
        if self._silent_s <= self._terms.silent_s:
            return None
        log.error("learner-0 has been silent for %.0f s: the ranks here end", self._silent_s)
        return OVER

    def finish(self, status: int) -> int:
        """End the attempt with a status of the ranks here; after 0, with that of the ranks of host 0."""
        self._status = status  # also if a signal ends the wait for rank 0
        while not status and (over := self.look()) is None:
            time.sleep(_PAUSE_S)
        self._status = status or over or 0
        return self._status

    @property
    def _silent_s(self) -> float:
        return self._attention.look() - self._heard_s

    def _exchange(self, message: Message) -> None:
        """Send the message if it is time for the next one, and read what host 0 has sent."""
        beat()
        if self._attention.look() >= self._spoken_s + self._terms.heartbeat_s:
            self._spoken_s = self._attention.now_s
            self._send(message)
        with contextlib.suppress(zmq.Again):
            while True:
                heard = CODEC.decode(self._socket.recv(zmq.NOBLOCK), self._terms.wire_key)
                self._heard_s = self._attention.now_s
                if not isinstance(heard, Beat):
                    self._heard = heard
                    if isinstance(heard, Ended):
                        self._send(heard)  # host 0 waits for it
                    return

    def _send(self, message: Message) -> None:
        with contextlib.suppress(zmq.Again):  # host 0 is away
            self._socket.send(CODEC.encode(message, self._terms.wire_key), zmq.NOBLOCK)

    def __exit__(self, *_: object) -> None:
        self._send(Ended(self._status))
        until_s = time.monotonic() + min(_FAREWELL_S, self._terms.silent_s - self._silent_s)
        while not isinstance(self._heard, Ended) and time.monotonic() < until_s:
            time.sleep(_PAUSE_S)
            self._exchange(Ended(self._status))
        self._socket.close()
        self._context.term()
