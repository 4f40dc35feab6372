"""The learner's status, which it writes once a second to a small file that is replaced atomically."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from asyncrl.buffer.base import Audit
from asyncrl.control.base import MemberStatus
from asyncrl.files import read_record, replace_text, tell_unreadable
from asyncrl.telemetry.jsonl import to_json

SILENT_S = 10.0  # a learner or generator that is silent this long gets a warning
FINAL_STATES = frozenset({"finished", "failed", "stopped"})
# Where an issued id can be, by the fields of `Audit`.
PLACES = ("leased", "reissue", "ready", "taken", "done")


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusSnapshot:
    """State of a run at one moment."""

    run: str
    state: str
    """starting | training | evaluating | finished | failed | stopped"""
    step: int
    total_steps: int
    version: int
    started_at: float
    """Unix seconds at which this learner process began, so a resume starts over."""
    updated_at: float
    pid: int
    lag_bound: int | None = None
    max_lag: int = 0
    doing: str = ""
    """What the learner does now, such as `wait_groups` or `train`."""
    ranks: int = 1
    """Ranks of the learner."""
    cores: int | None = None
    """Cores that the learner's host gives this run, if it computes on CPUs; None with GPUs."""
    members: tuple[MemberStatus, ...] = ()
    audit: Audit | None = None
    audit_mismatch: int = 0
    """Number of ids that are nowhere (> 0) or in two places (< 0), if it lasted 10 s: an alarm."""
    counters: Mapping[str, float] = field(default_factory=dict)
    """Counters of the control plane: joined, left, died, updates, updates_failed, ..."""
    message: str = ""
    """The reason of a failure or stop."""

    @property
    def is_final(self) -> bool:
        return self.state in FINAL_STATES


def status_json(snapshot: StatusSnapshot) -> dict[str, Any]:
    """Return plain values; NaN and infinity become null."""
    values: dict[str, Any] = to_json(asdict(snapshot))
    if snapshot.audit:
        values["audit"]["missing"] = snapshot.audit.missing
    return values


def write_status(path: Path, snapshot: StatusSnapshot) -> None:
    """Replace the file atomically."""
    replace_text(path, json.dumps(status_json(snapshot)))


def read_status(path: Path) -> StatusSnapshot | None:
    """Return the newest status; None when there is none or it cannot be read."""
    if (values := read_record(path)) is None:
        return None
    try:
        values["counters"] = _numbers(values["counters"])
        values["members"] = tuple(
            MemberStatus(**{**_known(MemberStatus, member), "metrics": _numbers(member["metrics"])})
            for member in values["members"]
        )
        if values["audit"]:
            values["audit"] = Audit(**_known(Audit, values["audit"]))
        return StatusSnapshot(**_known(StatusSnapshot, values))
    except (TypeError, KeyError, AttributeError) as error:
        tell_unreadable(path, f"it was written by another release: {error!r}")
        return None


def _numbers(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: math.nan if value is None else value for name, value in values.items()}


def _known(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that `kind` has fields for: `missing` of an audit is computed, not stored."""
    names = {item.name for item in fields(kind)}
    return {name: value for name, value in values.items() if name in names}
