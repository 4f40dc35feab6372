"""The buffer contract over real servers, and what only a real server can do."""

import itertools
import json
import multiprocessing
import random
import socketserver
import subprocess
import threading
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.exceptions import ResponseError

from asyncrl.buffer.base import BufferRules, PutOutcome
from asyncrl.buffer.connection import StoreConnection, reason
from asyncrl.buffer.lanes import eval_lane, train_lane
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.redis import LIBRARY, RedisBuffer, hash_tag
from asyncrl.buffer.run_record import RunRecord, StoredRun, key_id
from asyncrl.buffer.server import StoreServer
from asyncrl.buffer.shards import shard_names
from asyncrl.buffer.watch import AuditWatch
from asyncrl.commands.inspect import audit_run, require_whole
from asyncrl.config.load import load_config
from asyncrl.config.store import StoreConfig
from asyncrl.data.data_files import DataFiles
from asyncrl.errors import BufferGap, ForeignRunError, RunError, StoreError, StoreRefused
from asyncrl.evaluation import Rounds
from asyncrl.files import replace_text
from tests.support.buffer_contract import RULES, BufferContract, fill, ids, places, take
from tests.support.buffer_walk import WALK_RULES, Walk
from tests.support.command import ASYNCRL
from tests.support.memory_lane import MemoryLane
from tests.support.redis_lane import RUN, RedisLane, Weighed, run_numbers
from tests.support.shard_contract import SHARDS, Run, ShardContract
from tests.support.store_servers import SERVERS
from tests.support.waiting import LONG_S

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module", params=SERVERS)
def server(request, tmp_path_factory):
    with StoreServer(
        StoreConfig(fsync="no"), tmp_path_factory.mktemp("store"), server=request.param
    ) as running:
        yield running


@pytest.fixture
def connection(server):
    connection = StoreConnection(server.url, retry_s=5.0)
    yield connection
    connection.close()


class TestRedisBuffer(BufferContract):
    @pytest.fixture
    def lane(self, connection):
        return RedisLane(connection)


class TestRedisShards(ShardContract):
    @pytest.fixture
    def make_lanes(self, connection):
        def make_lanes(shards, rules):
            run = f"sharded-{next(run_numbers)}"
            return [RedisLane(connection, rules, run=run, lane=name) for name in shard_names("train", shards)]

        return make_lanes

    @pytest.mark.parametrize("shards", SHARDS)
    @pytest.mark.parametrize("seed", range(3))
    def test_steps_are_whole_no_group_comes_twice_and_none_is_older_than_the_bound(
        self, make_lanes, shards, seed
    ):
        lanes = make_lanes(shards, BufferRules(groups=2))
        Run(lanes, max_lag=1, groups=2, window=3).check(12, random.Random(seed))


class Repeating(Weighed):
    """Every reply is lost once: the server does each call twice, and the second one changes nothing."""

    def _fcall(self, client, function, arguments):
        reply, again = self._twice(client, lambda: super(Repeating, self)._fcall(client, function, arguments))
        if function not in ("commit", "revoke", "audit"):
            assert again == reply
        return reply

    def _put(self, client, ticket_id, frame):
        return self._twice(client, lambda: super(Repeating, self)._put(client, ticket_id, frame))[0]

    def _twice(self, client, request):
        reply = request()
        before = super()._fcall(client, "audit", ())
        again = request()
        after = super()._fcall(client, "audit", ())
        assert after[:7] == before[:7], "ids moved when the call was made again"
        return reply, again


class RepeatingLane(RedisLane):
    kind = Repeating


class TestLostReplies(BufferContract):
    @pytest.fixture
    def lane(self, connection):
        return RepeatingLane(connection)

    # These count calls.
    test_a_group_is_stored_once_at_every_stage_of_its_life = None
    test_over_the_cap_nothing_is_dropped_and_only_the_awaited_group_gets_in = None


@settings(suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_memory_and_server_answer_alike_whatever_happens(connection, data):
    """Leases, groups, takes, commits, crashes, zombies, wipes and rollbacks in any order."""
    Walk([MemoryLane(WALK_RULES), RedisLane(connection, WALK_RULES)], data.draw).run(50)


@pytest.fixture
def lane(connection):
    return RedisLane(connection)


@pytest.fixture
def buffer(lane):
    buffer = lane.handle()
    buffer.recover(Ledger(), version=0, limit=8)
    return buffer


def test_lanes_of_a_run_are_separate(connection, lane, buffer):
    other = RedisBuffer(connection, lane.run, RULES, lane="eval")
    other.recover(Ledger(), version=0, limit=2)
    assert ids(buffer.lease("g", 8)) == list(range(1, 9))
    assert ids(other.lease("g", 8)) == [1, 2]
    buffer.set_version(1, limit=9)


def changes(connection):
    """That the server has made since its last snapshot, and written to its log."""
    return connection.client.info("persistence")["rdb_changes_since_last_save"]


def test_a_poll_that_finds_nothing_writes_nothing(connection, lane, buffer):
    """Hundreds of generators poll each second, and a learner that waits each few milliseconds."""
    connection.client.config_set("save", "")
    leased = ids(buffer.lease("a", 8))

    def poll():
        assert ids(buffer.lease("b", 8)) == [] == ids(buffer.lease("a", 1))
        assert buffer.take(Ledger(), 4, window=1) is None
        buffer.set_version(0, limit=8)

    poll()
    before = changes(connection)
    for _ in range(5):
        poll()
    assert changes(connection) == before
    buffer.put("a", leased[0], b"one")
    assert changes(connection) > before
    for ticket_id in leased[1:]:
        buffer.put("a", ticket_id, b"more")
    assert take(buffer, Ledger(), 4).ids == (1, 2, 3, 4)
    buffer.set_version(1, limit=12)
    assert ids(buffer.lease("b", 8)) == [9, 10, 11, 12]


def test_functions_are_loaded_again_after_the_server_lost_them(connection, lane, buffer):
    fill(buffer, 2)
    connection.client.function_flush()
    assert take(buffer, Ledger(), 2).ids == (1, 2)
    assert ids(buffer.lease("g", 1)) == [3]
    connection.client.function_flush()
    assert buffer.put("g", 3, b"three") is PutOutcome.STORED
    assert buffer.frames([3]) == [b"three"]
    assert places(buffer)["ready"] == 1
    connection.client.flushall()
    connection.client.function_flush()
    with pytest.raises(BufferGap):
        buffer.close()


def code_of(connection):
    """Of our functions, as the server has it."""
    [library] = [
        dict(zip(found[::2], found[1::2], strict=True))
        for found in connection.client.function_list(withcode=True)
    ]
    return library[b"library_code"].decode()


def test_a_recovery_loads_the_functions_anew(connection, lane, buffer, caplog):
    """A damaged log can change the code under our names."""
    wrong = LIBRARY.replace("local ALONE = 2", "local ALONE = 9")
    assert wrong != LIBRARY
    connection.client.function_load(wrong, replace=True)
    assert code_of(connection) == wrong
    buffer.recover(Ledger(), version=0, limit=8)
    assert code_of(connection) == LIBRARY
    try:
        connection.client.config_set("maxmemory", 1)
        buffer.recover(Ledger(), version=0, limit=8)  # frees memory, so it must not want any
    finally:
        connection.client.config_set("maxmemory", 0)
    assert "keeps the functions that it has" in caplog.text
    assert ids(buffer.lease("g", 8)) == list(range(1, 9))


def frames_sent(connection):
    return connection.client.info("commandstats").get("cmdstat_hsetnx", {"calls": 0})["calls"]


def test_a_full_store_is_asked_before_the_frame_is_sent_again(connection):
    buffer, ledger = RedisLane(connection, BufferRules(groups=2, max_bytes=100)).handle(), Ledger()
    buffer.recover(ledger, version=0, limit=8)
    buffer.lease("g", 3)
    assert buffer.put("g", 1, bytes(80)) is PutOutcome.STORED
    before = frames_sent(connection)
    assert [buffer.put("g", 2, bytes(80)) for _ in range(4)] == [PutOutcome.FULL] * 4
    assert buffer.put("g", 1, bytes(80)) is PutOutcome.DUPLICATE
    assert buffer.audit().counters["full"] == 4
    assert frames_sent(connection) == before + 2
    taken = take(buffer, ledger, 1)
    buffer.commit(taken.number, taken.chain)
    assert buffer.put("g", 2, bytes(80)) is PutOutcome.STORED


def test_a_put_waits_for_a_server_that_refuses_writes_for_a_while(connection, buffer):
    buffer.lease("g", 1)
    connection.client.config_set("min-replicas-to-write", 1)
    allowed = threading.Timer(0.2, connection.client.config_set, ("min-replicas-to-write", 0))
    allowed.start()
    try:
        assert buffer.put("g", 1, b"one") is PutOutcome.STORED
    finally:
        allowed.join()


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("MISCONF Errors writing to the AOF file", "MISCONF"),
        ("Command # 1 (HSETNX f 1 x) of pipeline caused error: MISCONF Errors writing", "MISCONF"),
        ("Transaction discarded because of: OOM command not allowed", "OOM"),
    ],
)
def test_the_servers_reason_is_found_inside_a_transactions_error(message, said):
    assert reason(ResponseError(message)).split()[0] == said


def test_dead_letters_keep_the_beginning_of_the_frame_and_are_few(connection, lane, buffer):
    buffer.set_version(0, limit=1000)
    ledger = Ledger()
    for i in range(105):
        (ticket_id,) = ids(buffer.lease("g", 1))
        assert buffer.put("g", ticket_id, b"bad-%d" % i) is PutOutcome.STORED
        ledger.consume(
            buffer.reject_frame(buffer.take(ledger, 1, window=1), ticket_id, b"bad-%d" % i, "no frame").ids
        )
    letters = connection.client.lrange(lane.key("dead_letters"), 0, -1)
    assert len(letters) == 100
    assert letters[0] == b"53 no frame\nbad-104"  # after two attempts the next ticket


def test_a_server_out_of_memory_holds_back_groups_and_still_frees_them(connection):
    lane = RedisLane(connection, BufferRules(groups=2, max_bytes=1 << 40))
    buffer, ledger = lane.handle(), Ledger()
    buffer.recover(ledger, version=0, limit=1000)
    leased = ids(buffer.lease("g", 200))
    client = connection.client
    client.config_set("maxmemory", client.info("memory")["used_memory"] + (4 << 20))
    try:
        outcomes = [buffer.put("g", i, bytes(1 << 20)) for i in leased[:8]]
        stored = outcomes.count(PutOutcome.STORED)
        assert 0 < stored < 8
        assert set(outcomes[stored:]) == {PutOutcome.FULL}
        client.config_set("maxmemory", 1)
        assert buffer.lease("g", 1).tickets == ()
        buffer.renew("g", leased[:9])
        taken = take(buffer, ledger, stored)
        assert buffer.commit(taken.number, taken.chain) == stored
        client.config_set("maxmemory", client.info("memory")["used_memory"] + (4 << 20))
        assert buffer.put("g", leased[stored], bytes(1 << 20)) is PutOutcome.STORED
    finally:
        client.config_set("maxmemory", 0)
    assert buffer.audit().missing == 0


def test_ids_and_windows_may_be_huge(lane):
    buffer, ledger = lane.handle(), Ledger(watermark=10**15)
    buffer.recover(ledger, version=10**9, limit=10**15 + 3)
    assert fill(buffer, 9) == [10**15 + 1, 10**15 + 2, 10**15 + 3]
    taken = take(buffer, ledger, 3, window=10**18)
    assert taken.ids == (10**15 + 1, 10**15 + 2, 10**15 + 3)
    buffer.commit(taken.number, taken.chain)
    assert places(buffer)["done"] == 10**15 + 3


def lease_all(url, run, holder, queue):
    connection = StoreConnection(url)
    buffer = RedisBuffer(connection, run, RULES)
    mine = []
    while leased := ids(buffer.lease(holder, 3)):
        mine += leased
        for ticket_id in leased:
            buffer.put(holder, ticket_id, b"x")
    queue.put(mine)
    connection.close()


def test_processes_share_the_ids_without_overlap(server, lane):
    buffer = lane.handle()
    buffer.recover(Ledger(), version=0, limit=400)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    workers = [
        context.Process(target=lease_all, args=(server.url, lane.run, f"g{i}", queue)) for i in range(3)
    ]
    try:
        for worker in workers:
            worker.start()
        shares = [queue.get(timeout=LONG_S) for _ in workers]
    finally:
        for worker in workers:
            worker.join(LONG_S)
            worker.kill()
    assert sorted(itertools.chain(*shares)) == list(range(1, 401))
    assert take(buffer, Ledger(), 400).ids == tuple(range(1, 401))


# -- connection and record


def test_an_unreachable_store_is_an_error_in_bounded_time_without_the_password():
    with pytest.raises(StoreError, match=r"redis://\*\*\*@127\.0\.0\.1:1/0 has not answered for 0") as caught:
        StoreConnection("redis://user:secret@127.0.0.1:1/0", retry_s=0.3).check()
    assert "secret" not in str(caught.value)
    with pytest.raises(StoreError, match="use redis://"):
        StoreConnection("http://somewhere")


def test_a_wrong_password_is_not_retried(connection):
    connection.client.config_set("requirepass", "right")
    try:
        StoreConnection(connection.url, password="right").check()
        for password in ("wrong", None):
            with pytest.raises(StoreRefused, match=r"refused a call: Authentication"):
                StoreConnection(connection.url, password=password, retry_s=60).check()
    finally:
        connection.client.config_set("requirepass", "")


def test_a_user_without_rights_is_not_retried(connection):
    connection.client.acl_setuser("nobody", enabled=True, passwords=["+secret"], commands=["+ping", "+hello"])
    url = connection.url.replace("://", "://nobody@") if "@" not in connection.url else connection.url
    try:
        with pytest.raises(StoreRefused, match="NoPermission"):
            StoreConnection(url, password="secret", retry_s=60).check()
    finally:
        connection.client.acl_deluser("nobody")


def test_a_learner_that_may_not_load_functions_does_not_wait_for_itself(connection):
    rules = {"commands": ["+@all", "-function|load"], "keys": ["*"]}
    connection.client.acl_setuser("nobody", enabled=True, passwords=["+secret"], **rules)
    url = connection.url.replace("://", "://nobody@") if "@" not in connection.url else connection.url
    buffer = RedisBuffer(StoreConnection(url, password="secret", retry_s=60), RUN.name, RULES)
    connection.client.function_flush()
    try:
        with pytest.raises(StoreRefused, match=r"function\|load"):
            buffer.recover(Ledger(), version=0, limit=8)
    finally:
        connection.client.acl_deluser("nobody")


def test_an_address_where_no_store_listens_is_not_retried():
    class Stranger(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.recv(4096)
            self.request.sendall(b"-ERR unknown command 'HELLO'\r\n")

    with socketserver.TCPServer(("127.0.0.1", 0), Stranger) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        try:
            with pytest.raises(StoreRefused, match="refused a call"):
                StoreConnection(f"redis://127.0.0.1:{server.server_address[1]}/0", retry_s=60).check()
        finally:
            server.shutdown()


def test_a_store_that_evicts_is_refused(connection):
    connection.check()
    connection.client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(StoreRefused, match=r"allkeys-lru.*noeviction"):
            connection.check()
    finally:
        connection.client.config_set("maxmemory-policy", "noeviction")


def test_a_store_with_less_memory_than_the_cap_is_refused(connection):
    connection.client.config_set("maxmemory", 0)
    connection.check(1 << 40)  # it has no limit of its own
    connection.client.config_set("maxmemory", 1 << 30)
    try:
        connection.check(1 << 30)
        with pytest.raises(StoreRefused, match=r"maxmemory 1 GiB, below store.max_gib \(2\)"):
            connection.check(2 << 30)
    finally:
        connection.client.config_set("maxmemory", 0)


@pytest.mark.parametrize("shards", SHARDS)
def test_the_audit_notices_what_somebody_broke_by_hand(server, connection, tmp_path, shards):
    text = f"""
run: {{name: audited, root: {tmp_path}}}
store: {{url: "{server.url}", shards: {shards}}}
batch: {{groups: 4}}
model: {{path: m}}
data: {{train: t, eval: {tmp_path}/held_out.jsonl}}
reward: {{functions: [{{function: exact_match}}]}}
"""
    connection.client.flushall()
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "a"}\n' * 3)
    run = tmp_path / "audited"
    run.mkdir()
    (run / "config.yaml").write_text(text)
    replace_text(run / "run.key", "5" * 64, private=True)

    def audit():
        return audit_run(run, server.url)

    config = load_config(run / "config.yaml")
    buffer = train_lane(config, connection)

    def recover():
        for shard in getattr(buffer, "shards", [buffer]):
            shard.recover(Ledger(), version=0, limit=8 // shards)

    recover()
    fill(buffer, 8)
    now_s = iter(range(0, 1000, 11))
    watch = AuditWatch("training", buffer.audit, clock=lambda: float(next(now_s)))
    require_whole(audit())
    connection.client.zrem(f"{{audited:{shard_names('train', shards)[-1]}}}:ready", "2")
    argv = [*ASYNCRL, "audit", str(run), "--store", server.url]
    told = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert (
        told.returncode == 2
        and json.loads(told.stdout)["missing"] == 1
        and "1 issued ids are nowhere" in told.stderr
    )
    for _ in range(2):
        watch.audit()
    assert watch.mismatch == 1
    recover()  # a restarted learner
    watch.audit()
    assert watch.mismatch == 0
    rounds = Rounds.of(config, DataFiles(config).held_out)[""]
    held_out = eval_lane(config, connection, rounds.lane, 3)
    held_out.recover(Ledger(), version=0, limit=3)
    fill(held_out, 3)
    found = audit()
    require_whole(found)
    assert found["evaluation"]["ready"] == 3
    connection.client.zrem(f"{hash_tag('audited', rounds.lane)}:ready", "2")
    with pytest.raises(RunError, match="evaluation: 1 issued ids are nowhere"):
        require_whole(audit())
    (tmp_path / "held_out.jsonl").unlink()
    found = audit()
    require_whole(found)
    assert "does not exist" in found["evaluation"]["not_counted"]


@pytest.fixture
def record(connection):
    connection.client.flushall()
    yield RunRecord(connection, b"key")
    connection.client.flushall()


def test_a_generator_reads_what_the_learner_claimed(record):
    with pytest.raises(StoreError, match="no run yet"):
        record.read()
    record.claim(RUN, fresh=False)
    assert record.read() == RUN
    listening = replace(RUN, control_endpoint="ipc:///somewhere")
    record.renew(listening)
    assert record.read() == listening
    changed = replace(RUN, config_json='{"a": 2}', config_hash="def", release="0.2")
    record.claim(changed, fresh=False)
    assert record.read() == changed


@pytest.mark.parametrize("field", [*StoredRun.__dataclass_fields__, "seal"])
def test_a_record_that_its_learner_did_not_write_is_refused_before_it_is_used(connection, record, field):
    """The store's operator may write what he likes, and knows every name and hash, but not the key."""
    record.renew(replace(RUN, control_endpoint="ipc:///here"))
    for lie in ("", "x", '{"model": {"trust_remote_code": true}}', b"\xff\xfe"):
        connection.client.hset("asyncrl:run", field, lie)
        with pytest.raises(
            (ForeignRunError, StoreRefused), match=r"another secret|not written by the run's learner"
        ):
            record.read()
    connection.client.hdel("asyncrl:run", field)
    with pytest.raises(StoreError):
        record.read()


def test_a_seal_of_another_key_is_refused_even_with_the_right_key_id(connection, record):
    forged = RunRecord(connection, b"another key")
    forged.renew(RUN)
    with pytest.raises(StoreRefused, match="not written by the run's learner"):
        record.read()
    forged.renew(replace(RUN, key_id=key_id(b"another key")))
    with pytest.raises(ForeignRunError, match=r"join\.key"):
        record.read()


def test_another_run_is_refused_and_its_groups_are_left_alone(connection, record):
    record.claim(RUN, fresh=False)
    buffer = RedisBuffer(connection, "first", RULES)
    buffer.recover(Ledger(), version=0, limit=8)
    fill(buffer, 3)
    with pytest.raises(ForeignRunError, match=r"'first'.*'second'.*another"):
        record.claim(
            StoredRun(name="second", config_json="", config_hash="", release="", key_id=""), fresh=True
        )
    assert record.read() == RUN
    assert places(buffer)["ready"] == 3
    record.claim(RUN, fresh=False)
    assert places(buffer)["ready"] == 3


def test_fresh_deletes_this_runs_lanes_and_nothing_else(connection, record):
    record.claim(RUN, fresh=True)
    buffers = [
        RedisBuffer(connection, run, RULES, lane=lane)
        for run, lane in (("first", "train"), ("first", "eval"), ("first1", "train"))
    ]
    for buffer in buffers:
        buffer.recover(Ledger(), version=0, limit=8)
        fill(buffer, 2)
    record.claim(RUN, fresh=True)
    assert [places(buffer)["issued"] for buffer in buffers] == [0, 0, 2]
