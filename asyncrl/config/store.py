"""The section of the store: its address and its protection."""

from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from asyncrl.algo.ranges import Positive, PositiveInt
from asyncrl.config.addresses import insecurities, require_one_address
from asyncrl.config.base import Mistake, Mistakes, Part
from asyncrl.config.resume import refused


def holds_password(url: str) -> bool:
    """Return whether a store's URL contains a password."""
    parts = urlsplit(url)
    return parts.password is not None or "password=" in parts.query


class StoreConfig(Part):
    """The Redis-compatible store."""

    url: (
        Annotated[str, Field(pattern=r"^(redis|rediss|unix)://", examples=["redis://HOST:6379/0"])] | None
    ) = None
    """redis://, rediss:// or unix://, without a password; by default the run starts a server."""
    bind: Annotated[str | None, Field(pattern=r"^(auto|tcp://\S*:\d+)$")] = None
    """tcp://HOST:PORT on which the run's own server also listens, for generators on other hosts. HOST is the
    address of one interface, or `auto`: the one that reaches the other hosts. `auto` alone has port 16379."""
    password_env: str = "ASYNCRL_STORE_PASSWORD"
    """Environment variable with the password of `url`."""
    insecure: bool = False
    """True allows a `url` on another host without TLS, checked certificate or password. Use it only in a
    private network."""
    fsync: Literal["always", "everysec", "no"] = "everysec"
    """Sync policy of the run's own server. Correctness does not depend on it."""
    max_gib: Positive = 4.0
    """Limit of stored groups in GiB; above it generators wait."""
    shards: Annotated[PositiveInt, refused("each shard counts its own ids, which would be others")] = 1
    """Lanes among which ticket ids are divided, each with its own hash tag. The number must divide
    `batch.groups` and the window, and must not change on resume."""
    isolate_decoding: bool = False
    """True decodes each group in a separate process before the learner decodes it. A group that crashes or
    hangs that process is refused, and the learner continues. Each group is then decoded twice."""

    @field_validator("url")
    @classmethod
    def _holds_no_password(cls, url: str | None) -> str | None:
        if holds_password(url or ""):
            raise ValueError(
                "store.url holds a password, which the saved config and process lists would show; remove it, "
                "and put it into the environment variable that store.password_env names"
            )
        return url

    @field_validator("bind")
    @classmethod
    def _binds_one_interface(cls, bind: str | None) -> str | None:
        if bind is not None:
            require_one_address("store.bind", bind)
        return bind

    @model_validator(mode="after")
    def _is_guarded(self) -> Self:
        if self.url is not None and not self.insecure and (ways := list(insecurities(self.url))):
            text = (
                f"store.url is {self.url}: {'; '.join(ways)}. In a private network set store.insecure: true"
            )
            raise Mistakes(Mistake(("store.url",), text))
        return self
