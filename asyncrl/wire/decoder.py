"""Decoding of groups in a process with bounded memory (`store.isolate_decoding`).

The process decodes each frame before the learner does. If a frame crashes or hangs the process, or needs more
memory than a group of that size can need, the frame is refused and the process is replaced. Decoding depends
on the bytes alone, so the learner survives what the process survived, and skips the checksum.

It is `python -m asyncrl.wire.decoder <socket fd> <learner pid>`, with messages as in `hosting/workers.py`:

    learner -> process   the key;   then frame after frame
    process -> learner   an empty message: ready;   then for each frame why it is refused, or an empty message
"""

import logging
import os
import resource
import socket
import sys
import time

from asyncrl.errors import RunError, WireError
from asyncrl.hosting.processes import die_with_parent
from asyncrl.hosting.progress import beat
from asyncrl.hosting.workers import Worker, ending, framed, receive
from asyncrl.types import Group
from asyncrl.unpickling import refuse_pickles_from_wires
from asyncrl.wire.group_frames import decode_group

log = logging.getLogger(__name__)

START_S = 30.0
AGAIN_S = 1.0
# Limit for one frame; the largest frames take a second.
FRAME_S = 30.0
# A frame is refused after it has ended this many processes: a process can also die for another reason.
ATTEMPTS = 2
# Exit status.
OUT_OF_MEMORY = 77


class IsolatedDecoder:
    """Decodes groups in one thread. The process starts with the first frame and dies with the learner."""

    def __init__(self, key: bytes, *, frame_s: float = FRAME_S) -> None:
        """`key` verifies the frames' checksums; a frame may take the process `frame_s` seconds."""
        self._key, self._frame_s = key, frame_s
        self._worker: Worker | None = None
        # Processes that did not survive a frame.
        self.deaths = 0

    @property
    def pid(self) -> int | None:
        """The id of the process, if there is one."""
        return self._worker.pid if self._worker else None

    def decode(self, frame: bytes) -> Group:
        """See `decode_group`. Raises WireError, also if no process survives it; RunError if none starts."""
        reason = ""
        for _ in range(ATTEMPTS):
            beat()
            self._worker = self._worker or self._start()
            try:
                refusal = self._worker.ask(frame, self._frame_s)
            except (OSError, EOFError) as error:
                reason = self._replace(self._worker, error, frame)
                continue
            if refusal:
                raise WireError(refusal.decode())
            return decode_group(frame, key=None)
        raise WireError(f"{len(frame)}-byte frame: {ATTEMPTS} decoder processes did not survive it: {reason}")

    def close(self) -> None:
        if self._worker is not None:
            self._worker.end(grace_s=1.0)
            self._worker = None

    def _start(self) -> Worker:
        """Start a process; one that does not answer is replaced. Raises RunError after the last attempt."""
        problem = ""
        for _ in range(ATTEMPTS):
            worker = _new_worker()
            try:
                worker.ask(self._key, START_S)
            except (OSError, EOFError) as error:
                problem = f"{error!r}, {ending(worker.end())}"
            else:
                return worker
        raise RunError(
            f"the decoder process did not start within {START_S:g} s ({problem}); see the learner's log, "
            "and whether this host has memory and processes left"
        )

    def _replace(self, worker: Worker, error: BaseException, frame: bytes) -> str:
        """End a process that did not answer; the next frame starts another one. Returns the reason."""
        self._worker = None
        self.deaths += 1
        status = worker.end(grace_s=1.0 if isinstance(error, EOFError | ConnectionError) else 0.0)
        if isinstance(error, TimeoutError):
            reason = f"no answer within {self._frame_s:g} s"
        elif status == OUT_OF_MEMORY:
            reason = f"decoding takes more than {_memory_of(len(frame)) >> 20} MiB"
        else:
            reason = ending(status)
        log.warning("the decoder process is replaced: %s, at a frame of %d bytes", reason, len(frame))
        return reason


def _new_worker() -> Worker:
    """Try for up to `START_S` to start a process. Raises RunError."""
    until_s = time.monotonic() + START_S
    while True:
        beat()
        try:
            return Worker("asyncrl.wire.decoder")
        except OSError as error:
            if time.monotonic() > until_s:
                raise RunError(
                    f"the decoder process cannot be started: {error}; give this host memory and processes"
                ) from error
            log.warning("the decoder process cannot be started and is tried again: %s", error)
        time.sleep(AGAIN_S)


def _memory_of(frame_bytes: int) -> int:
    """The bytes that decoding may take: the frame and twice its size, and 64 MiB for the rest."""
    return 3 * frame_bytes + (64 << 20)


def _serve(channel: socket.socket) -> None:
    requests = channel.makefile("rb")
    key = receive(requests)
    with open("/proc/self/statm") as statm:
        own_bytes = int(statm.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)

    def limit_memory(frame_bytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_AS, (own_bytes + _memory_of(frame_bytes), hard))

    refusal = ""
    while True:
        channel.sendall(framed(refusal.encode(errors="replace")))
        try:
            decode_group(receive(requests, expect=limit_memory), key)
            refusal = ""
        except WireError as error:
            refusal = str(error)


def main() -> None:
    """Serve one learner until it closes the channel."""
    die_with_parent(int(sys.argv[2]))
    refuse_pickles_from_wires()
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        try:
            _serve(channel)
        except (EOFError, ConnectionError):
            sys.exit()
        except MemoryError:  # the state of this process is unknown now
            os._exit(OUT_OF_MEMORY)


if __name__ == "__main__":
    main()
