"""The connections of the members, and the limits on their messages.

A generator draws its connection's identity at random and sends it to the learner only. Names of members are
in leases and not secret, so a member's messages are accepted only over the connection it joined on.
"""

from dataclasses import dataclass

# Limit on messages of all non-members together: a thousand generators may call within a second of a restart.
STRANGERS_RATE_S, STRANGERS_BURST = 1000.0, 2000.0


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
        self._strangers = Budget(STRANGERS_RATE_S, STRANGERS_BURST, STRANGERS_BURST)

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
