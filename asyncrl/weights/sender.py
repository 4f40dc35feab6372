"""The sender processes, one per generator, and the fork server that they come from.

`python -m asyncrl.weights.sender <socket fd> <learner pid>` is the fork server. It imports what a sender
needs, then forks a sender for every channel (a socket) that the learner passes to it. So a sender starts
within milliseconds, and a thousand senders share the memory of one.

A sender owns the transfer group, so a failure in the group can end the sender but not the learner. The
messages on its channel are framed as in `asyncrl.workers`:

    learner -> sender   {setup}                                              once
                        {op: prepare, job, transport, slot, checksums}
                        {op: transfer, job}
    sender -> learner   {op: forked, job: null} with a pidfd, by which it can be killed         once
                        {op: prepared, job, details} | {op: sent, job, seconds} | {op: failed, job, reason}

Senders die with the fork server, and the fork server dies with the learner.
"""

import contextlib
import logging
import os
import signal
import socket
import sys
import time
from typing import Any

import msgpack

from asyncrl.errors import TransferError
from asyncrl.processes import die_with_parent
from asyncrl.unpickling import refuse_pickles_from_wires
from asyncrl.weights.layout import Layout
from asyncrl.weights.slots import open_slot
from asyncrl.weights.transports import GlooTransport, Job, SenderSetup, Transport
from asyncrl.workers import pack, receive

log = logging.getLogger(__name__)


class _Sender:
    def __init__(self, channel: socket.socket) -> None:
        self._channel, self._commands = channel, channel.makefile("rb")
        plain = self._read()
        self._setup = SenderSetup(**{**plain, "layout": Layout.from_plain(plain["layout"])})
        self._transports: dict[str, Transport] = {}
        self._transport: Transport | None = None
        self._job: Job | None = None

    def serve(self) -> None:
        """Answer commands until the learner closes the socket."""
        while True:
            command = self._read()
            try:
                reply = self._prepare(command) if command["op"] == "prepare" else self._transfer()
            except TransferError as error:
                reply = {"op": "failed", "reason": str(error)}
            self._channel.sendall(pack({**reply, "job": command["job"]}))

    def _prepare(self, command: dict[str, Any]) -> dict[str, Any]:
        name = command["transport"]
        # It stays as it is until the transfer is over: the learner counts this reader.
        slot = open_slot(command["slot"], self._setup.layout.total_bytes, device=0)
        if name not in self._transports:
            self._transports[name] = _make_transport(name, self._setup)
        self._transport = self._transports[name]
        checksums = tuple(command["checksums"])
        self._job = Job(buffer=slot.buffer, checksums=checksums)
        return {"op": "prepared", "details": self._transport.prepare(self._job)}

    def _transfer(self) -> dict[str, Any]:
        assert self._transport is not None and self._job is not None, "transfer without prepare"
        started_s = time.monotonic()
        self._transport.transfer(self._job)
        return {"op": "sent", "seconds": time.monotonic() - started_s}

    def _read(self) -> dict[str, Any]:
        message: dict[str, Any] = msgpack.unpackb(receive(self._commands))
        return message


def _make_transport(name: str, setup: SenderSetup) -> Transport:
    """Raises TransferError for an unknown name. GPU transports are imported only where they are used."""
    if name == "gloo":
        return GlooTransport(setup)
    if name == "nccl":
        from asyncrl.weights.nccl import NcclTransport

        return NcclTransport(setup)
    raise TransferError(f"transport {name!r} needs no sender; senders know gloo and nccl")


def _fork_each(requests: socket.socket) -> socket.socket | None:
    """Fork a sender per channel that arrives; returns the channel in each sender, None in this process."""
    signal.signal(signal.SIGCHLD, lambda number, frame: _reap())
    own = os.getpid()
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, 1, 1)
        if not request:
            return None
        if not descriptors:  # this process has too many open files; the kernel has closed this one
            log.error("a sender is not forked: too many open files (ulimit -n)")
            continue
        channel = socket.socket(fileno=descriptors[0])
        try:
            pid = os.fork()
        except OSError as error:  # the learner sees that the channel has ended, and asks again later
            log.error("a sender is not forked: %s", error)
            channel.close()
            continue
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            requests.close()
            die_with_parent(own)
            return channel
        channel.close()


def _reap() -> None:
    """Log why senders ended; the learner sees only that their channels have ended."""
    with contextlib.suppress(ChildProcessError):  # there is no child
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            status = os.waitstatus_to_exitcode(ended[1])
            if status not in (0, -signal.SIGKILL):  # the learner ends senders by SIGKILL
                log.error("sender process %d ended with status %d", ended[0], status)


def main() -> None:
    """Entry point of the fork server and of the senders that it forks."""
    die_with_parent(int(sys.argv[2]))
    refuse_pickles_from_wires()
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        channel = _fork_each(requests)
    if channel is not None:
        with channel, contextlib.suppress(EOFError, ConnectionError):  # the learner has closed it
            own = os.pidfd_open(os.getpid())
            socket.send_fds(channel, [pack({"op": "forked", "job": None})], [own])
            os.close(own)
            _Sender(channel).serve()


if __name__ == "__main__":
    main()
