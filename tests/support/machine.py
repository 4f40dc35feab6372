"""What tests need of the machine."""

import os

import pytest


def skip_for(problem: str | None) -> pytest.MarkDecorator:
    """Skip tests because of a problem. `.ci/run` installs what they need: there they run, and fail by it."""
    return pytest.mark.skipif(bool(problem) and "ASYNCRL_CI" not in os.environ, reason=str(problem))
