"""Checks of the machine: shared memory, disk, ports."""

import errno
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path

from asyncrl.preflight.checks.base import Finding, doubtful, fine, wrong
from asyncrl.telemetry.text import data_size

MIB, GIB = 1 << 20, 1 << 30
# vLLM's processes and NCCL's ranks share memory in /dev/shm, which has 64 MiB by default in containers.
SHARED_LEAST_BYTES, SHARED_GOOD_BYTES = 32 * MIB, GIB
DISK_LEAST_BYTES = GIB  # enough for logs, metrics, samples and the store's file of a small run
WRITTEN_BYTES = 8 * MIB


def shared_memory(directory: Path = Path("/dev/shm")) -> Finding:
    """Check that shared memory has enough free space and can be written."""
    container = "start the container with --shm-size=8g or --ipc=host (compose: shm_size: 8g)"
    fix = f"{container}; else mount -o remount,size=8g /dev/shm"
    if not directory.is_dir():
        cure = "mount a tmpfs there: mount -t tmpfs -o size=8g tmpfs /dev/shm"
        return wrong(f"{directory} does not exist", cure)
    free_bytes = shutil.disk_usage(directory).free
    try:
        _write(directory, min(WRITTEN_BYTES, max(free_bytes, 1)))
    except OSError as error:
        return wrong(f"{directory} cannot be written: {error}", fix)
    text = f"{data_size(free_bytes)} free in {directory}"
    if free_bytes < SHARED_LEAST_BYTES:
        return wrong(f"{text}; {data_size(SHARED_LEAST_BYTES)} are needed", fix)
    if free_bytes < SHARED_GOOD_BYTES:
        return doubtful(f"{text}; NCCL and tensor parallel engines need 1 GiB", fix)
    return fine(text)


def disk(root: Path, needed_bytes: int = DISK_LEAST_BYTES) -> Finding:
    """Check that the disk of the run directories has `needed_bytes` free and can be written."""
    directory = next(path for path in (root.absolute(), *root.absolute().parents) if path.is_dir())
    try:
        seconds = _write(directory, WRITTEN_BYTES)
    except OSError as error:
        cure = "give run.root=DIRECTORY that you may write, or free some space"
        return wrong(f"{directory} cannot be written: {error}", cure)
    free_bytes = shutil.disk_usage(directory).free
    text = f"{data_size(free_bytes)} free in {directory}, {data_size(needed_bytes)} needed"
    if free_bytes < needed_bytes:
        return wrong(text, "free some space, set run.root to another disk, or lower checkpoint.keep")
    return fine(f"{text}; 8 MiB written in {seconds * 1000:.0f} ms")


def port(bind: str) -> Finding:
    """Check that the learner could listen at `control.bind`, tcp://HOST:PORT."""
    host, _, number = bind.removeprefix("tcp://").rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host.strip("[]"), int(number)), family=family):
            return fine(f"{bind} is free")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            cure = f"end it (ss -ltnp 'sport = :{number}' names it) or choose another port in control.bind"
            return wrong(f"{bind} is taken by another process", cure)
        cure = "use an address of this host (`ip addr` shows them) and a port above 1023 in control.bind"
        return wrong(f"{bind}: {error}", cure)


def _write(directory: Path, size_bytes: int) -> float:
    """Write bytes durably to a temporary file and return the seconds that this took."""
    started_s = time.perf_counter()
    with tempfile.TemporaryFile(dir=directory) as file:
        file.write(bytes(size_bytes))
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - started_s
