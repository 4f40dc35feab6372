"""The store of a run: another's, which is tried, or its own with its users, which is kept alive."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager

from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.server import StoreServer
from asyncrl.buffer.users import GENERATOR, LEARNER, StoreUser, generator_rules, learner_rules
from asyncrl.config.addresses import stays_here
from asyncrl.config.schema import Config
from asyncrl.config.store import StoreConfig
from asyncrl.errors import RunError, StoreError
from asyncrl.hosting.progress import Attention
from asyncrl.run.directory import RunDirectory

log = logging.getLogger(__name__)

AGAIN_S = ASK_S = 1.0
# A store without an answer for so long is killed. It is back before the processes that wait for it give up.
SILENT_S = 15.0


class KeptStore:
    """A running server that is started again whenever it ends. No method waits for the server to load."""

    def __init__(self, server: StoreServer, *, silent_s: float = SILENT_S) -> None:
        """Keep `server`, and kill it when it has not answered for `silent_s`."""
        self.server = server
        # Whether the server answered at the last `tend`; False while it starts and loads.
        self.is_up = True
        self._is_begun = True
        self._again_at_s = 0.0
        self._silent_s = silent_s
        self._attention = Attention()
        self._ask_at_s = self._heard_at_s = 0.0

    def tend(self) -> None:
        """Start the server again if it has ended. Call this continually."""
        if self.is_up and self.is_silent():
            log.error("the store has not answered for %.0f s and is killed", self._silent_s)
            self.server.kill()
        if (self.is_up and self.server.is_running) or time.monotonic() < self._again_at_s:
            return
        if self.is_up:
            log.warning("the store died and is started again; the learner makes it agree with its ledger")
            self.is_up = self._is_begun = False
        try:
            if not self._is_begun:
                self.server.stop()
                self.server.begin()
                self._is_begun = True
            elif self.server.comes_up():
                self.is_up, self._heard_at_s = True, self._attention.look()
                log.info("the store answers again")
        # A full disk can be cleared; every process that waits for the store has its own bound.
        except (StoreError, OSError) as error:
            log.error("the store cannot be started and is tried again in %.0f s: %s", AGAIN_S, error)
            self._is_begun, self._again_at_s = False, time.monotonic() + AGAIN_S

    def is_silent(self) -> bool:
        """Ask the server once a second; one that was stopped (SIGSTOP) lives and does not answer."""
        now_s = self._attention.look()
        if now_s >= self._ask_at_s:
            self._ask_at_s = now_s + ASK_S
            if self.server.look() != "silent":
                self._heard_at_s = now_s
        return now_s - self._heard_at_s > self._silent_s


def own_store(config: Config, directory: RunDirectory, *, needs_data: bool = False) -> StoreServer:
    """Return the server, not started. Unless it `needs_data`, it starts empty if its data is unreadable."""
    keys, run = directory.keys(), config.run.name
    users = (
        StoreUser(LEARNER, keys.store_password(LEARNER), learner_rules(run)),
        StoreUser(GENERATOR, keys.store_password(GENERATOR), generator_rules(run)),
    )
    # Old data is read on this host, which need not have the address in the config.
    settings = config.store.model_copy(update={"bind": None}) if needs_data else config.store
    return StoreServer(settings, directory.store, users=users, needs_data=needs_data)


@contextmanager
def opened_store(
    config: Config, directory: RunDirectory, environment: Mapping[str, str]
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the store's URL, and a function to call continually, which restarts a store of the run's own.

    Raises RunError and StoreError for a store that cannot be used, before anything is started.
    """
    if config.store.url is not None:
        require_password(config.store, environment)
        password = environment.get(config.store.password_env)
        with closing(StoreConnection(config.store.url, password=password, retry_s=5.0)) as connection:
            connection.check()
        yield config.store.url, lambda: None
        return
    with own_store(config, directory) as server:
        yield server.url, KeptStore(server).tend


def require_password(store: StoreConfig, environment: Mapping[str, str]) -> None:
    """Raise RunError for a store on another host if this process has no password for it."""
    if store.url is None or store.insecure or environment.get(store.password_env) or stays_here(store.url):
        return
    raise RunError(
        f"store.url is {store.url}, on another host, and {store.password_env} holds no password: anybody who "
        "reaches that store could delete the run's groups; give it the users of docs/security.md and put the "
        f"learner's password into {store.password_env}, or set store.insecure: true in a private network"
    )
