"""Settings of all tests."""

import logging
import os
import signal
from collections.abc import Generator

import pytest
from hypothesis import settings

import asyncrl  # noqa: F401 - before any test imports transformers: it hides builds that transformers cannot import
from asyncrl.hosting.environment import ON_CPU
from asyncrl.telemetry.logs import LogContext

# Tests share the cores with each other and with what they start: a thread that waits must not spin.
for name, value in ON_CPU.items():
    os.environ.setdefault(name, value)

# Ray reads it once, when a test or a library first imports it.
os.environ["RAY_AUTH_MODE"] = "token"

# What the terminal of a user or of CI can do changes no test.
os.environ["TERM"] = "xterm-256color"
for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES"):
    os.environ.pop(name, None)

# A shell starts what runs in the background with SIGINT ignored, and whatever tests start would inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["tests.support.groups", "tests.support.leftovers"]

# A run of the tests tries the same few examples every time; a night tries many, and new ones.
# Other work on the machine is not a failure: no example has a deadline.
settings.register_profile("ci", max_examples=25, derandomize=True, deadline=None)
settings.register_profile("nightly", max_examples=1_000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(autouse=True, scope="module")
def own_environment() -> Generator[None, None, None]:
    """Take back what a file's tests, or engines and ranks in this process, did to the environment and logging.

    A log file that stays open is written at each record of later tests.
    """
    before, root = dict(os.environ), logging.getLogger()
    kept, level = list(root.handlers), root.level
    yield
    os.environ.clear()
    os.environ.update(before)
    root.setLevel(level)
    for handler in [one for one in root.handlers if one not in kept]:
        if any(isinstance(item, LogContext) for item in handler.filters):  # pytest has handlers of its own
            root.removeHandler(handler)
            handler.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """The output of a test, in text that UTF-8 can express."""
    report = yield
    # pytest-xdist sends reports as UTF-8 and fails on half an emoji, which some tests log on purpose.
    report.sections = [(title, text.encode("utf-8", "replace").decode()) for title, text in report.sections]
    return report
