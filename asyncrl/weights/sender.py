"""The sender process: `python -m asyncrl.weights.sender <socket fd> <learner pid>`, one per generator.

It owns the transfer group, so that whatever happens in there ends with this process and not with the learner.
It obeys one socket, whose messages are MessagePack behind a four-byte length:

    learner -> sender   {setup}                                              once
                        {op: prepare, job, version, transport, slot, checksums}
                        {op: transfer, job}
    sender -> learner   {op: prepared, job, details} | {op: sent, job, seconds} | {op: failed, job, reason}

It dies with the learner, however that one dies.
"""

import logging
import socket
import struct
import sys
import time
from typing import Any

import msgpack
from torch import Tensor

from asyncrl.errors import TransferError
from asyncrl.processes import die_with_parent, receive_bytes
from asyncrl.unpickling import refuse_pickles_from_wires
from asyncrl.weights.layout import Layout
from asyncrl.weights.slots import open_slot
from asyncrl.weights.transports import DiskTransport, GlooTransport, Job, SenderSetup, Transport

log = logging.getLogger(__name__)

LENGTH = struct.Struct("<I")


def pack(message: dict[str, Any]) -> bytes:
    """One message as it crosses the socket."""
    packed: bytes = msgpack.packb(message)
    return LENGTH.pack(len(packed)) + packed


class _Sender:
    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._setup = _parse_setup(self._read())
        self._transports: dict[str, Transport] = {}
        self._slots: dict[str, Tensor] = {}
        self._transport: Transport | None = None
        self._job: Job | None = None

    def serve(self) -> None:
        """Obey until the learner closes the socket."""
        while True:
            command = self._read()
            try:
                reply = self._prepare(command) if command["op"] == "prepare" else self._transfer()
            except TransferError as error:
                reply = {"op": "failed", "reason": str(error)}
            self._channel.sendall(pack({**reply, "job": command["job"]}))

    def _prepare(self, command: dict[str, Any]) -> dict[str, Any]:
        name, path = command["transport"], command["slot"]
        if path not in self._slots:  # the learner keeps its slots as long as it lives
            self._slots[path] = open_slot(path, self._setup.layout.total_bytes)
        if name not in self._transports:
            self._transports[name] = _make_transport(name, self._setup)
        self._transport = self._transports[name]
        self._job = Job(version=command["version"], buffer=self._slots[path], checksums=tuple(command["checksums"]))
        return {"op": "prepared", "details": self._transport.prepare(self._job)}

    def _transfer(self) -> dict[str, Any]:
        assert self._transport is not None and self._job is not None, "transfer without prepare"
        started_s = time.monotonic()
        self._transport.transfer(self._job)
        return {"op": "sent", "seconds": time.monotonic() - started_s}

    def _read(self) -> dict[str, Any]:
        (length,) = LENGTH.unpack(receive_bytes(self._channel, LENGTH.size))
        message: dict[str, Any] = msgpack.unpackb(receive_bytes(self._channel, length))
        return message


def _make_transport(name: str, setup: SenderSetup) -> Transport:
    """Raises TransferError for a name that is no transport. The GPU ones are imported only where they are used."""
    if name == "gloo":
        return GlooTransport(setup)
    if name == "disk":
        return DiskTransport(setup)
    if name == "nccl":
        from asyncrl.weights.nccl import NcclTransport

        return NcclTransport(setup)
    if name == "ipc":
        from asyncrl.weights.ipc import IpcTransport

        return IpcTransport(setup)
    raise TransferError(f"transport {name!r} is not known; use gloo, nccl, ipc or disk")


def _parse_setup(plain: dict[str, Any]) -> SenderSetup:
    return SenderSetup(**{**plain, "layout": Layout.from_plain(plain["layout"])})


def main() -> None:
    """Entry point of the process."""
    die_with_parent(int(sys.argv[2]))
    refuse_pickles_from_wires()
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        try:
            _Sender(channel).serve()
        except (EOFError, ConnectionError):
            log.debug("the learner has closed the channel")


if __name__ == "__main__":
    main()
