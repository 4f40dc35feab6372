"""Weights over Gloo: small groups outside torch's default group, opened by name, with a deadline on everything.

A group has the learner's sender as rank 0 and one generator as rank 1. It lives as long as every transfer succeeds;
after an error it is spoilt, and the next order brings a rendezvous with a new name. Nobody else is in it, so nobody
else can be stopped by it.

The rendezvous is a dictionary of plain values, part of the update order:

    name        unique for one sender's life and one generator's life; never used again after an error
    directory   both on one host: a private directory for torch's FileStore; no socket listens for strangers
    host, port  else: a TCPStore served by the sender on the control plane's interface only
"""

import contextlib
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed import FileStore, PrefixStore, ProcessGroupGloo, Store, TCPStore  # type: ignore[attr-defined]

from asyncrl.errors import TransferError
from asyncrl.weights.layout import Bucket, Layout, verify

Rendezvous = Mapping[str, Any]
_MEMBERS = 2


@dataclass(slots=True)
class Group:
    """An open group; dropping the last reference closes it.

    `spoilt` groups refuse to be used: what is still in their pipes belongs to a transfer that failed.
    """

    name: str
    # A ProcessGroupGloo, whose stubs lack its collectives.
    process_group: Any
    # Held, because the group does not: a served store ends with its last reference.
    store: Store
    # Bound on one transfer.
    deadline_s: float
    spoilt: bool = False


class _Operation(NamedTuple):
    """One broadcast under way and the memory it uses."""

    bucket: Bucket
    memory: Tensor
    work: Any


def open_group(rendezvous: Rendezvous, *, rank: int, deadline_s: float, listener: socket.socket | None = None) -> Group:
    """Meet the other member; it must come within `deadline_s`, which also bounds every later transfer.

    Args:
        rendezvous: see the module.
        rank: 0 is the sender, 1 the receiver.
        listener: rank 0 of a rendezvous by host and port: the bound, listening socket; taken over.

    Raises:
        TransferError: nobody came, or the rendezvous is malformed.
    """
    timeout = timedelta(seconds=deadline_s)
    try:
        name = str(rendezvous["name"])
        store, address = _open_store(rendezvous, timeout, listener)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the name that exists at run time
        options._timeout = timeout
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        options._threads = 2
        process_group = ProcessGroupGloo(PrefixStore(name, store), rank, _MEMBERS, options)
    except (KeyError, TypeError, ValueError, OSError, RuntimeError) as error:
        raise TransferError(
            f"gloo group {rendezvous.get('name')!r}, rank {rank}: not opened within {deadline_s:g} s ({_brief(error)}); "
            "the next order brings a new group"
        ) from error
    return Group(name, process_group, store, deadline_s)


def send(group: Group, buffer: Tensor, layout: Layout) -> None:
    """Send all buckets of `buffer` (uint8, `layout.total_bytes` long) from rank 0; returns when they have left.

    Raises:
        TransferError: the peer is gone or the deadline has passed.
    """
    _move(group, buffer, layout, lambda bucket: None)


def receive(group: Group, buffer: Tensor, layout: Layout, checksums: Sequence[int]) -> None:
    """Receive all buckets into `buffer` (uint8, `layout.total_bytes` long) as rank 1; returns when all are verified.

    Raises:
        TransferError: a checksum differs, the peer is gone, or the deadline has passed; what `buffer` holds is no version.
    """
    _move(group, buffer, layout, lambda bucket: verify(buffer, layout, checksums, bucket))


def _move(group: Group, buffer: Tensor, layout: Layout, moved: Callable[[Bucket], None]) -> None:
    """Broadcast every bucket, in order; `moved` is called with each while the next one is under way."""
    if group.spoilt:
        raise TransferError(f"gloo group {group.name!r}: an earlier transfer failed in it; open one with a new name")
    ends_at_s = time.monotonic() + group.deadline_s
    group.spoilt = True  # until it went well
    pending: list[_Operation] = []
    try:
        for bucket in layout.buckets:
            pending.append(_broadcast(group, buffer, bucket, ends_at_s))
            if len(pending) > 1:  # the wire never idles; more than one ahead would not help
                moved(_finished(group, pending.pop(0)))
        while pending:
            moved(_finished(group, pending.pop(0)))
    finally:
        _drain(pending)
    group.spoilt = False


def _open_store(rendezvous: Rendezvous, timeout: timedelta, listener: socket.socket | None) -> tuple[Store, str]:
    """The store where the members exchange addresses, and the address that this side's Gloo sockets bind to."""
    if "directory" in rendezvous:
        path = Path(rendezvous["directory"]) / str(rendezvous["name"])
        store: Store = FileStore(str(path), _MEMBERS)
        store.set_timeout(timeout)
        return store, "127.0.0.1"
    host, port = str(rendezvous["host"]), int(rendezvous["port"])
    if listener is None:
        return TCPStore(host, port, None, False, timeout, False), _own_address(host, port)
    serving = TCPStore(host, port, None, True, timeout, False, master_listen_fd=listener.detach())
    return serving, host


def _own_address(host: str, port: int) -> str:
    """The address of the interface through which `host` is reached; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def _broadcast(group: Group, buffer: Tensor, bucket: Bucket, ends_at_s: float) -> _Operation:
    memory = buffer[bucket.start_byte : bucket.end_byte]
    remaining_s = max(ends_at_s - time.monotonic(), 0.001)
    try:
        return _Operation(bucket, memory, group.process_group.broadcast(memory, 0, timedelta(seconds=remaining_s)))
    except RuntimeError as error:
        raise _failed(group, error) from error


def _finished(group: Group, operation: _Operation) -> Bucket:
    try:
        operation.work.wait()
    except RuntimeError as error:
        raise _failed(group, error) from error
    return operation.bucket


def _drain(pending: list[_Operation]) -> None:
    """Wait for what is still under way after a failure, at most until the deadline.

    A process that ends, or frees the buffers, under a running operation is terminated by Gloo's threads.
    """
    for operation in pending:
        with contextlib.suppress(RuntimeError):
            operation.work.wait()


def _failed(group: Group, error: BaseException) -> TransferError:
    return TransferError(
        f"gloo group {group.name!r}: transfer failed within its {group.deadline_s:g} s ({_brief(error)}); "
        "the weights are incomplete, the next order brings a new group"
    )


def _brief(error: BaseException) -> str:
    """The first line of torch's error text, without the source position that it ends with."""
    return (str(error).splitlines() or [repr(error)])[0].strip()
