"""Settings of all tests."""

from collections.abc import Generator

import pytest
from hypothesis import settings

import asyncrl  # noqa: F401 - before any test imports transformers: it hides builds that transformers cannot import

settings.register_profile("asyncrl", deadline=None)  # other work on the machine is no failure
settings.load_profile("asyncrl")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """The output of a test, in text that UTF-8 can express."""
    report = yield
    # pytest-xdist sends reports as UTF-8 and fails on half an emoji, which some tests log on purpose.
    report.sections = [(title, text.encode("utf-8", "replace").decode()) for title, text in report.sections]
    return report
