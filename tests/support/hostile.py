"""Values that somebody may write into the store who speaks to it as a generator."""

import random
from collections.abc import Callable

import redis

WRITABLE = "leased deadlines holders reissue ready requests attempts deaths counters totals frames".split()  # noqa: SIM905
ZSETS = {"leased", "deadlines", "reissue", "ready"}
NUMBERS = [
    "0",
    "-1",
    "1",
    "5",
    "9007199254740992",
    "9e15",
    "1e300",
    "99999999999999999999",
    "inf",
    "nan",
    "-0",
    "007",
    "1.5",
]
TEXTS = [*NUMBERS, "abc", "", "foo bar", "\xff", "given up: "]
FIELDS = {
    "totals": ["issued", "bytes"],
    "counters": [
        "put",
        "duplicate",
        "unknown",
        "full",
        "lease_expired",
        "failed",
        "dead",
        "deaths",
        "returned",
        "x",
    ],
    "requests": ["g", "other"],
}


def damage(
    client: redis.Redis, key_of: Callable[[str], str], rng: random.Random, *, first: int = 1
) -> list[str]:
    """Any value in what a generator may write, once or a few times; and what it may not: keys of other types.

    `key_of` gives the key of a place of the lane; `first` is the lowest ticket that may be meant. Returns
    what was done.
    """
    done, ids = [], [*map(str, range(first, first + 23)), *TEXTS]
    for _ in range(rng.choice([1, 1, 2, 5])):
        place = rng.choice(WRITABLE)
        key = key_of(place)
        if rng.random() < 0.15:
            client.delete(key)  # as when nothing has been in it yet
            if place in ZSETS:
                client.hset(key, "1", "x")
            else:
                client.zadd(key, {"1": 1.0})
            done.append(f"type of {place}")
        elif place in ZSETS and client.type(key) in (b"zset", b"none"):
            member, score = rng.choice(ids), rng.choice([0.0, 1.0, 5.0, 1e300, -1.0, float("inf")])
            client.zrem(key, member) if rng.random() < 0.3 else client.zadd(key, {member: score})
            done.append(f"{place} {member} {score}")
        elif place not in ZSETS and client.type(key) in (b"hash", b"none"):
            field, value = rng.choice(FIELDS.get(place, ids)), rng.choice(TEXTS)
            client.hdel(key, field) if rng.random() < 0.2 else client.hset(key, field, value)
            done.append(f"{place} {field} {value!r}")
    return done
