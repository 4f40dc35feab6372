"""The store's part of the config: where it is, and how safely it is reached."""

from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from asyncrl.config.addresses import one_place, open_ways
from asyncrl.config.base import Mistake, Mistakes, Part, Positive, PositiveFloat


def holds_password(url: str) -> bool:
    """Whether a store's URL would give one away."""
    parts = urlsplit(url)
    return parts.password is not None or "password=" in parts.query


class StoreConfig(Part):
    """The Redis-compatible store."""

    url: Annotated[str, Field(pattern=r"^(redis|rediss|unix)://", examples=["redis://HOST:6379/0"])] | None = None
    """redis://, rediss:// or unix://, without a password; default: a server started for this run."""
    bind: Annotated[str | None, Field(pattern=r"^tcp://\S*:\d+$")] = None
    """tcp://HOST:PORT where a server started for this run listens too, for generators on other hosts; HOST is one interface's
    address."""
    password_env: str = "ASYNCRL_STORE_PASSWORD"
    """Environment variable with the password of `url`."""
    insecure: bool = False
    """True lets `url` lead to another host without TLS, without a checked certificate, or without a password: in a network of
    your own."""
    fsync: Literal["always", "everysec", "no"] = "everysec"
    """Of a server started for this run; exactness does not rest on it."""
    max_gib: PositiveFloat = 4.0
    """Cap on stored groups; generators wait when it is reached."""
    shards: Positive = 1
    """Lanes that the ticket ids are dealt to, each under a hash tag of its own; divides `batch.groups` and the window, and
    stays as it is when a run is resumed."""

    @field_validator("url")
    @classmethod
    def _holds_no_password(cls, url: str | None) -> str | None:
        if holds_password(url or ""):
            raise ValueError(
                "store.url holds a password, which the saved config and process lists would show; leave only the user in it, "
                "and put the password into the environment variable that store.password_env names"
            )
        return url

    @field_validator("bind")
    @classmethod
    def _binds_one_interface(cls, bind: str | None) -> str | None:
        if bind is not None:
            one_place("store.bind", bind)
        return bind

    @model_validator(mode="after")
    def _is_guarded(self) -> Self:
        if self.url is not None and not self.insecure and (ways := list(open_ways(self.url))):
            text = (
                f"store.url is {self.url}: {'; '.join(ways)}. In a network that nobody else reaches, store.insecure: true "
                "accepts it"
            )
            raise Mistakes(Mistake(("store.url",), text))
        return self
