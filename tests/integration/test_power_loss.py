"""A whole run whose machine loses its power after any change of any file. `python -m
reliability.crash.whole_run` does more."""

import pytest

from reliability.crash.file_trace import COMPILER
from reliability.crash.whole_run import trace, try_all

pytestmark = pytest.mark.integration


@pytest.mark.skipif(COMPILER is None, reason="no C compiler for the shim that records operations on files")
def test_after_a_loss_of_power_a_run_goes_on_from_what_it_had_told_of(tmp_path):
    findings = try_all(trace(tmp_path), tmp_path, looks=100, starts=2, seed=1)
    assert findings.wrong == []
    assert findings.looked_at.total() == 100 and findings.started.total() == 2 and findings.promised > 40
