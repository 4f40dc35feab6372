"""A check finds something out by doing it: in a process of its own, as it may crash, and within a limit, as it may hang."""

import logging
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal

from asyncrl.errors import AsyncRLError
from asyncrl.processes import die_with_parent

log = logging.getLogger(__name__)

END_S = 5.0  # for a killed check to end
OUTPUT_CHARACTERS = 400  # of what a crashed check printed last


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a check found, and what to do where that is not well."""

    verdict: Literal["ok", "warning", "failed"]
    found: str
    fix: str = ""


def fine(found: str) -> Finding:
    """All is well."""
    return Finding(verdict="ok", found=found)


def doubtful(found: str, fix: str) -> Finding:
    """A run may work, and may not."""
    return Finding(verdict="warning", found=found, fix=fix)


def wrong(found: str, fix: str) -> Finding:
    """A run will not work."""
    return Finding(verdict="failed", found=found, fix=fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One question."""

    name: str
    run: Callable[[], Finding]  # an error that it raises counts as failed, with `fix`
    fix: str  # what to do when it raises, crashes or hangs
    limit_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A check's answer."""

    name: str
    finding: Finding
    seconds: float


def execute(check: Check) -> Outcome:
    """Run `check` in a forked process; whatever becomes of it, its process family is gone afterwards.

    Fork, because this process is small and has no threads: a check starts in milliseconds and imports its own libraries.
    """
    started_s = time.perf_counter()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryFile() as output:
        process = context.Process(target=_run, args=(check, sender, output.fileno(), os.getpid()))
        process.start()
        sender.close()
        try:
            finding = _answer(check, process, receiver, output.fileno())
        finally:
            receiver.close()
            _end(process)
    return Outcome(name=check.name, finding=finding, seconds=time.perf_counter() - started_s)


def _run(check: Check, sender: Connection, output: int, parent_pid: int) -> None:
    """In the child: what libraries print goes to `output`, the finding to the parent."""
    os.setsid()  # its own group: ended with its children
    die_with_parent(parent_pid)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    try:
        finding = check.run()
    except AsyncRLError as error:
        finding = wrong(str(error), check.fix)
    except Exception as error:  # noqa: BLE001 - libraries raise what they like; it is the finding
        finding = wrong(f"{type(error).__name__}: {error}", check.fix)
    sender.send(finding)


def _answer(check: Check, process: multiprocessing.process.BaseProcess, receiver: Connection, output: int) -> Finding:
    if not receiver.poll(check.limit_s):
        return wrong(f"no answer within {check.limit_s:.0f} s{_last_output(output)}", check.fix)
    try:
        finding: Finding = receiver.recv()
    except EOFError:
        process.join(END_S)
        return wrong(f"the process that checked it died ({_cause(process.exitcode)}){_last_output(output)}", check.fix)
    return finding


def _cause(status: int | None) -> str:
    return signal.Signals(-status).name if status is not None and status < 0 else f"exit status {status}"


def _last_output(output: int) -> str:
    size = os.fstat(output).st_size
    start = max(0, size - OUTPUT_CHARACTERS)
    text = os.pread(output, size - start, start).decode(errors="replace").strip()
    return f"; it last printed: {text}" if text else ""


def _end(process: multiprocessing.process.BaseProcess) -> None:
    assert process.pid is not None
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # gone, or it had no time to make a group
        process.kill()
    process.join(END_S)
    if process.is_alive():
        log.warning("process %d of check cannot be ended; look at it with ps", process.pid)
