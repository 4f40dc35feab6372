"""What the learner says about itself once a second, in one small file that is never half written."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from asyncrl.buffer.base import Audit
from asyncrl.control.base import MemberStatus
from asyncrl.errors import RunError
from asyncrl.files import replace_text
from asyncrl.telemetry.jsonl import to_json

FINAL_STATES = frozenset({"finished", "failed", "stopped"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusSnapshot:
    """One moment of a run."""

    run: str
    state: str
    """starting | training | evaluating | finished | failed | stopped"""
    step: int
    total_steps: int
    version: int
    started_at: float
    """Unix seconds; of this process, not of the run before a resume."""
    updated_at: float
    pid: int
    lag_bound: int | None = None
    members: tuple[MemberStatus, ...] = ()
    audit: Audit | None = None
    audit_mismatch: int = 0
    """Ids that are nowhere (> 0) or in two places (< 0) and were so 10 s before: an alarm."""
    counters: Mapping[str, float] = field(default_factory=dict)
    """Of the control plane: joined, left, died, updates, updates_failed, ..."""
    message: str = ""
    """Why it failed or stopped."""

    @property
    def is_final(self) -> bool:
        """Whether the run is over."""
        return self.state in FINAL_STATES


def status_json(snapshot: StatusSnapshot) -> dict[str, Any]:
    """Plain values; NaN and infinity become null."""
    values: dict[str, Any] = to_json(asdict(snapshot))
    if snapshot.audit:
        values["audit"]["missing"] = snapshot.audit.missing
    return values


def write_status(path: Path, snapshot: StatusSnapshot) -> None:
    """Replace the file at once."""
    replace_text(path, json.dumps(status_json(snapshot)))


def read_status(path: Path) -> StatusSnapshot | None:
    """The newest status; None when there is none yet.

    Raises:
        RunError: the file is not one of ours.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}; the learner writes it anew each second") from error
    try:
        values["counters"] = _numbers(values["counters"])
        values["members"] = tuple(_member(member) for member in values["members"])
        if values["audit"]:
            values["audit"] = Audit(**_known(Audit, values["audit"]))
        return StatusSnapshot(**_known(StatusSnapshot, values))
    except (TypeError, KeyError, AttributeError) as error:
        raise RunError(f"{path} was written by another release ({error!r}); read it with that one") from error


def _member(values: Mapping[str, Any]) -> MemberStatus:
    return MemberStatus(**{**_known(MemberStatus, values), "metrics": _numbers(values["metrics"])})


def _numbers(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: math.nan if value is None else value for name, value in values.items()}


def _known(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Without what a newer release may have added."""
    names = {item.name for item in fields(kind)}
    return {name: value for name, value in values.items() if name in names}
