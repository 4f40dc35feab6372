"""Weights over NCCL, or over Gloo if the learner is on CPUs: a pair of processes for each host of generators.

    generator   NcclFetcher connects to the learner's `SlotServer`, and hands the connection to a process on
                the generator's first GPU, which asks for a slot and fills memory of the host
    learner     SlotServer hands its end to a process on the learner's GPU, which sends the slot's tensors

The pair lives as long as the connection, and is one process group of torch. What hangs or fails there ends
with these processes and stops nothing else. The connection carries messages as in `asyncrl.hosting.workers`:

    {layout, slot}  ->  {backend, port}, and the tensors over the group  |  {failed}
"""

import contextlib
import mmap
import os
import re
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any

import msgpack
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from asyncrl.errors import TransferError
from asyncrl.hosting.processes import die_with_parent
from asyncrl.hosting.workers import Worker, pack, receive
from asyncrl.unpickling import refuse_pickles_from_wires
from asyncrl.weights.layout import Layout, device_sum, require_equal, verify
from asyncrl.weights.slots import Slot, open_slot, register
from asyncrl.weights.stream import GROUP, connect, left_s

# Bound on the start of both processes and their group.
START_S = 60.0
SENDS, RECEIVES = b"s", b"r"
# For the reason, if the group itself notices that the other end has gone.
_GONE_S = 1.0
# The newest versions are in two slots of the host.
_MOST_KEPT = 2


def start(role: bytes, connection: socket.socket) -> Worker:
    """Start the process of one end of a connection, which it takes over. Raises OSError."""
    worker = Worker("asyncrl.weights.nccl")
    try:
        socket.send_fds(worker.channel, [role], [connection.fileno()])
    except OSError:
        worker.end()
        raise
    return worker


class NcclFetcher:
    """One generator's process that receives. It starts with a fetch, and ends with a failure or `close`."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._learner: tuple[Any, ...] = ()
        self._starting_until_s = 0.0

    def fetch(
        self,
        source: Mapping[str, Any],
        slot: Slot,
        layout: Layout,
        checksums: Sequence[int],
        *,
        until_s: float,
        touched: int,
    ) -> None:
        """Fill a slot of ours with the learner's, and verify every tensor.

        Args:
            source: what the learner said: `SlotServer.source`, and its `slot`.
            until_s: the time.monotonic() at which it must be done.
            touched: an open file whose time changes whenever a tensor has arrived.

        Raises:
            TransferError: it is late, a process died, or a checksum differs; the slot is incomplete then.
        """
        request = {
            "layout": layout.to_plain(),
            "checksums": list(checksums),
            "slot": source.get("slot"),
            "memory": slot.describe()["path"],
            "touched": f"/proc/{os.getpid()}/fd/{touched}",
        }
        learner = tuple(source.get(name) for name in ("host", "port", "key"))
        try:
            if self._worker is None or self._learner != learner:
                self.close()
                with connect(source, GROUP, until_s) as connection:
                    self._worker = start(RECEIVES, connection)
                self._learner, self._starting_until_s = learner, time.monotonic() + START_S
            data = msgpack.packb(request | {"deadline_s": left_s(until_s)})
            answer = msgpack.unpackb(
                self._worker.ask(data, left_s(until_s), meanwhile=lambda: self._starting(touched))
            )
            self._starting_until_s = 0.0
        except (OSError, EOFError) as error:
            answer = {"failed": f"{error!r}; see the logs of generator and learner"}
        if reason := answer.get("failed"):
            self.close()
            raise TransferError(f"weights over nccl: {reason}; the next order brings them again")

    def close(self) -> None:
        if self._worker:
            self._worker.end()
            self._worker = None

    def _starting(self, touched: int) -> None:
        if time.monotonic() < self._starting_until_s:
            os.utime(touched)


def _send(connection: socket.socket, request: Mapping[str, Any]) -> None:
    """Send the slot that the other end asks for. Raises TransferError before anything is sent."""
    connection.settimeout(None)  # only the first request must come soon
    layout = Layout.from_plain(request["layout"])
    path = str(request["slot"]["path"])
    if not re.fullmatch(rf"/proc/{os.getppid()}/fd/\d+", path):
        raise TransferError(f"{path} is no slot of this learner")
    slot = open_slot(request["slot"], layout.total_bytes, device=0, keep=True)
    answer: dict[str, Any] = {"backend": "nccl" if slot.buffer.is_cuda else "gloo"}
    store = None
    if not dist.is_initialized():
        host = connection.getsockname()[0]
        listener = socket.create_server((host, 0), family=connection.family)
        port = listener.getsockname()[1]
        store = TCPStore(
            host,
            port,
            2,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=START_S),
            master_listen_fd=listener.detach(),
        )
        answer["port"] = port
    connection.sendall(pack(answer))
    if store:
        _join(0, answer["backend"], store, request["deadline_s"])
    sent = [dist.broadcast(slot.buffer[begin:end], src=0, async_op=True) for _, begin, end in layout.pieces()]
    for each in sent:
        each.wait()
    if slot.buffer.is_cuda:
        torch.cuda.synchronize()


def _receive(connection: socket.socket, request: Mapping[str, Any]) -> None:
    """Fill `memory` with the learner's slot. Raises TransferError, OSError, EOFError, RuntimeError."""
    layout, deadline_s = Layout.from_plain(request["layout"]), request["deadline_s"]
    connection.settimeout(deadline_s)
    connection.sendall(pack({name: request[name] for name in ("layout", "slot", "deadline_s")}))
    with connection.makefile("rb") as answers:
        answer = msgpack.unpackb(receive(answers))
    if reason := answer.get("failed"):
        raise TransferError(reason)
    on_gpu = answer["backend"] == "nccl"
    if on_gpu and not torch.cuda.is_available():
        raise TransferError("this host shows no GPU; leave weights.transport auto")
    if not dist.is_initialized():
        store = TCPStore(
            connection.getpeername()[0],
            answer["port"],
            2,
            is_master=False,
            timeout=timedelta(seconds=deadline_s),
        )
        _join(1, answer["backend"], store, deadline_s)
    path = request["memory"]
    memory = _mapped(path, os.stat(path).st_ino, layout.total_bytes)
    sums = _arrive(layout, memory, "cuda" if on_gpu else "cpu", request["touched"])
    if on_gpu:
        for spec, *both in zip(layout.specs, sums, request["checksums"], strict=True):
            require_equal(spec.name, *both)
    else:
        verify(memory, layout, request["checksums"])


def _arrive(layout: Layout, memory: Tensor, device: str, touched: str) -> list[int]:
    """Copy each piece to `memory` while the next one arrives. On "cuda", returns the sum of each tensor."""
    pieces = list(layout.pieces())
    size_bytes = max((end - begin for _, begin, end in pieces), default=0)
    buckets = [torch.empty(size_bytes, dtype=torch.uint8, device=device) for _ in range(2)]

    def coming(number: int) -> tuple[Tensor, Any]:
        _, begin, end = pieces[number]
        bucket = buckets[number % 2][: end - begin]
        return bucket, dist.broadcast(bucket, src=0, async_op=True)

    sums: dict[int, Tensor] = {}
    next_one = coming(0) if pieces else None
    for number, (index, begin, end) in enumerate(pieces):
        assert next_one is not None
        bucket, work = next_one
        work.wait()
        next_one = coming(number + 1) if number + 1 < len(pieces) else None
        memory[begin:end].copy_(bucket)
        os.utime(touched)
        if device == "cuda":
            sums[index] = device_sum(bucket, sums.get(index))
    if device != "cuda":
        return []
    none = device_sum(buckets[0][:0])  # of a tensor without elements
    return torch.stack([sums.get(index, none) for index in range(len(layout.specs))]).tolist()


def _end_with(connection: socket.socket) -> None:
    """End this process when the other end has gone: a broadcast of NCCL would wait for it."""
    gone = select.poll()
    gone.register(connection, select.POLLRDHUP)
    gone.poll()
    time.sleep(_GONE_S)
    os._exit(1)


def _join(rank: int, backend: str, store: TCPStore, deadline_s: float) -> None:
    """Form the group. Its bound on a transfer is the last one; the generator's own deadline comes before."""
    device = torch.device("cuda", 0) if backend == "nccl" else None
    timeout = timedelta(seconds=max(deadline_s, START_S))
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=timeout, device_id=device)


@lru_cache(maxsize=_MOST_KEPT)
def _mapped(path: str, inode: int, size_bytes: int) -> Tensor:
    """The file's memory, mapped once: to map its pages takes longer than to fill them."""
    with open(path, "r+b", buffering=0) as file:
        memory = torch.frombuffer(mmap.mmap(file.fileno(), size_bytes), dtype=torch.uint8)
    register(memory)
    return memory


def main() -> None:
    """Entry point of both processes."""
    die_with_parent(int(sys.argv[2]))
    refuse_pickles_from_wires()
    channel = socket.socket(fileno=int(sys.argv[1]))
    role, files, *_ = socket.recv_fds(channel, 1, 1)
    connection = socket.socket(fileno=files[0])
    # EOFError, ConnectionError: the other end or our parent has gone. TimeoutError: it asks for nothing.
    with contextlib.suppress(EOFError, ConnectionError, TimeoutError):
        if role == SENDS:  # the learner's `SlotServer` watches this end
            connection.settimeout(START_S)
            _serve(connection, partial(_send, connection), says=False)
        else:
            threading.Thread(target=_end_with, args=[connection], daemon=True).start()
            _serve(channel, partial(_receive, connection), says=True)


def _serve(asking: socket.socket, do: Callable[[dict[str, Any]], None], *, says: bool) -> None:
    """Carry out all requests. Answer failures and, with `says`, successes; else end if the group fails."""
    with asking.makefile("rb") as requests:
        while True:
            request, answer = msgpack.unpackb(receive(requests)), {}
            try:
                do(request)
            except TransferError as error:
                answer = {"failed": str(error)}
            except RuntimeError as error:  # of the group, which carries nothing more
                reason = str(error).partition("\n")[0]
                if not says:  # the other end waits for tensors, not for an answer
                    sys.stderr.write(f"weights over nccl: {reason}; the next order starts another process\n")
                    sys.stderr.flush()
                    os._exit(1)  # Gloo's threads would abort a process that ends under them
                answer = {"failed": reason}
            if says or answer:
                asking.sendall(pack(answer))


if __name__ == "__main__":
    main()
