"""The store that a run starts for itself: its two users, and where it listens."""

from asyncrl.buffer.server import StoreServer
from asyncrl.buffer.users import GENERATOR, LEARNER, StoreUser, generator_rules, learner_rules
from asyncrl.config.schema import Config
from asyncrl.launch.directory import RunDirectory


def own_store(config: Config, directory: RunDirectory) -> StoreServer:
    """Not started yet."""
    keys, run = directory.keys(), config.run.name
    users = (
        StoreUser(LEARNER, keys.store_password(LEARNER), learner_rules(run)),
        StoreUser(GENERATOR, keys.store_password(GENERATOR), generator_rules(run)),
    )
    return StoreServer(config.store, directory.store, users=users)
