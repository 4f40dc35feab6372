"""The members of the run: a state machine over messages and their times, which the caller passes in.

    hello --> refused                   another release, another config, or a live generator has the name
      |-----> deferred                  the name is taken; wait whether its owner sends anything
      '-----> member --> left           sent a Leave
                 '-----> died           silent for `timeout_s`, or replaced by its own restarted process

A restarted generator has a new incarnation: it becomes a new member, and the old one counts as dead. It is no
duplicate if the old owner stays silent for `challenge_s` after the first hello of the new one. The first
third of that time does not count: after a pause of the learner, old messages of the dead owner are read among
the new hellos.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from asyncrl.control.base import Heartbeat, Hello, Leave, MemberStatus, Refused

MAX_MEMBERS = 1024


def holder_name(generator_id: str, incarnation: str) -> str:
    """The name of one incarnation on the wire and in the store's leases."""
    return f"{generator_id}:{incarnation}"


@dataclass(slots=True)
class Member:
    """One incarnation of a generator."""

    hello: Hello
    heard_at_s: float
    state: str = "starting"
    version: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def holder(self) -> str:
        """See `holder_name`."""
        return holder_name(self.hello.generator_id, self.hello.incarnation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """The newcomer is a member; `replaced` is the dead holder that had its name, if any."""

    member: Member
    replaced: str | None = None


@dataclass(frozen=True, slots=True)
class AlreadyMember:
    """A member sent a hello again, after a lost connection."""


@dataclass(frozen=True, slots=True)
class Deferred:
    """No answer yet; the newcomer repeats its hello."""


class Membership:
    """The members by generator id."""

    def __init__(
        self,
        *,
        release: str,
        config_hash: str,
        timeout_s: float,
        challenge_s: float,
        host_digest: str = "",
        rows: str = "",
    ) -> None:
        """`timeout_s`: silence that counts as death; `challenge_s`: the same while the name is disputed."""
        self._host_digest = host_digest
        self._rows = rows
        self._release = release
        self._config_hash = config_hash
        self._timeout_s = timeout_s
        self._challenge_s = challenge_s
        self._members: dict[str, Member] = {}
        self._challenges: dict[str, tuple[str, float]] = {}  # generator id -> incarnation, since
        self.joined = 0
        self.left = 0
        self.died = 0

    @property
    def members(self) -> Mapping[str, Member]:
        """The members by generator id."""
        return self._members

    def hello(self, hello: Hello, now_s: float) -> Joined | AlreadyMember | Deferred | Refused:
        """The decision on a hello that came at `now_s`."""
        if reason := self._objection(hello):
            return Refused(reason=reason)
        old = self._members.get(hello.generator_id)
        if old is None:
            return self._join(hello, now_s, replaced=None)
        if old.hello.incarnation == hello.incarnation:
            old.heard_at_s = now_s
            return AlreadyMember()
        incarnation, since_s = self._challenges.get(hello.generator_id, ("", 0.0))
        if incarnation != hello.incarnation:
            self._challenges[hello.generator_id] = (hello.incarnation, now_s)
            return Deferred()
        if now_s - since_s < self._challenge_s:
            return Deferred()
        if old.heard_at_s > since_s + self._challenge_s / 3:
            del self._challenges[hello.generator_id]
            return Refused(
                reason=f"a generator called {hello.generator_id!r} is alive (process {old.hello.pid}, host "
                f"{old.hello.host!r}); give this one another id or stop the other"
            )
        self.died += 1
        return self._join(hello, now_s, replaced=old.holder)

    def heartbeat(self, beat: Heartbeat, now_s: float) -> bool:
        """Update the member's state; False if the sender is not a member and must send a hello."""
        member = self._find(beat.generator_id, beat.incarnation)
        if member is None:
            return False
        member.heard_at_s, member.state, member.version, member.metrics = (
            now_s,
            beat.state,
            beat.version,
            beat.metrics,
        )
        return True

    def leave(self, leave: Leave) -> str | None:
        """Remove the member and return its holder name; None if it was not a member."""
        member = self._find(leave.generator_id, leave.incarnation)
        if member is None:
            return None
        self.left += 1
        del self._members[leave.generator_id]
        return member.holder

    def expire(self, now_s: float) -> list[str]:
        """Remove the members that have been silent for too long and return their holder names."""
        dead = [member for member in self._members.values() if now_s - member.heard_at_s > self._timeout_s]
        for member in dead:
            del self._members[member.hello.generator_id]
        self.died += len(dead)
        # A challenger that gave up must not shorten the time of a later challenge.
        self._challenges = {
            name: (incarnation, since_s)
            for name, (incarnation, since_s) in self._challenges.items()
            if now_s - since_s <= self._timeout_s
        }
        return [member.holder for member in dead]

    def statuses(self, now_s: float) -> list[MemberStatus]:
        """The status of every member, for display."""
        return [
            MemberStatus(
                generator_id=generator_id,
                state=member.state,
                version=member.version,
                silent_s=max(now_s - member.heard_at_s, 0.0),
                metrics=dict(member.metrics),
            )
            for generator_id, member in sorted(self._members.items())
        ]

    def _objection(self, hello: Hello) -> str:
        if hello.release != self._release:
            return (
                f"generator runs asyncrl {hello.release}, the learner {self._release}; install the same "
                "release on both"
            )
        if hello.config_hash != self._config_hash:
            return (
                f"generator has config {hello.config_hash}, the run has {self._config_hash}; "
                "start the generator without a config to get the run's"
            )
        if hello.host_digest not in ("", self._host_digest):
            return (
                "generator took its config from a record of this run that is out of date: the run was "
                "resumed with other keys of reward, model or run.environment, or the store gave it an old "
                "record; start the generator again, and if that does not help, find out what else writes "
                "into the store"
            )
        if len(self._members) >= MAX_MEMBERS and hello.generator_id not in self._members:
            return (
                f"the run has {MAX_MEMBERS} generators, each with a process that sends to it; that is the "
                "most allowed"
            )
        if hello.rows != self._rows:
            return (
                f"generator read {hello.rows} from data.train and data.eval, the learner {self._rows}; "
                "another file lies there under the same path, or it has changed since; give the "
                "generator's host the learner's file, and start the generator again"
            )
        return ""

    def _join(self, hello: Hello, now_s: float, *, replaced: str | None) -> Joined:
        self.joined += 1
        self._challenges.pop(hello.generator_id, None)
        member = Member(hello, now_s, version=hello.version)
        self._members[hello.generator_id] = member
        return Joined(member=member, replaced=replaced)

    def _find(self, generator_id: str, incarnation: str) -> Member | None:
        member = self._members.get(generator_id)
        return member if member is not None and member.hello.incarnation == incarnation else None
