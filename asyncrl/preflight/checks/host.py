"""Checks of the machine: shared memory, disk, clock, open files, ports."""

import errno
import os
import resource
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from asyncrl.preflight.checks.base import Finding, doubtful, fine, wrong
from asyncrl.telemetry.text import data_size

MIB, GIB = 1 << 20, 1 << 30
# The processes of a vLLM engine and the ranks of NCCL share memory in /dev/shm. Containers have 64 MiB by
# default.
SHARED_LEAST_BYTES, SHARED_GOOD_BYTES = 64 * MIB, GIB
DISK_LEAST_BYTES = GIB  # enough for logs, metrics, samples and the store's file of a small run
WRITTEN_BYTES = 8 * MIB
# A generator has about 60 files open, a learner about 40 and 10 for each generator.
FILES_LEAST, FILES_GOOD = 256, 1024
CLOCK_S = 0.2
FIRST_POSSIBLE_S = 1735689600.0  # 1 January 2025, before this release existed


def shared_memory(directory: Path = Path("/dev/shm")) -> Finding:
    """Whether shared memory has enough free space and can be written."""
    fix = (
        "start the container with --shm-size=8g or --ipc=host (compose: shm_size: 8g); else mount -o "
        "remount,size=8g /dev/shm"
    )
    if not directory.is_dir():
        return wrong(
            f"{directory} does not exist", "mount a tmpfs there: mount -t tmpfs -o size=8g tmpfs /dev/shm"
        )
    free_bytes = _free_bytes(directory)
    try:
        _write(directory, min(WRITTEN_BYTES, max(free_bytes, 1)))
    except OSError as error:
        return wrong(f"{directory} cannot be written: {error}", fix)
    text = f"{data_size(free_bytes)} free in {directory}"
    if free_bytes < SHARED_LEAST_BYTES:
        return wrong(f"{text}; {data_size(SHARED_LEAST_BYTES)} are needed", fix)
    return (
        fine(text)
        if free_bytes >= SHARED_GOOD_BYTES
        else doubtful(f"{text}; NCCL and tensor parallel engines want 1 GiB", fix)
    )


def disk(root: Path, needed_bytes: int = DISK_LEAST_BYTES) -> Finding:
    """Whether the disk of the run directories has `needed_bytes` free and can be written."""
    directory = next(path for path in (root.absolute(), *root.absolute().parents) if path.is_dir())
    try:
        seconds = _write(directory, WRITTEN_BYTES)
    except OSError as error:
        return wrong(
            f"{directory} cannot be written: {error}",
            "give run.root=DIRECTORY that you may write, or free some space",
        )
    free_bytes = _free_bytes(directory)
    text = f"{data_size(free_bytes)} free in {directory}, {data_size(needed_bytes)} needed"
    if free_bytes < needed_bytes:
        return wrong(text, "free some space, set run.root to another disk, or lower checkpoint.keep")
    return fine(f"{text}; 8 MiB are safe on it after {seconds * 1000:.0f} ms")


def clock(
    now_s: Callable[[], float] = time.time, monotonic_s: Callable[[], float] = time.monotonic
) -> Finding:
    """Whether the monotonic clock, for leases and deadlines, and the wall clock, for logs and status, run
    alike."""
    wall, steady = now_s(), monotonic_s()
    time.sleep(CLOCK_S)
    wall_s, steady_s = now_s() - wall, monotonic_s() - steady
    if steady_s <= 0 or not 0.5 < wall_s / steady_s < 2.0:
        return wrong(
            f"in {steady_s:.2f} s of the monotonic clock {wall_s:.2f} s passed on the wall clock",
            "another program sets the clock: use one time service (chronyc tracking, timedatectl); restart "
            "the virtual machine",
        )
    if wall < FIRST_POSSIBLE_S:
        return wrong(
            f"the clock says {time.strftime('%Y-%m-%d', time.gmtime(wall))}",
            "set it: timedatectl set-ntp true, or date -s",
        )
    return fine("monotonic and wall clock agree")


def open_files(limit: int | None = None) -> Finding:
    """Whether the soft limit of open files, which every process of a run inherits, is high enough."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    text, fix = (
        f"{allowed:,} open files allowed",
        "ulimit -n 65536 in this shell (container: --ulimit nofile=65536)",
    )
    if allowed < FILES_LEAST:
        return wrong(f"{text}; {FILES_LEAST} are needed", fix)
    return (
        fine(text)
        if allowed >= FILES_GOOD
        else doubtful(f"{text}; with many generators {FILES_GOOD:,} are not enough", fix)
    )


def port(bind: str) -> Finding:
    """Whether the learner could listen at `control.bind`, tcp://HOST:PORT."""
    host, _, number = bind.removeprefix("tcp://").rpartition(":")
    if not (bind.startswith("tcp://") and host and number.isdecimal()):
        return wrong(
            f"control.bind is {bind!r}",
            "write tcp://HOST:PORT with an address of this host, e.g. control.bind=tcp://10.0.0.1:5555",
        )
    try:
        with socket.create_server(
            (host.strip("[]"), int(number)), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        ):
            return fine(f"{bind} is free")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return wrong(
                f"{bind} is taken by another process",
                f"end it (ss -ltnp 'sport = :{number}' names it) or choose another port in control.bind",
            )
        return wrong(
            f"{bind}: {error}",
            "use an address of this host (`ip addr` shows them) and a port above 1023 in control.bind",
        )


def _free_bytes(directory: Path) -> int:
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def _write(directory: Path, size_bytes: int) -> float:
    """Seconds to write bytes durably to a temporary file."""
    started_s = time.perf_counter()
    with tempfile.TemporaryFile(dir=directory) as file:
        file.write(bytes(size_bytes))
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - started_s
