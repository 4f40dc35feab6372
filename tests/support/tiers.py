"""What belongs to the slow tier alone."""

from typing import Any

import pytest


def slow(*values: object) -> Any:
    """Parameters of a test whose subject has other parameters in the fast tier."""
    return pytest.param(*values, marks=pytest.mark.slow)
