"""Real saves, cut off at every operation, lose no saved checkpoint. More: `python -m reliability.crash`."""

import pytest

from reliability.crash.__main__ import trace
from reliability.crash.file_trace import COMPILER
from reliability.crash.points import enumerate_points
from reliability.crash.saver import KEY

pytestmark = pytest.mark.integration


@pytest.mark.skipif(COMPILER is None, reason="no C compiler for the shim that records operations on files")
def test_no_crash_point_loses_a_saved_checkpoint_or_its_ledger(tmp_path):
    findings = enumerate_points(trace(3, tmp_path), KEY, tmp_path / "states")
    assert {kind: found.violations[:3] for kind, found in findings.items()} == {kind: [] for kind in findings}
    assert sum(found.saved_before for found in findings.values()) > 500
    # The oracle sees what is torn: DeepSpeed overwrites its pointer in place and makes nothing durable.
    assert findings["process died"].deepspeed["`latest` is empty"] > 0
    assert (
        findings["power loss, strict"].deepspeed.total()
        == findings["power loss, strict"].deepspeed_saved_before
        > 0
    )
