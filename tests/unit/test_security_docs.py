"""docs/security.md names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()


def test_every_test_that_is_named_exists():
    named = re.findall(r"`(tests/[^`]+)`", PAGE)
    assert len(named) >= 8
    assert [path for path in named if not (ROOT / path).exists()] == []
