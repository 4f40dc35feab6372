"""Users of a store, and what none of them may do."""

from typing import Any

from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.redis import LIBRARY, RedisBuffer


class ByRole(RedisBuffer):
    """What generators do is done by their user, the rest by the learner's."""

    def __init__(self, learner: StoreConnection, generator: StoreConnection, run: str, rules: Any) -> None:
        super().__init__(learner, run, rules)
        self._generators = RedisBuffer(generator, run, rules)
        for name in ("lease", "renew", "put", "give_back", "fail"):
            setattr(self, name, getattr(self._generators, name))


REFUSED = r"no permissions|No permissions|not allowed"
ATTACKS = [
    ("HSET", "meta", "epoch", "99"),
    ("HSET", "meta", "limit", "1000000"),
    ("HDEL", "meta", "epoch"),
    ("HINCRBY", "meta", "version", "1"),
    ("HSET", "takes", "1", "x"),
    ("DEL", "meta"),
    ("UNLINK", "frames"),
    ("HGET", "frames", "5"),
    ("HGETALL", "frames"),
    ("SADD", "done", "9"),
    ("ZREM", "ready", "4"),
    ("ZADD", "holders", "1", "4"),
    ("HSET", "leased", "1", "x"),
    ("SET", "requests", "x"),
    ("RENAME", "ready", "meta"),
    ("COPY", "ready", "meta"),
    ("EVAL", "return redis.call('FLUSHALL')", "0"),
    ("FUNCTION", "LOAD", "REPLACE", LIBRARY),
    ("FUNCTION", "FLUSH"),
    ("FUNCTION", "DELETE", LIBRARY.split("name=")[1].split("\n")[0]),
    ("FLUSHALL",),
    ("FLUSHDB",),
    ("CONFIG", "GET", "*"),
    ("CONFIG", "SET", "maxmemory", "1"),
    ("KEYS", "*"),
    ("SCAN", "0"),
    ("ACL", "SETUSER", "generator", "+@all"),
    ("ACL", "LIST"),
    ("CLIENT", "LIST"),
    ("CLIENT", "KILL", "TYPE", "normal"),
    ("MONITOR",),
    ("REPLICAOF", "127.0.0.1", "1"),
    ("DEBUG", "SLEEP", "0"),
    ("SCRIPT", "KILL"),
    ("SHUTDOWN", "NOSAVE"),
    ("INFO",),
]
OF_A_RULER = [
    ("FLUSHALL",),
    ("CONFIG", "GET", "*"),
    ("EVAL", "return 1", "0"),
    ("KEYS", "*"),
    ("ACL", "LIST"),
]
