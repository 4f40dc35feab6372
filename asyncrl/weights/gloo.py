"""Weights over Gloo: two-party groups outside torch's default group, with a deadline on every step.

Rank 0 of a group is the learner's sender, rank 1 one generator, so a failure affects no other generator. The
group is used until a transfer fails; the next order then brings a rendezvous with a new name.

The rendezvous is a dictionary of plain values, part of the update order:

    name        unique for this sender and this generator; not used again after an error
    directory   if both are on one host: a private directory for torch's FileStore, so that no socket listens
    host, port  otherwise: a TCPStore that the sender serves on the control plane's interface only
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
    """An open group; dropping the last reference closes it."""

    name: str
    # A ProcessGroupGloo, whose stubs lack its collectives.
    process_group: Any
    # The process group holds no reference to it, and a served store ends with its last reference.
    store: Store
    # Bound on one transfer.
    deadline_s: float
    # After a failed transfer the connection may still hold its data, so the group is not used again.
    spoilt: bool = False


class _Operation(NamedTuple):
    """A broadcast under way and the memory that it uses."""

    bucket: Bucket
    memory: Tensor
    work: Any


def open_group(
    rendezvous: Rendezvous, *, rank: int, deadline_s: float, listener: socket.socket | None = None
) -> Group:
    """Open the group with the other member, within `deadline_s`, which also bounds every later transfer.

    Rank 0 of a rendezvous by host and port passes its listening socket, which the group takes over. Raises
    TransferError: the other member did not come in time, or the rendezvous is malformed.
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
            f"gloo group {rendezvous.get('name')!r}, rank {rank}: not opened within {deadline_s:g} s "
            f"({_brief(error)}); the next order brings a new group"
        ) from error
    return Group(name, process_group, store, deadline_s)


def send(group: Group, buffer: Tensor, layout: Layout) -> None:
    """Send all of `buffer` (uint8, [layout.total_bytes]) from rank 0; returns when it has left.

    Raises TransferError: the peer is gone or the deadline has passed.
    """
    _move(group, buffer, layout, lambda bucket: None)


def receive(group: Group, buffer: Tensor, layout: Layout, checksums: Sequence[int]) -> None:
    """Receive and verify all of `buffer` (uint8, [layout.total_bytes]) as rank 1.

    Raises TransferError: a checksum differs, the peer is gone, or the deadline has passed. `buffer` is
    incomplete then.
    """
    _move(group, buffer, layout, lambda bucket: verify(buffer, layout, checksums, bucket))


def _move(group: Group, buffer: Tensor, layout: Layout, moved: Callable[[Bucket], None]) -> None:
    """Broadcast every bucket in order, and call `moved` with each one while the next is under way."""
    if group.spoilt:
        raise TransferError(
            f"gloo group {group.name!r}: an earlier transfer failed in it; open one with a new name"
        )
    ends_at_s = time.monotonic() + group.deadline_s
    group.spoilt = True  # until all buckets have been moved
    pending: list[_Operation] = []

    def finish_first() -> None:
        first = pending.pop(0)
        first.work.wait()
        moved(first.bucket)

    try:
        for bucket in layout.buckets:
            memory = buffer[bucket.start_byte : bucket.end_byte]
            remaining_s = max(ends_at_s - time.monotonic(), 0.001)
            work = group.process_group.broadcast(memory, 0, timedelta(seconds=remaining_s))
            pending.append(_Operation(bucket, memory, work))
            if len(pending) > 1:  # two operations keep the connection busy; more would not help
                finish_first()
        while pending:
            finish_first()
    except RuntimeError as error:
        raise TransferError(
            f"gloo group {group.name!r}: transfer failed within its {group.deadline_s:g} s "
            f"({_brief(error)}); the weights are incomplete, the next order brings a new group"
        ) from error
    finally:
        # After a failure, wait for what is still under way, at most until the deadline: if the process ended,
        # or freed the buffers, during an operation, Gloo's threads would terminate it.
        for operation in pending:
            with contextlib.suppress(RuntimeError):
                operation.work.wait()
    group.spoilt = False


def _open_store(
    rendezvous: Rendezvous, timeout: timedelta, listener: socket.socket | None
) -> tuple[Store, str]:
    """The store in which the members exchange addresses, and the address for this side's Gloo sockets."""
    if "directory" in rendezvous:
        path = Path(rendezvous["directory"]) / str(rendezvous["name"])
        store: Store = FileStore(str(path), _MEMBERS)
        store.set_timeout(timeout)
        return store, "127.0.0.1"
    host, port = str(rendezvous["host"]), int(rendezvous["port"])
    if listener is not None:
        return TCPStore(host, port, None, True, timeout, False, master_listen_fd=listener.detach()), host
    store = TCPStore(host, port, None, False, timeout, False)
    # Connecting a datagram socket sends nothing; it selects the interface through which `host` is reached.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as selected:
        selected.connect((host, port))
        return store, str(selected.getsockname()[0])


def _brief(error: BaseException) -> str:
    """The first line of torch's error text; later lines are source positions."""
    return (str(error).splitlines() or [repr(error)])[0].strip()
