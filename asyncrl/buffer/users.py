"""Who may do what in the store: a user for the learner, one for the generators, nobody else.

The server checks every single command of a user, also inside functions. So a generator can use the functions that work
on tickets and frames, and nothing that it calls, in whatever order, writes what only the learner may write: `meta`
(epoch, version, limit, watermark, ...), the takes, the finished ids, the record of the run. What its functions do it can
do by itself as well: each place is open to the commands that they use there, and to no other.
"""

import hashlib
from dataclasses import dataclass, field
from urllib.parse import urlsplit

LEARNER, GENERATOR = "learner", "generator"

_RECORD = "asyncrl:run"
_ANYBODY = "ping select multi exec time"
# Places of a lane, and what the functions that generators call do there.
_GENERATOR = {
    "leased": "zadd zrem zrange zscore",
    "deadlines": "zadd zrem zrangebyscore",
    "holders deaths": "hget hset hdel hgetall",
    "reissue": "zadd zrem zrange zscore zrangebyscore",
    "ready": "zadd zscore",  # what is handed over stays
    "frames": "hset hsetnx hdel hexists hstrlen",  # what others sampled is not to be read
    "requests attempts counters totals": "hget hset",
    "meta": "hget",
    "takes": "hget hkeys",
    "done": "sismember",
}
_LEARNER = (
    "hget hgetall hmget hset hsetnx hdel hexists hstrlen hkeys zadd zrem zrange zrangebyscore zscore zcard zremrangebyrank "
    "sismember sadd srem scard lpush lrange ltrim del unlink scan info function|load fcall"
)


@dataclass(frozen=True, slots=True)
class StoreUser:
    """One user of a server."""

    name: str
    password: str = field(repr=False)
    # Keys and commands, as ACL SETUSER takes them.
    rules: str

    @property
    def setting(self) -> str:
        """After `user` in a server's configuration, or after ACL SETUSER; the password is hashed."""
        return f"{self.name} on #{hashlib.sha256(self.password.encode()).hexdigest()} {self.rules}"


def learner_rules(run: str) -> str:
    """Everything below the run's lanes, and the record; no configuration, no scripts but its own, no wiping."""
    return f"~{{{run}:*}}:* ~{_RECORD} {_commands(_ANYBODY)} {_commands(_LEARNER)}"


def generator_rules(run: str) -> str:
    """Tickets and frames. FCALL asks for all rights on all of a lane's keys: they are granted to that command alone."""
    lane = f"~{{{run}:*}}"
    keys_of = {" ".join(f"{lane}:{place}" for place in places.split()): commands for places, commands in _GENERATOR.items()}
    keys_of |= {f"~{_RECORD}": "hgetall", f"{lane}:*": "fcall"}
    return " ".join([_commands(_ANYBODY), *(f"({keys} {_commands(commands)})" for keys, commands in keys_of.items())])


def with_user(url: str, user: str) -> str:
    """`url` for another user."""
    parts = urlsplit(url)
    return parts._replace(netloc=f"{user}@{parts.netloc.rpartition('@')[2]}").geturl()


def user_of(url: str) -> str:
    """The user in `url`; empty when there is none."""
    return urlsplit(url).username or ""


def _commands(names: str) -> str:
    return " ".join(f"+{name}" for name in names.split())
