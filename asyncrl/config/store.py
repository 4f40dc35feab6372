"""The section of the store: its address and its protection."""

import os
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from asyncrl.algo.ranges import Positive, PositiveInt
from asyncrl.config.addresses import one_address
from asyncrl.config.base import Part, refused
from asyncrl.files import MOST_SOCKET_BYTES


def holds_password(url: str) -> bool:
    """Return whether a store's URL contains a password."""
    parts = urlsplit(url)
    return parts.password is not None or "password=" in parts.query


def _usable(url: str) -> str:
    if holds_password(url):
        found = "holds a password, which the saved config and process lists would show"
        cure = "remove it, and put it into the environment variable that store.password_env names"
        raise ValueError(f"{found}; {cure}")
    _ = urlsplit(url).port  # raises ValueError for a number that is too large
    path = url.removeprefix("unix://").partition("?")[0]
    if path != url and len(os.fsencode(path)) > MOST_SOCKET_BYTES:
        found = f"has a path of {len(os.fsencode(path))} bytes"
        raise ValueError(f"{found}; a socket has at most {MOST_SOCKET_BYTES}; let the store listen elsewhere")
    return url


class StoreConfig(Part):
    """The Redis-compatible store."""

    url: (
        Annotated[
            str,
            Field(pattern=r"^(redis|rediss|unix)://.", examples=["redis://HOST:6379/0"]),
            AfterValidator(_usable),
        ]
        | None
    ) = None
    """Address without a password: redis://, rediss:// or unix://. By default the run starts a server."""
    bind: Annotated[str, Field(pattern=r"^(auto|tcp://\S*:\d+)$"), AfterValidator(one_address)] | None = None
    """Address of the run's server for other hosts. HOST may be `auto`, the address that reaches them; `auto`
    alone has port 16379."""
    password_env: str = "ASYNCRL_STORE_PASSWORD"
    """Environment variable with the password of `url`."""
    insecure: bool = False
    """True allows a `url` on another host without TLS or password, in a private network."""
    fsync: Literal["always", "everysec", "no"] = "everysec"
    """Sync policy of the run's server; correctness does not need it."""
    max_gib: Positive = 4.0
    """Limit of stored groups, above which generators wait."""
    shards: Annotated[PositiveInt, refused("each shard counts its own ids, which would be others")] = 1
    """Lanes among which ticket ids are divided; must divide `batch.groups` and the window."""
