"""The measurement of many generators ends if what it measures dies."""

from argparse import Namespace
from types import SimpleNamespace

import pytest

from bench import crowd

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


def test_a_learner_that_dies_ends_the_wait_for_it(monkeypatch):
    monkeypatch.setattr(crowd, "learner", len)  # refuses the learner's arguments
    with pytest.raises(EOFError):
        crowd.measured(1, SimpleNamespace(url="", pid=0), Namespace())
