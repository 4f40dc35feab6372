"""Decides which generator gets which version when: a state machine per generator, without clocks and sockets.

    idle -- newer version --> updating -- report --> idle
                 ^               |
                 '-- back-off ---'  failed, or too late: released

A generator always goes straight to the newest version, and never waits for another one. After two failures
in a row, every other attempt uses files, if all processes are on one host, else TCP. A success there restores
the transport. If it fails twice again, the next 2 updates go the other way, then 4, up to `LONGEST_DETOUR`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from asyncrl.backoff import Backoff
from asyncrl.lineage import Weights
from asyncrl.weights.base import PROBE_FIELDS, UPDATE_FIELDS, UpdateOrder, UpdateReport

FAILURES_BEFORE_OTHER = 2
# Updates that arrive the other way before a transport that has kept failing is tried again.
LONGEST_DETOUR = 64
# Updates in a row that arrive and fail the probe before the run gives up.
MOST_REFUSALS = 3
# The same of failures before any update has arrived: some minutes.
MOST_FAILURES = 12
_BACKOFF = Backoff(0.25, 30.0)
_UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class Begin:
    """Send the holder an order for the newest version, and say so with `ordered`; without one, do nothing."""

    holder: str
    transport: str


@dataclass(frozen=True, slots=True)
class Release:
    """The holder reads no version any more."""

    holder: str


Action = Begin | Release


@dataclass(slots=True)
class _Member:
    transport: str
    # Transport of every other attempt after two failures; the same one if no other can work.
    alternative: str
    # The version that the generator has reported as applied; -1 if unknown, so that any version is newer.
    version: int = _UNKNOWN
    # The order on which it has not reported; None if it is idle.
    order: UpdateOrder | None = None
    # End of the update, or of the back-off.
    until_s: float = 0.0
    # Failed updates in a row.
    failures: int = 0
    # Updates that the alternative brings in a row this time, and how many of them are left.
    detour: int = 0
    detour_left: int = 0
    # Updates in a row that arrived and failed the probe, and the reason of the last failure.
    refused: int = 0
    reason: str = "no report came in time"

    @property
    def next_transport(self) -> str:
        tried = self.failures - FAILURES_BEFORE_OTHER
        on_detour = tried % 2 == 0 if tried >= 0 else self.detour_left > 0
        return self.alternative if on_detour else self.transport

    def arrived(self, over: str) -> None:
        """Count an update that was applied, and the transport that brought it."""
        if over == self.transport:
            self.detour = self.detour_left = 0
        elif self.detour_left:
            self.detour_left -= 1
        else:
            self.detour = min(2 * self.detour, LONGEST_DETOUR) or 1
            self.detour_left = self.detour - 1
        self.failures = 0


@dataclass(slots=True)
class UpdateSchedule:
    """The updates of all generators. Methods return the actions to carry out now; time is passed in."""

    # The preferred transport; see `common_transport`.
    transport: str
    # Bound on an update, from the order to the generator's report.
    deadline_s: float
    # Whether generators see the learner's files.
    one_host: bool = True
    newest: int = _UNKNOWN
    updates: int = 0
    failed: int = 0
    # `PROBE_FIELDS` of the newest probed report, even if refused; `UPDATE_FIELDS` of the newest applied one.
    measured: dict[str, float] = field(default_factory=dict)
    members: dict[str, _Member] = field(default_factory=dict)

    def common_transport(self, offered: Sequence[str]) -> str | None:
        """The preferred transport, else another one that is usable; None if none of them is offered."""
        usable = (self.transport, *(("slot", "disk") if self.one_host else ("tcp",)))
        return next((transport for transport in usable if transport in offered), None)

    def join(self, holder: str, *, transports: Sequence[str], now_s: float) -> list[Action]:
        """Add a member whose `transports` include a common one.

        Whatever weights it has, an order brings the newest: an earlier learner may have made them, and the
        initial model has not passed the probe.
        """
        transport = self.common_transport(transports)
        assert transport is not None, f"{holder} offers {transports}"
        other = "disk" if self.one_host else "tcp"
        alternative = other if other in transports else transport
        self.members[holder] = _Member(transport, alternative)
        return self._begin(holder, now_s)

    def remove(self, holder: str) -> list[Action]:
        """Remove a former member."""
        return [Release(holder)] if self.members.pop(holder, None) else []

    def announce(self, version: int, now_s: float) -> list[Action]:
        """Bring all members to a version that has been published."""
        self.newest = version
        return self._begin_all(now_s)

    def ordered(self, holder: str, order: UpdateOrder, now_s: float) -> None:
        """An order, whose version may be newer than the announced one, is on its way."""
        member = self.members[holder]
        member.order, member.until_s = order, now_s + self.deadline_s

    def outstanding(self, holder: str) -> UpdateOrder | None:
        """Return the order on which the holder has not reported, if there is one."""
        member = self.members.get(holder)
        return member.order if member is not None else None

    def reported(self, holder: str, report: UpdateReport, now_s: float) -> list[Action]:
        """The generator's report; one that is not on the current update is late and ignored."""
        member, order = self.members.get(holder), self.outstanding(holder)
        if not (member and order) or Weights(report.version, report.lineage) != order.weights:
            return []
        if report.probe_limit > 0:  # otherwise the weights did not arrive
            self.measured |= {name: getattr(report, name) for name in PROBE_FIELDS}
        if not report.applied:
            member.refused, member.reason = member.refused + (report.probe_limit > 0), report.reason
            return self.fail(holder, now_s)
        self.updates += 1
        self.measured |= {name: getattr(report, name) for name in UPDATE_FIELDS}
        member.arrived(order.transport)
        member.refused = 0
        member.order, member.version, member.until_s = None, report.version, now_s
        return [Release(holder), *self._begin(holder, now_s)]

    @property
    def hopeless(self) -> str | None:
        """The message that ends the run, if every generator has refused updates again and again."""
        members = list(self.members.values())
        refused = min((member.refused for member in members), default=0)
        failed = 0 if self.updates else min((member.failures for member in members), default=0)
        if refused < MOST_REFUSALS and failed < MOST_FAILURES:
            return None
        times, reason = max(refused, failed), members[0].reason
        return f"every generator refused {times} updates in a row, so none can sample: {reason}"

    def tick(self, now_s: float) -> list[Action]:
        """Apply the deadlines and back-offs that have passed by `now_s`."""
        late = [h for h, m in self.members.items() if m.order is not None and now_s > m.until_s]
        actions = [action for holder in late for action in self.fail(holder, now_s)]
        return actions + self._begin_all(now_s)

    def _begin_all(self, now_s: float) -> list[Action]:
        return [action for holder in self.members for action in self._begin(holder, now_s)]

    def _begin(self, holder: str, now_s: float) -> list[Action]:
        member = self.members[holder]
        if member.order is not None or now_s < member.until_s or member.version >= self.newest:
            return []
        return [Begin(holder, member.next_transport)]

    def fail(self, holder: str, now_s: float) -> list[Action]:
        """The update failed or is late, or its order could not be made or sent."""
        member = self.members[holder]
        member.failures += 1
        member.until_s = now_s + _BACKOFF.pause_s(member.failures)
        self.failed += 1
        if member.order is not None:
            member.version = _UNKNOWN  # the engine may have a mixture of two versions
            member.order = None
        return [Release(holder)]
