"""Process 1 of a box: `python inside.py LIMITS`. It forks one process per program that a model wrote.

This file needs the standard library only, because a box does not show asyncrl. LIMITS is JSON: {memory:
bytes, output: bytes of each output, processes, files, rlimits: {RLIMIT_ name: value}}. Messages on standard
input and output are their length (4 bytes, little-endian), and then JSON:

    out  {ready: true}                                                        once
    in   {code, stdin, seconds}                                               each program
    out  {stdout, stderr, status, seconds, cut, spent}

`spent` asks for another box: the program left files. Programs cannot reach this process: the kernel drops the
signals that they send it, its memory is closed to them, and they do not have its pipes.
"""

import atexit
import builtins
import contextlib
import ctypes
import gc
import json
import linecache
import math
import os
import resource
import select
import signal
import struct
import sys
import threading
import time
import traceback
import types
from typing import Any, BinaryIO, NoReturn

LENGTH = struct.Struct("<I")
SCRATCH = ("/tmp", "/dev/shm")
CHUNK_BYTES = 65536
# Pause between two looks at what a program uses.
LOOK_S = 0.02
# The program's name in a traceback.
NAME = "<program>"
PR_SET_DUMPABLE = 4
# Fields of /proc/PID/stat behind the name: number of threads, resident pages.
_THREADS, _PAGES = 17, 21


class _Output:
    """The beginning or the end of what a pipe carried."""

    def __init__(self, most_bytes: int, *, keep_end: bool) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self._most_bytes, self._keep_end = most_bytes, keep_end
        self._kept, self._total_bytes = bytearray(), 0

    def read(self) -> bool:
        """Read what is there; False if nothing is."""
        try:
            data = os.read(self.reader, CHUNK_BYTES)
        except BlockingIOError:
            return False
        self._total_bytes += len(data)
        self._kept += data if self._keep_end else data[: max(0, self._most_bytes - len(self._kept))]
        if self._keep_end:
            del self._kept[: -self._most_bytes]
        return bool(data)

    @property
    def text(self) -> str:
        return self._kept.decode("utf-8", "replace")

    @property
    def is_cut(self) -> bool:
        return self._total_bytes > len(self._kept)


def main() -> None:
    """Serve programs until standard input ends."""
    limits = json.loads(sys.argv[1])
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the kernel drops signals without a handler here
    for name, value in limits["rlimits"].items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    _execute("")  # what it sets up for the first time need not be set up in every program
    gc.collect()
    gc.freeze()  # a collection in a program would otherwise copy all memory that it shares with this process
    _reply(replies, {"ready": True})
    while header := requests.read(LENGTH.size):
        request = json.loads(requests.read(LENGTH.unpack(header)[0]))
        _reply(replies, run(request["code"], request["stdin"], request["seconds"], limits))


def _reply(replies: BinaryIO, message: dict[str, Any]) -> None:
    """Write one message."""
    data = json.dumps(message).encode()
    replies.write(LENGTH.pack(len(data)) + data)
    replies.flush()


def run(code: str, stdin: str, seconds: float, limits: dict[str, Any]) -> dict[str, Any]:
    """Run a program in a process of its own, and end everything that it started."""
    stdout = _Output(limits["output"], keep_end=False)
    stderr = _Output(limits["output"], keep_end=True)
    given = os.open(SCRATCH[0], os.O_TMPFILE | os.O_RDWR)
    with os.fdopen(given, "wb", closefd=False) as file:
        file.write(stdin.encode("utf-8", "replace"))
    os.lseek(given, 0, os.SEEK_SET)
    started_s = time.monotonic()
    pid = os.fork()
    if pid == 0:
        become(code, (given, stdout.writer, stderr.writer), seconds, limits["memory"])
    for descriptor in (given, stdout.writer, stderr.writer):
        os.close(descriptor)
    limit = watch(pid, (stdout, stderr), started_s + seconds, limits)
    code_or_signal = end_all(pid)
    for output in (stdout, stderr):
        while output.read():
            pass
        os.close(output.reader)
    for place in SCRATCH:
        os.chmod(place, 0o755)  # a program may have taken our rights to read and write there
    said = stderr.text
    if limit is None and code_or_signal == -signal.SIGXCPU:
        limit = "time"
    if limit is None and code_or_signal < 0:
        # Most real-time signals have no name.
        names = {one.value: one.name for one in signal.Signals}
        said += f"\nkilled by {names.get(-code_or_signal, f'signal {-code_or_signal}')}\n"
    return {
        "stdout": stdout.text,
        "stderr": said,
        "status": limit or ("error" if code_or_signal else "ok"),
        "seconds": time.monotonic() - started_s,
        "cut": stdout.is_cut or stderr.is_cut,
        "spent": any(os.listdir(place) for place in SCRATCH),
    }


def watch(pid: int, outputs: tuple[_Output, _Output], until_s: float, limits: dict[str, Any]) -> str | None:
    """Read the outputs until the process ends. Returns the limit that the program exceeds, if any."""
    poll = select.poll()
    ended = os.pidfd_open(pid)
    readable = {output.reader: output for output in outputs}
    for descriptor in (ended, *readable):
        poll.register(descriptor, select.POLLIN)
    look_s = time.monotonic() + LOOK_S
    try:
        while True:
            now_s = time.monotonic()
            if now_s >= until_s:
                return "time"
            if now_s >= look_s:
                look_s = now_s + LOOK_S
                if limit := exceeded(limits):
                    return limit
            events = dict(poll.poll(1000 * max(0.0, min(until_s, look_s) - now_s)))
            for descriptor in readable.keys() & events.keys():
                if not readable[descriptor].read():
                    poll.unregister(descriptor)  # the program has closed it
                    del readable[descriptor]
            if ended in events:
                return None
    finally:
        os.close(ended)


def exceeded(limits: dict[str, Any]) -> str | None:
    """The limit that all processes of the box together exceed, if any; the kernel bounds only each one."""
    threads, sizes = 0, dict[str, int]()
    for name in os.listdir("/proc"):
        if name.isdecimal() and name != "1":
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:  # it has ended
                continue
            threads += int(fields[_THREADS])
            sizes[name] = int(fields[_PAGES]) * resource.getpagesize()
    if threads > limits["processes"]:
        return "processes"
    # In these sizes, which are quick to read, a page that several processes share counts once for each.
    for name in sizes if sum(sizes.values()) > limits["memory"] else ():
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{name}/smaps_rollup", "rb") as file:
            sizes[name] = 1024 * int(file.read().partition(b"\nPss:")[2].split()[0])
    if sum(sizes.values()) > limits["memory"]:
        return "memory"
    scratch = [os.statvfs(place) for place in SCRATCH]
    return "files" if any(one.f_files - one.f_ffree > limits["files"] for one in scratch) else None


def end_all(pid: int) -> int:
    """Kill all other processes of the box; return the exit status of `pid`, or minus its signal."""
    status = 0
    try:
        os.kill(-1, signal.SIGKILL)
        while True:
            child, ending = os.waitpid(-1, 0)
            if child == pid:
                status = os.waitstatus_to_exitcode(ending)
    except (ProcessLookupError, ChildProcessError):
        return status


def become(code: str, standard: tuple[int, int, int], seconds: float, memory_bytes: int) -> NoReturn:
    """Be the process of a program, until it ends."""
    status = 1
    try:
        os.setsid()
        # Process 1, whose memory is closed, must read how much of ours is shared.
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        for number, descriptor in enumerate(standard):
            os.dup2(descriptor, number)
        os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        processor_s = math.ceil(seconds)
        resource.setrlimit(resource.RLIMIT_CPU, (processor_s, processor_s + 1))
        sys.argv = [NAME]
        # Outputs are written line by line, so that the lines of a program that is killed are not lost.
        streams = [
            open(number, mode, encoding="utf-8", errors="replace", closefd=False, buffering=buffering)  # noqa: SIM115
            for number, mode, buffering in ((0, "r", -1), (1, "w", 1), (2, "w", 1))
        ]
        sys.stdin, sys.stdout, sys.stderr = streams
        signal.signal(signal.SIGINT, signal.default_int_handler)
        status = _execute(code)
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as at the end of any program
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _execute(code: str) -> int:
    """Run a program as the main module; return its exit status."""
    main_module = types.ModuleType("__main__")
    main_module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main_module
    linecache.cache[NAME] = (len(code), None, code.splitlines(keepends=True), NAME)
    try:
        exec(compile(code, NAME, "exec"), main_module.__dict__)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        sys.stderr.write(f"{error.code}\n")
        return 1
    except BaseException as error:  # noqa: BLE001 - what a program raises is its result
        shown = error.__traceback__.tb_next if error.__traceback__ else None  # without the frame of `exec`
        traceback.print_exception(type(error), error, shown)
        return 1
    return 0


if __name__ == "__main__":
    main()
