"""Which connection speaks for which member, and how often each may speak.

A connection is known by the identity that its generator drew at random and tells nobody but the learner. The names of members
are no secret (leases carry them), so a name alone proves nothing: only the connection that joined under it speaks for it.
"""

from dataclasses import dataclass

# Messages of all connections together that are no member's: a thousand generators may call a new learner at
# once.
STRANGERS_RATE_S, STRANGERS_BURST = 1000.0, 2000.0


@dataclass(slots=True)
class Budget:
    """So many messages a second, and `burst` of them at once."""

    rate_s: float
    burst: float
    left: float
    at_s: float = 0.0

    def spend(self, now_s: float) -> bool:
        """False when there is nothing left for this message."""
        self.left = min(self.burst, self.left + self.rate_s * max(now_s - self.at_s, 0.0))
        self.at_s = now_s
        if self.left < 1.0:
            return False
        self.left -= 1.0
        return True


class Peers:
    """Members by connection, and connections by member."""

    def __init__(self, *, heartbeat_s: float) -> None:
        """A member may say ten times what it has to say."""
        self._rate_s = 10.0 + 10.0 / heartbeat_s
        self._holders: dict[bytes, str] = {}
        self._peers: dict[str, bytes] = {}
        self._budgets: dict[bytes, Budget] = {}
        self._strangers = Budget(STRANGERS_RATE_S, STRANGERS_BURST, STRANGERS_BURST)

    def admit(self, peer: bytes, now_s: float) -> bool:
        """Whether to look at one more message of this connection. Strangers cannot use up what members may say."""
        return self._budgets.get(peer, self._strangers).spend(now_s)

    def bind(self, peer: bytes, holder: str, now_s: float) -> None:
        """`holder` has joined over this connection."""
        self._holders[peer], self._peers[holder] = holder, peer
        self._budgets[peer] = Budget(self._rate_s, 5 * self._rate_s, 5 * self._rate_s, now_s)

    def release(self, holder: str) -> None:
        """It is no member any more."""
        peer = self._peers.pop(holder, None)
        if peer is not None:
            del self._holders[peer], self._budgets[peer]

    def holder(self, peer: bytes) -> str | None:
        """The member that this connection speaks for."""
        return self._holders.get(peer)

    def peer(self, holder: str) -> bytes | None:
        """The connection of a member."""
        return self._peers.get(holder)
