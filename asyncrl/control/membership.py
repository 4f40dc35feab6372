"""The members of the run: a state machine over messages and their times, which the caller passes in.

    hello --> refused                   another release, another config, or a live generator has the name
      |-----> deferred                  the name is taken; wait whether its owner sends anything
      '-----> member --> left           sent a Leave
                 '-----> died           silent for `timeout_s`, or replaced by its own restarted process

A restarted generator has a new incarnation. It replaces the old one, which counts as dead, if the old one
stays silent for `challenge_s` after the first hello of the new one. Messages in the first third of that time
do not count: after a pause of the learner, it reads old messages of the dead process among the new hellos.

A generator draws its connection's identity at random and sends it to the learner only. Names of members are
in leases and not secret, so a member's messages are accepted only over the connection it joined on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from asyncrl.control.base import Heartbeat, Hello, Leave, MemberStatus, Refused, Sender

MAX_MEMBERS = 1024
# Limit on messages of all non-members together: a thousand generators may call within a second of a restart.
_STRANGERS_RATE_S, _STRANGERS_BURST = 1000.0, 2000.0


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
        return self.hello.holder


@dataclass(frozen=True, slots=True)
class Joined:
    """The newcomer is a member; `replaced` is the dead holder that had its name, if any."""

    replaced: str | None


@dataclass(frozen=True, slots=True)
class AlreadyMember:
    """A member sent a hello again, after a lost connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """What a generator's `Hello` must have in common with the learner; see there."""

    release: str
    config_hash: str
    host_digest: str = ""
    rows: str = ""
    code: tuple[str, ...] = ()


class Membership:
    """The members of the run."""

    def __init__(self, run: RunIdentity, *, timeout_s: float, challenge_s: float) -> None:
        """Silence of `timeout_s` counts as death, of `challenge_s` while another process wants the name."""
        self._run = run
        self._timeout_s, self._challenge_s = timeout_s, challenge_s
        self.members: dict[str, Member] = {}  # by generator id
        self._challenges: dict[str, tuple[str, float]] = {}  # generator id -> incarnation, since
        self.joined = self.left = self.died = 0

    def hello(self, hello: Hello, now_s: float) -> Joined | AlreadyMember | Refused | None:
        """The decision on a hello that came at `now_s`; None if there is none yet, and it is repeated."""
        if reason := self._objection(hello):
            return Refused(reason=reason)
        old = self.members.get(hello.generator_id)
        if old is None:
            return self._join(hello, now_s, replaced=None)
        if old.hello.incarnation == hello.incarnation:
            old.heard_at_s = now_s
            return AlreadyMember()
        incarnation, since_s = self._challenges.get(hello.generator_id, ("", 0.0))
        if incarnation != hello.incarnation:
            self._challenges[hello.generator_id] = (hello.incarnation, now_s)
            return None
        if now_s - since_s < self._challenge_s:
            return None
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
        member = self._find(beat)
        if member is None:
            return False
        member.heard_at_s = now_s
        member.state, member.version, member.metrics = beat.state, beat.version, beat.metrics
        return True

    def leave(self, leave: Leave) -> None:
        """Remove the member, if it is one."""
        if self._find(leave) is not None:
            self.left += 1
            del self.members[leave.generator_id]

    def expire(self, now_s: float) -> list[str]:
        """Remove the members that have been silent for too long and return their holder names."""
        dead = [member for member in self.members.values() if now_s - member.heard_at_s > self._timeout_s]
        for member in dead:
            del self.members[member.hello.generator_id]
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
            for generator_id, member in sorted(self.members.items())
        ]

    def _objection(self, hello: Hello) -> str:
        if hello.release != self._run.release:
            return (
                f"generator runs asyncrl {hello.release}, the learner {self._run.release}; install the same "
                "release on both"
            )
        if hello.config_hash != self._run.config_hash:
            return (
                f"generator has config {hello.config_hash}, the run has {self._run.config_hash}; start the "
                "generator without a config to get the run's"
            )
        if hello.host_digest not in ("", self._run.host_digest):
            return (
                "generator has read a record of this run that is out of date: the run was resumed with other "
                "keys of reward, scorers, model or run.environment, or the store returned an old record; "
                "start the generator again, and if that does not help, find out what else writes to the store"
            )
        if len(self.members) >= MAX_MEMBERS and hello.generator_id not in self.members:
            return f"the run has {MAX_MEMBERS} generators, the most allowed"
        if hello.rows != self._run.rows:
            return (
                f"generator read {hello.rows} from data.train and data.eval, the learner {self._run.rows}; "
                "the file at this path differs between the hosts, or has changed; copy the learner's file to "
                "the generator's host, and start the generator again"
            )
        if changed := sorted({*hello.code} - {*self._run.code}):
            return (
                f"generator found {', '.join(changed)} (name and digest), the run began with "
                f"{', '.join(self._run.code)}: rewards of two meanings would mix; restore the file, or go on "
                "with the new one by `asyncrl down` and `asyncrl up`"
            )
        return ""

    def _join(self, hello: Hello, now_s: float, *, replaced: str | None) -> Joined:
        self.joined += 1
        self._challenges.pop(hello.generator_id, None)
        self.members[hello.generator_id] = Member(hello, now_s, version=hello.version)
        return Joined(replaced)

    def _find(self, sender: Sender) -> Member | None:
        member = self.members.get(sender.generator_id)
        return member if member is not None and member.holder == sender.holder else None


@dataclass(slots=True)
class Budget:
    """A token bucket: `rate_s` messages per second, `burst` of them without a pause."""

    rate_s: float
    burst: float
    left: float
    at_s: float = 0.0

    def spend(self, now_s: float) -> bool:
        """Take one message from the budget; False if it is used up."""
        self.left = min(self.burst, self.left + self.rate_s * max(now_s - self.at_s, 0.0))
        self.at_s = now_s
        if self.left < 1.0:
            return False
        self.left -= 1.0
        return True


class Peers:
    """Members by connection, and connections by member."""

    def __init__(self, *, heartbeat_s: float) -> None:
        """Members get ten times the message rate that they need."""
        self._rate_s = 10.0 + 10.0 / heartbeat_s
        self._holders: dict[bytes, str] = {}
        self._peers: dict[str, bytes] = {}
        self._budgets: dict[bytes, Budget] = {}
        self._strangers = Budget(_STRANGERS_RATE_S, _STRANGERS_BURST, _STRANGERS_BURST)

    def admit(self, peer: bytes, now_s: float) -> bool:
        """Whether to read another message of this connection; all non-members share one budget."""
        return self._budgets.get(peer, self._strangers).spend(now_s)

    def bind(self, peer: bytes, holder: str, now_s: float) -> None:
        """Record that `holder` has joined over this connection."""
        self._holders[peer], self._peers[holder] = holder, peer
        self._budgets[peer] = Budget(self._rate_s, 5 * self._rate_s, 5 * self._rate_s, now_s)

    def release(self, holder: str) -> None:
        """Forget the connection of a former member."""
        if (peer := self._peers.pop(holder, None)) is not None:
            del self._holders[peer], self._budgets[peer]

    def holder(self, peer: bytes) -> str | None:
        """The member that this connection belongs to."""
        return self._holders.get(peer)

    def peer(self, holder: str) -> bytes | None:
        """The connection of a member."""
        return self._peers.get(holder)
