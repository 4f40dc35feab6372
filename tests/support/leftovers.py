"""Whatever tests have started ends with the process of pytest that runs them, however that one ends; on a full
disk that is at once."""

import errno
import os
import shutil
import subprocess
import sys
import tempfile

import pytest

from asyncrl.hosting.processes import end_marked

NAME = "ASYNCRL_TESTS_OF"
"""A variable that everything inherits which a process of pytest starts."""

NEEDED_BYTES = 1 << 30
"""With less, a test that found no space left is not alone with it."""

# Standard input ends with the process that has its other end.
_END_AFTER_US = """
import sys
from asyncrl.hosting.processes import end_marked
sys.stdin.buffer.read()
end_marked(sys.argv[1])
"""


def pytest_configure(config: pytest.Config) -> None:
    mark = f"{os.getpid()}.{os.urandom(4).hex()}"
    ender = [sys.executable, "-c", _END_AFTER_US, f"{NAME}={mark}"]
    # It belongs to no process of pytest, and has a session of its own, because Ctrl-C is for the tests.
    watcher = subprocess.Popen(
        ender, stdin=subprocess.PIPE, env=os.environ | {NAME: ""}, start_new_session=True
    )
    os.environ[NAME] = mark
    config.add_cleanup(lambda: end_marked(f"{NAME}={mark}"))
    config.add_cleanup(watcher.kill)
    if not hasattr(config, "workerinput"):  # this process has the reports of all
        config.pluginmanager.register(Failures(config))


class Failures:
    """Names a failure when it is there, because a run that is ended by force has no summary. On a full disk each
    further test would fail with another reason: the run ends with the one that counts."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.failed:
            return
        crash = getattr(report.longrepr, "reprcrash", None) or report.longreprtext
        terminal = self._config.get_terminal_writer()
        terminal.line(f"\n{report.nodeid}, {report.when}: {crash}")
        terminal.flush()
        if os.strerror(errno.ENOSPC) in report.longreprtext:
            place = tempfile.gettempdir()
            free = shutil.disk_usage(place).free
            if free < NEEDED_BYTES:
                said = f"{place} is full: {free >> 20} MiB free; free some space, or set TMPDIR"
                pytest.exit(said, returncode=pytest.ExitCode.TESTS_FAILED)
