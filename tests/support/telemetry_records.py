"""A status, a sample and a histogram with something of everything."""

from typing import Any

from asyncrl.buffer.base import Audit
from asyncrl.control.base import MemberStatus
from asyncrl.telemetry.base import SampleRecord
from asyncrl.telemetry.status import StatusSnapshot

LAGS = {"staleness/in_queue/0": 0.625, "staleness/in_queue/2": 0.375}


def record(**changes: Any) -> SampleRecord:
    values: dict[str, Any] = {
        "step": 1, "ticket_id": 7, "prompt": "2+2=", "response": "4\n\ud83d", "reward": 1.0, "parts": {"exact": 1.0},
        "advantage": 0.5, "versions": [(0, 3), (1, 2)], "finish_reason": "stop", "generator_id": "g0",
    }  # fmt: skip
    return SampleRecord(**(values | changes))


def snapshot(**changes: Any) -> StatusSnapshot:
    counters = {"put": 3}
    audit = Audit(
        issued=10, leased=1, reissue=2, ready=3, taken=0, done=4, payload_bytes=5, counters=counters
    )
    member = MemberStatus(
        generator_id="g0", state="sampling", version=3, silent_s=0.5, metrics={"tokens_per_s": 12.5}
    )
    values: dict[str, Any] = {
        "run": "a", "state": "training", "step": 4, "total_steps": 9, "version": 4, "started_at": 1.0, "updated_at": 2.0,
        "pid": 3, "members": (member,), "audit": audit, "counters": {"died": 1.0},
    }  # fmt: skip
    return StatusSnapshot(**(values | changes))
