"""Waits for what other processes do."""

import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], object],
    within_s: float = 120.0,
    seen: Callable[[], object] = lambda: "waited in vain",
) -> None:
    """Fail with `seen` after `within_s`, by default a bound that a loaded machine keeps."""
    until_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until_s, seen()
        time.sleep(0.02)
