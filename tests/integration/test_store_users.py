"""Who may do what in our own store: every command and function, for each role, on every supported server."""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from redis.exceptions import NoPermissionError, ResponseError

from asyncrl.buffer.base import PutOutcome
from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.ledger import Ledger, sha1_of
from asyncrl.buffer.redis import PLACES, RedisBuffer
from asyncrl.buffer.run_record import RunRecord
from asyncrl.buffer.server import StoreServer
from asyncrl.buffer.users import (
    GENERATOR,
    LEARNER,
    StoreUser,
    generator_rules,
    learner_rules,
    user_of,
    with_user,
)
from asyncrl.config.store import StoreConfig
from asyncrl.errors import StoreError, StoreRefused
from asyncrl.lineage import INITIAL
from tests.support.buffer_contract import FRAME, RULES, BufferContract, fill, take
from tests.support.redis_lane import RUN, RedisLane
from tests.support.store_servers import SERVERS
from tests.support.store_users import ATTACKS, OF_A_RULER, REFUSED, ByRole

pytestmark = pytest.mark.integration

ADMIN = "admin"
"""Looks from outside; no run has it."""
PASSWORDS = {LEARNER: "learner's", GENERATOR: "generator's", ADMIN: "admin's"}
RULES_OF = {LEARNER: learner_rules("run-*"), GENERATOR: generator_rules("run-*"), ADMIN: "~* &* +@all"}
USERS = tuple(StoreUser(name, password, RULES_OF[name]) for name, password in PASSWORDS.items())

OF_NOBODY = {"auth", "hello", "quit", "reset"}
"""Every server lets everybody, also those who have not said who they are."""
OF_GENERATORS = {
    *("ping", "select", "multi", "exec", "time", "fcall"),
    *("hget", "hgetall", "hset", "hsetnx", "hdel", "hexists", "hkeys", "hstrlen"),
    *("sismember", "zadd", "zrem", "zrange", "zrangebyscore", "zscore"),
}
OF_NO_PLACE = {"ping", "select", "multi", "exec", "time", "fcall"}
OF_THE_LEARNER = OF_GENERATORS | {
    *("del", "unlink", "scan", "info", "function|load", "hmget"),
    *("lpush", "lrange", "ltrim", "sadd", "scard", "srem", "zcard", "zremrangebyrank"),
}


@pytest.fixture(scope="module", params=SERVERS)
def server(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("store")
    with StoreServer(StoreConfig(fsync="no"), directory, server=request.param, users=USERS) as running:
        yield running


@pytest.fixture
def connect(server):
    made = []

    def connection(user: str, retry_s: float = 5.0) -> StoreConnection:
        made.append(StoreConnection(with_user(server.url, user), password=PASSWORDS[user], retry_s=retry_s))
        return made[-1]

    yield connection
    for one in made:
        one.close()


@pytest.fixture
def lane(connect):
    return Lane(connect)


class Lane(RedisLane):
    """Seen by the admin, used by learner and generators."""

    def __init__(self, connect: Callable[[str], StoreConnection]) -> None:
        super().__init__(connect(ADMIN))
        self.learner, self.generator = connect(LEARNER), connect(GENERATOR)
        RedisBuffer(self.learner, self.run, self.rules).audit()  # loads the functions

    def handle(self) -> RedisBuffer:
        return ByRole(self.learner, self.generator, self.run, self.rules)

    def of_generators(self) -> RedisBuffer:
        return RedisBuffer(self.generator, self.run, self.rules)

    def dump(self) -> dict[Any, Any]:
        """Everything that the server holds."""
        client = self.connection.client
        functions = [(library[1], sorted(map(str, library[5]))) for library in client.function_list()]
        return {key: client.dump(key) for key in sorted(client.keys())} | {"functions": functions}


class TestRoles(BufferContract):
    """The whole contract works with the rights that each role has."""

    @pytest.fixture
    def lane(self, connect):
        return Lane(connect)


# -- what a role may not do


def under_way(lane: Lane) -> tuple[RedisBuffer, Ledger, Any]:
    """A lane with something in every place: done, taken, ready, leased, issued again, a dead letter."""
    buffer, ledger = lane.handle(), Ledger()
    buffer.recover(ledger, version=0, limit=12)
    fill(buffer, 8)
    first = take(buffer, ledger, 2)
    buffer.commit(first.number, first.chain)
    second = buffer.reject_frame(buffer.take(ledger, 2, window=8), 3, FRAME % 3, "bad")
    ledger.consume(second.ids)
    buffer.lease("g", 3)
    RunRecord(lane.learner, b"key")._write(replace(RUN, name=lane.run))
    return buffer, ledger, second


def learners_calls(buffer: RedisBuffer, ledger: Ledger, taken: Any) -> dict[str, tuple[object, ...]]:
    """Calls as this very learner would make them: its epoch and its name can be read."""
    me = (buffer._epoch, buffer._owner)
    return {
        "take": (*me, ledger.takes + 1, ledger.chain, 2, 100, 5),
        "reject": (*me, taken.number, taken.chain, taken.ids[0], sha1_of(FRAME % taken.ids[0]), "because", 2),
        "commit": (*me, taken.number, taken.chain),
        "version": (*me, 5, 99),
        "close": me,
        "recover": (buffer._epoch, "usurper", 1, 0, Ledger().chain, 0, 12, 0, "", str(INITIAL), 1000),
        "revoke": ("g",),
    }


@pytest.mark.parametrize(
    "function", ["take", "reject", "commit", "version", "close", "recover", "revoke", "audit"]
)
def test_a_generator_that_calls_the_learners_functions_changes_nothing(lane, function):
    buffer, ledger, taken = under_way(lane)
    arguments = learners_calls(buffer, ledger, taken).get(function, ())
    before = lane.dump()
    with pytest.raises(StoreRefused, match=r"ACL failure in script|user executing the script can't"):
        lane.of_generators()._call(function, *arguments)
    assert lane.dump() == before
    reply = buffer._call(function, *arguments)
    assert reply == 3 if function == "revoke" else function == "audit" or reply[0] == b"OK"
    assert function == "audit" or lane.dump() != before, "it would have had an effect"


def commands(lane: Lane) -> dict[str, int]:
    """Every command and subcommand that the server knows, with how many words it takes at least."""
    client, found = lane.connection.client, {}
    client.set_response_callback("COMMAND", lambda reply, **_: reply)
    for name, arity, *_, subcommands in client.execute_command("COMMAND"):
        for each, words, *_ in subcommands or [(name, arity)]:
            found[each.decode()] = abs(words)
    return found


def dry_run(lane: Lane, user: str, *words: str) -> bytes:
    return lane.connection.client.execute_command("ACL", "DRYRUN", user, *words)


@pytest.mark.parametrize(("user", "allowed"), [(GENERATOR, OF_GENERATORS), (LEARNER, OF_THE_LEARNER)])
def test_no_role_may_use_another_command(lane, user, allowed):
    known = commands(lane)
    assert {
        "flushall",
        "config|set",
        "eval",
        "keys",
        "function|flush",
        "acl|setuser",
        "debug",
        "shutdown",
    } <= known.keys()
    possible = set()
    for name, words in known.items():
        line = name.split("|")
        said = dry_run(lane, user, *line, *["1"] * (words - len(line)))
        if b"no permissions to run the" not in said:
            possible.add(name)
    assert possible - OF_NOBODY == allowed


RECORD = "asyncrl:run"


def permitted(lane: Lane, user: str) -> set[tuple[str, str]]:
    """Which commands on which places: what the server says."""
    words, keys = commands(lane), {place: lane.key(place) for place in PLACES} | {RECORD: RECORD}
    return {
        (name, place)
        for name, (place, key) in itertools.product(OF_GENERATORS - OF_NO_PLACE, keys.items())
        if dry_run(lane, user, name, key, *["1"] * (words[name] - 2)) == b"OK"
    }


def a_generators_life(lane: Lane) -> None:
    """Every path of the functions that generators call."""
    learner, generator, ledger = lane.handle(), lane.of_generators(), Ledger()
    learner.recover(ledger, version=0, limit=12)
    RunRecord(lane.learner, b"key")._write(replace(RUN, name=lane.run))
    with noted(lane):
        RunRecord(lane.generator, b"key").read()
        fill(generator, 4)
        assert generator.put("g", 1, b"again") is PutOutcome.DUPLICATE
        assert generator.put("g", 99, b"") is PutOutcome.UNKNOWN
    take(learner, ledger, 2)
    with noted(lane):
        once = [generator._call("lease", "g", 2, 1000, 7, 5) for _ in range(2)]
        assert once[0][3] == once[1][3] == [b"5", b"6"], "a lost reply is asked for again"
        generator.renew("g", [5, 6])
        for _ in range(2):  # offered, the second time
            assert generator.put("g", 6, bytes(2000)) is PutOutcome.FULL
        generator.give_back("g", [6])
        for _ in range(RULES.max_attempts):
            generator.fail("g", 5, "why", b"tombstone")
            generator.lease("g", 1)
        lane.generator.client.hset(lane.key("frames"), "6", "left behind")
    for _ in range(4):  # till a ticket that is lost again and again is sampled alone
        lane.expire()
        with noted(lane):
            generator.lease("g", 3)


@contextmanager
def noted(lane: Lane) -> Iterator[None]:
    lane.connection.client.echo("begin")
    yield
    lane.connection.client.echo("end")


def test_a_generator_may_do_in_each_place_what_its_functions_do_there_and_nothing_else(lane):
    seen, on = set(), False
    with lane.connection.client.monitor() as monitor:
        a_generators_life(lane)
        lane.connection.client.echo("over")
        while (line := monitor.next_command()["command"]) != "ECHO over":
            name, key, *_ = [*line.split(" "), ""]
            on = key == "begin" if name == "ECHO" else on
            if on and key.startswith((RECORD, f"{{{lane.run}:")):
                seen.add((name.lower(), key.removeprefix(lane.key(""))))
    assert seen == permitted(lane, GENERATOR)


def test_every_place_of_the_run_is_the_learners_and_nothing_of_another_run_is_anybodys(lane):
    tried = [("hget", "f"), ("hset", "f", "v"), ("zadd", "1", "m"), ("zrange", "0", "1")]
    for (name, *rest), place in itertools.product(tried, PLACES):
        assert dry_run(lane, LEARNER, name, lane.key(place), *rest) == b"OK", place
        for user, key in itertools.product(
            (GENERATOR, LEARNER), ("{other:train}:meta", "{other:train}:ready", "anything")
        ):
            assert dry_run(lane, user, name, key, *rest) != b"OK", (user, key)
    assert {("hget", RECORD), ("hset", RECORD)} <= permitted(lane, LEARNER)


def test_a_frame_that_was_left_behind_stops_no_generator(lane):
    """A frame without its PUT, as after the store lost its functions, for a ticket whose lease runs out."""
    buffer, ledger = lane.handle(), Ledger()
    buffer.recover(ledger, version=0, limit=12)
    fill(buffer, 4)
    take(buffer, ledger, 2)
    buffer.lease("g", 2)
    lane.generator.client.hset(lane.key("frames"), "5", "left behind")
    lane.expire()
    assert [ticket.id for ticket in buffer.lease("h", 2).tickets] == [5, 6]
    assert buffer.put("h", 6, b"x") is PutOutcome.STORED


@pytest.mark.parametrize("words", ATTACKS, ids=[" ".join(words[:3])[:30] for words in ATTACKS])
def test_a_generator_is_refused_and_nothing_has_changed(lane, words):
    under_way(lane)
    before = lane.dump()
    line = [lane.key(word) if word in PLACES else word for word in words]
    with pytest.raises(ResponseError, match=REFUSED):
        lane.generator.client.execute_command(*line)
    assert lane.dump() == before


@pytest.mark.parametrize("words", OF_A_RULER, ids=str)
def test_the_learner_does_not_rule_the_server(lane, words):
    with pytest.raises(NoPermissionError):
        lane.learner.client.execute_command(*words)


def test_the_worst_that_a_generator_may_write_leaves_the_learners_places_alone_and_is_healed_by_its_ledger(
    lane,
):
    buffer, ledger, _ = under_way(lane)
    client, before = lane.generator.client, lane.dump()
    for place in ("leased", "deadlines", "reissue", "ready"):
        client.zadd(lane.key(place), {"1": 1, "11": 11, "nonsense": 0})
    for place in ("holders", "requests", "attempts", "deaths", "counters", "totals"):
        client.hset(lane.key(place), mapping={"5": "7", "issued": "3", "bytes": "-9"})
    client.hdel(lane.key("frames"), "5", "6")
    after = lane.dump()
    kept = [lane.key(place).encode() for place in ("meta", "takes", "done", "dead_letters")] + [
        b"asyncrl:run"
    ]
    assert [after[key] for key in kept if key in before] == [before[key] for key in kept if key in before]
    lane.wipe()
    buffer.recover(ledger, version=0, limit=12)
    assert (buffer.audit().done, buffer.audit().missing) == (ledger.consumed, 0)


def test_the_record_of_the_run_is_read_by_generators_and_written_by_the_learner(lane):
    lane.connection.client.delete("asyncrl:run")
    RunRecord(lane.learner, b"key").claim(RUN, fresh=False)
    assert RunRecord(lane.generator, b"key").read() == RUN
    with pytest.raises(StoreRefused):
        RunRecord(lane.generator, b"key").renew(RUN)
    lane.connection.client.delete("asyncrl:run")


# -- who is nobody


STRANGERS = [
    (None, None),
    ("default", ""),
    ("default", "x"),
    (None, "learner's"),
    ("nobody", "x"),
    (LEARNER, "generator's"),
    (LEARNER, ""),
]


@pytest.mark.parametrize(("user", "password"), STRANGERS)
def test_strangers_are_refused(server, user, password):
    url = with_user(server.url, user) if user else server.url
    with pytest.raises(StoreRefused, match="refused a call"):
        StoreConnection(url, password=password, retry_s=60).call(lambda client: client.ping())


def test_a_generator_waits_for_the_learner_to_load_the_functions(lane, connect):
    buffer = lane.handle()
    buffer.recover(Ledger(), version=0, limit=8)
    lane.connection.client.function_flush()
    with pytest.raises(StoreError, match="not loaded its functions") as told:
        RedisBuffer(connect(GENERATOR, retry_s=0.2), lane.run, RULES).lease("g", 1)
    assert not isinstance(told.value, StoreRefused), "a restart would be of no use"
    loading = threading.Timer(0.3, buffer.audit)
    loading.start()
    try:
        (ticket,) = lane.of_generators().lease("g", 1).tickets
        assert lane.of_generators().put("g", ticket.id, b"frame") is PutOutcome.STORED
    finally:
        loading.join()


def test_no_password_is_in_the_servers_memory_of_its_settings(lane):
    said = str(lane.connection.client.acl_list()) + str(lane.connection.client.config_get("*"))
    assert not any(password in said for password in PASSWORDS.values())
    assert not any(password in repr(USERS) for password in PASSWORDS.values())


@pytest.mark.parametrize("choice", SERVERS)
def test_a_server_that_starts_again_knows_what_its_users_did(choice, tmp_path):
    with StoreServer(StoreConfig(fsync="always"), tmp_path, server=choice, users=USERS) as server:
        urls = {user: with_user(server.url, user) for user in PASSWORDS}
        lane = Lane(lambda user: StoreConnection(urls[user], password=PASSWORDS[user], retry_s=20))
        under_way(lane)
        before = lane.dump()
        for end in (server.kill, server.stop):
            end()
            server.start()
            assert lane.connection.call(lambda client: lane.dump()) == before
            with pytest.raises(StoreRefused):
                StoreConnection(server.url, retry_s=20).check()


def test_urls_name_their_user():
    assert with_user("unix:///a/b%20c.sock", LEARNER) == "unix://learner@/a/b%20c.sock"
    assert with_user("redis://other@host:1/2", GENERATOR) == "redis://generator@host:1/2"
    assert [user_of(url) for url in ("redis://host", "redis://x@host", "unix://y@/a")] == ["", "x", "y"]


def test_a_server_that_listens_needs_users(tmp_path):
    with pytest.raises(StoreError, match="without passwords"):
        StoreServer(StoreConfig(bind="tcp://127.0.0.1:7"), tmp_path)
