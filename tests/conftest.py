"""Settings of all tests."""

import os
from collections.abc import Generator

import pytest
from hypothesis import settings

import asyncrl  # noqa: F401 - before any test imports transformers: it hides builds that transformers cannot import

pytest_plugins = ["tests.support.groups", "tests.support.leftovers"]

# A run of the tests tries the same few examples every time; a night tries many, and new ones.
# Other work on the machine is not a failure: no example has a deadline.
settings.register_profile("ci", max_examples=25, derandomize=True, deadline=None)
settings.register_profile("nightly", max_examples=1_000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(autouse=True, scope="module")
def own_environment() -> Generator[None, None, None]:
    """Take back what a file's tests, or engines and ranks in this process, did to the environment."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """The output of a test, in text that UTF-8 can express."""
    report = yield
    # pytest-xdist sends reports as UTF-8 and fails on half an emoji, which some tests log on purpose.
    report.sections = [(title, text.encode("utf-8", "replace").decode()) for title, text in report.sections]
    return report
