"""The servers that a store may be."""

import shutil

import pytest

SERVERS = (
    "bundled",
    pytest.param(
        "redis-server",
        marks=pytest.mark.skipif(
            shutil.which("redis-server") is None, reason="no redis-server (apt-get install redis-server)"
        ),
    ),
)
"""For `pytest.mark.parametrize` and fixtures."""
