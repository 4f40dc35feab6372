"""Runs a check in its own process, because it may crash, and with a time limit, because it may hang."""

import logging
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Literal

from asyncrl.errors import AsyncRLError
from asyncrl.hosting.gpus import order_by_bus
from asyncrl.hosting.processes import die_with_parent
from asyncrl.hosting.workers import ending

log = logging.getLogger(__name__)

END_S = 5.0  # time for a killed check to end
OUTPUT_CHARACTERS = 400  # characters that are quoted from the end of a crashed check's output


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check, and the fix if it is not ok."""

    verdict: Literal["ok", "warning", "failed"]
    found: str
    fix: str = ""


# A check passed; a run may fail; a run cannot work. The latter two need a fix.
fine, doubtful, wrong = partial(Finding, "ok"), partial(Finding, "warning"), partial(Finding, "failed")


@dataclass(frozen=True, slots=True)
class Check:
    """Something to try on this machine."""

    name: str
    run: Callable[[], Finding]  # an exception counts as failed, with `fix`
    fix: str  # what to do if the check raises, crashes or hangs
    limit_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The finding of a check, and how long it took."""

    name: str
    finding: Finding
    seconds: float


def execute(check: Check) -> Outcome:
    """Run `check` in a forked process, and kill it with all its children afterwards.

    Forking is safe because this process has no threads. It takes milliseconds; a check imports its libraries.
    """
    started_s = time.perf_counter()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryFile() as output, receiver:
        process = context.Process(target=_run, args=(check, sender, output.fileno(), os.getpid()))
        process.start()
        sender.close()
        try:
            finding = _answer(check, process, receiver, output.fileno())
        finally:
            assert process.pid is not None
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):  # it has ended, or has not made its group yet
                process.kill()
            process.join(END_S)
            if process.is_alive():
                log.warning("process %d of a check cannot be killed; look at it with ps", process.pid)
    return Outcome(name=check.name, finding=finding, seconds=time.perf_counter() - started_s)


def _run(check: Check, sender: Connection, output: int, parent_pid: int) -> None:
    """Run a check in the child: output of libraries goes to `output`, the finding to the parent."""
    order_by_bus()
    os.setsid()  # a process group, so that it can be killed with its children
    die_with_parent(parent_pid)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    try:
        finding = check.run()
    except AsyncRLError as error:
        finding = wrong(str(error), check.fix)
    except Exception as error:  # noqa: BLE001 - any error of a library is the finding
        finding = wrong(f"{type(error).__name__}: {error}", check.fix)
    sender.send(finding)


def _answer(
    check: Check, process: multiprocessing.process.BaseProcess, receiver: Connection, output: int
) -> Finding:
    if not receiver.poll(check.limit_s):
        return wrong(f"no answer within {check.limit_s:.0f} s{_last_output(output)}", check.fix)
    try:
        finding: Finding = receiver.recv()
    except EOFError:
        process.join(END_S)
        cause = "still ending" if process.exitcode is None else ending(process.exitcode)
        return wrong(f"the process that checked it died ({cause}){_last_output(output)}", check.fix)
    return finding


def _last_output(output: int) -> str:
    size = os.fstat(output).st_size
    start = max(0, size - OUTPUT_CHARACTERS)
    text = os.pread(output, size - start, start).decode(errors="replace").strip()
    return f"; it last printed: {text}" if text else ""
