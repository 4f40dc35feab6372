"""Decoding of groups in a process with bounded memory (`store.isolate_decoding`).

The process decodes each frame before the learner does. A frame that crashes the process, hangs it, or makes it ask for more
memory than a group of that size can need is refused like any frame that cannot be decoded; the process is replaced and the
learner goes on. Decoding depends on the bytes alone, so the learner survives what the process survived, and it does not
verify the checksum a second time.
"""

import contextlib
import logging
import signal
import socket
import subprocess
import time

from asyncrl.errors import RunError, WireError
from asyncrl.processes import start_worker, stop_process
from asyncrl.progress import beat
from asyncrl.types import Group
from asyncrl.wire.decoder_process import LENGTH, OUT_OF_MEMORY, memory_of, receive
from asyncrl.wire.group_frames import decode_group

log = logging.getLogger(__name__)

START_S = 30.0
AGAIN_S = 1.0
FRAME_S = 30.0
"""For one frame: the largest takes a second. A decoder that was stopped from outside costs this once."""
ATTEMPTS = 2
"""A decoder may die of something else: only a frame that kills two of them is refused for it."""


class IsolatedDecoder:
    """Decodes groups in order. For one thread. The process starts with the first frame and dies with the learner."""

    def __init__(self, key: bytes, *, frame_s: float = FRAME_S) -> None:
        """`key` is that of the frames' checksums; `frame_s` bounds one trial."""
        self._key, self._frame_s = key, frame_s
        self._process: subprocess.Popen[bytes] | None = None
        self.deaths = 0
        """Processes that did not survive a frame."""

    @property
    def pid(self) -> int | None:
        """Of the process, if one runs."""
        return self._process.pid if self._process else None

    def decode(self, frame: bytes) -> Group:
        """As `decode_group`. Raises WireError, also for a frame that cannot be tried; RunError when no process starts."""
        reason = ""
        for _ in range(ATTEMPTS):
            beat()
            try:
                verdict = self._try(frame)
            except (OSError, EOFError) as error:
                reason = self._bury(error, frame)
                continue
            if verdict:
                raise WireError(verdict)
            return decode_group(frame, key=None)
        raise WireError(f"{len(frame)}-byte frame: {ATTEMPTS} decoder processes did not survive it: {reason}")

    def close(self) -> None:
        """Stop the process."""
        if self._process is not None:
            self._channel.close()
            stop_process(self._process, grace_s=1.0)
            self._process = None

    def _try(self, frame: bytes) -> str:
        """Why the process refuses the frame; empty when it does not. Raises OSError, EOFError."""
        if self._process is None:
            self._start()
        until_s = time.monotonic() + self._frame_s
        self._channel.settimeout(self._frame_s)
        self._channel.sendall(LENGTH.pack(len(frame)) + frame)
        self._channel.settimeout(max(until_s - time.monotonic(), 0.001))
        return receive(self._channel).decode()

    def _start(self) -> None:
        """One that hangs in its start is replaced too. Raises RunError after the last one."""
        for attempt in range(ATTEMPTS):
            try:
                self._start_one()
            except RunError:
                if attempt == ATTEMPTS - 1:
                    raise
            else:
                return

    def _start_one(self) -> None:
        self._process, self._channel = _forked()
        self._channel.settimeout(START_S)
        try:
            self._channel.sendall(LENGTH.pack(len(self._key)) + self._key)
            receive(self._channel)
        except (OSError, EOFError) as error:
            status = self._end()
            raise RunError(
                f"the decoder process did not start within {START_S:g} s ({error!r}, status {status}); see the learner's log, "
                "and whether this host has memory and processes left"
            ) from error

    def _bury(self, error: BaseException, frame: bytes) -> str:
        """End the process that did not answer; returns why it did not."""
        status = self._end(grace_s=1.0 if isinstance(error, EOFError | ConnectionError) else 0.0)
        self.deaths += 1
        if isinstance(error, TimeoutError):
            reason = f"no answer within {self._frame_s:g} s"
        elif status == OUT_OF_MEMORY:
            reason = f"decoding takes more than {memory_of(len(frame)) >> 20} MiB"
        else:
            reason = f"died of {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        log.warning("the decoder process is replaced: %s, at a frame of %d bytes", reason, len(frame))
        return reason

    def _end(self, grace_s: float = 0.0) -> int:
        """The exit status; -9 when it had to be killed."""
        assert self._process is not None
        process, self._process = self._process, None
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=grace_s)
        process.kill()
        return process.wait(timeout=10.0)


def _forked() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A host that has no room for one more process may have it again soon. Raises RunError."""
    until_s = time.monotonic() + START_S
    while True:
        beat()
        try:
            return start_worker("asyncrl.wire.decoder_process")
        except OSError as error:
            if time.monotonic() > until_s:
                raise RunError(f"the decoder process cannot be started: {error}; give this host memory and processes") from error
            log.warning("the decoder process cannot be started and is tried again: %s", error)
        time.sleep(AGAIN_S)
