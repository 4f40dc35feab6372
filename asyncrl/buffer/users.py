"""Who may do what in the store: a user for the learner, one for the generators, nobody else.

The server checks every single command of a user, also inside functions. So a generator can use the functions that work
on tickets and frames, and nothing that it calls, in whatever order, writes what only the learner may write: `meta`
(epoch, version, limit, watermark, ...), the takes, the finished ids, the record of the run.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

LEARNER, GENERATOR = "learner", "generator"

_RECORD = "asyncrl:run"
_ANYBODY = "ping select multi exec hget hgetall"
_GENERATOR_WRITES = "leased deadlines holders reissue ready requests attempts deaths counters totals"
_GENERATOR_READS = "meta done"
_TICKETS = "time hmget hset hsetnx hdel hexists hincrby hstrlen sismember zadd zrem zrange zrangebyscore zscore"
"""What the functions that generators call are made of."""
_LEARNER_TOO = "del hkeys lpush lrange ltrim sadd scard srem zcard zremrangebyrank info function|load scan unlink fcall"


@dataclass(frozen=True, slots=True)
class StoreUser:
    """One user of a server."""

    name: str
    password: str = field(repr=False)
    rules: str
    """Keys and commands, as ACL SETUSER takes them."""

    @property
    def setting(self) -> str:
        """After `user` in a server's configuration, or after ACL SETUSER; the password is hashed."""
        return f"{self.name} on #{hashlib.sha256(self.password.encode()).hexdigest()} {self.rules}"


def learner_rules(run: str) -> str:
    """Everything below the run's lanes, and the record; no configuration, no scripts but its own, no wiping."""
    keys = f"~{{{run}:*}}:* ~{_RECORD}"
    return " ".join([keys, *_commands(_ANYBODY, _TICKETS, _LEARNER_TOO)])


def generator_rules(run: str) -> str:
    """Tickets and frames. FCALL asks for all rights on all of a lane's keys: they are granted to that command alone."""
    lane = f"{{{run}:*}}"
    keys = [
        *(f"~{lane}:{place}" for place in _GENERATOR_WRITES.split()),
        *(f"%R~{lane}:{place}" for place in _GENERATOR_READS.split()),
        f"%W~{lane}:frames",  # what others sampled is not to be read
        f"%R~{_RECORD}",
    ]
    return " ".join([*keys, *_commands(_ANYBODY, _TICKETS), f"(+fcall ~{lane}:*)"])


def with_user(url: str, user: str) -> str:
    """`url` for another user."""
    parts = urlsplit(url)
    return parts._replace(netloc=f"{user}@{parts.netloc.rpartition('@')[2]}").geturl()


def user_of(url: str) -> str:
    """The user in `url`; empty when there is none."""
    return urlsplit(url).username or ""


def _commands(*lists: str) -> Iterator[str]:
    for commands in lists:
        yield from (f"+{command}" for command in commands.split())
