"""Whatever tests have started ends with the process of pytest that runs them, however that one ends."""

import os
import subprocess
import sys

import pytest

from asyncrl.hosting.processes import end_marked

NAME = "ASYNCRL_TESTS_OF"
"""A variable that everything inherits which a process of pytest starts."""

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
