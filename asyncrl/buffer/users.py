"""The users of the store and their rights: one user for the learner, one for all generators.

The server checks every command of a user, also inside functions. A generator can use the functions that work
on tickets and frames. No sequence of its calls can write what belongs to the learner: `meta` (epoch, version,
limit, watermark, ...), the takes, the finished ids, the record of the run. A generator can also send the
commands of its functions directly, so its rights on each place of a lane are limited to those commands.
"""

import hashlib
from dataclasses import dataclass, field
from urllib.parse import urlsplit

LEARNER, GENERATOR = "learner", "generator"

_RECORD = "asyncrl:run"
_EVERYONE = "ping select multi exec time"
# Places of a lane -> commands that the generators' functions use there.
_GENERATOR = {
    "leased": "zadd zrem zrange zscore",
    "deadlines": "zadd zrem zrangebyscore",
    "holders deaths": "hget hset hdel hgetall",
    "reissue": "zadd zrem zrange zscore zrangebyscore",
    "ready": "zadd zscore",  # no removal of stored groups
    "frames": "hset hsetnx hdel hexists hstrlen",  # no reading of other generators' frames
    "requests attempts counters totals": "hget hset",
    "meta": "hget",
    "takes": "hget hkeys",
    "done": "sismember",
}
_LEARNER = (
    "hget hgetall hmget hset hsetnx hdel hexists hstrlen hkeys zadd zrem zrange zrangebyscore zscore zcard "
    "zremrangebyrank sismember sadd srem scard lpush lrange ltrim del unlink scan info function|load fcall"
)


@dataclass(frozen=True, slots=True)
class StoreUser:
    """One user of a server."""

    name: str
    password: str = field(repr=False)
    # Keys and commands, as arguments of ACL SETUSER.
    rules: str

    @property
    def setting(self) -> str:
        """The arguments of `user` in a server's configuration and of ACL SETUSER, with a hashed password."""
        return f"{self.name} on #{hashlib.sha256(self.password.encode()).hexdigest()} {self.rules}"


def learner_rules(run: str) -> str:
    """Return rights on the run's lanes and record; none to configure or wipe the server, or run scripts."""
    return f"~{{{run}:*}}:* ~{_RECORD} {_commands(_EVERYONE)} {_commands(_LEARNER)}"


def generator_rules(run: str) -> str:
    """Return rights on tickets and frames. Only FCALL has rights on all keys of a lane, which it needs."""
    lane = f"~{{{run}:*}}"
    keys_of = {
        " ".join(f"{lane}:{place}" for place in places.split()): commands
        for places, commands in _GENERATOR.items()
    }
    keys_of |= {f"~{_RECORD}": "hgetall", f"{lane}:*": "fcall"}
    return " ".join(
        [_commands(_EVERYONE), *(f"({keys} {_commands(commands)})" for keys, commands in keys_of.items())]
    )


def with_user(url: str, user: str) -> str:
    """Return `url` with another user."""
    parts = urlsplit(url)
    return parts._replace(netloc=f"{user}@{parts.netloc.rpartition('@')[2]}").geturl()


def user_of(url: str) -> str:
    """Return the user in `url`, or an empty text."""
    return urlsplit(url).username or ""


def _commands(names: str) -> str:
    return " ".join(f"+{name}" for name in names.split())
