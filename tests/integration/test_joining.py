"""Joining a run from another host: what the store's record decides, what this host must allow, waiting."""

import asyncio
import json
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import zmq

from asyncrl import __version__
from asyncrl.buffer import probe
from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.run_record import RunRecord, StoredRun, key_id
from asyncrl.buffer.server import StoreServer
from asyncrl.cli.running import generator
from asyncrl.commands import found
from asyncrl.commands import join as joining
from asyncrl.commands.found import check_allowed, wishes
from asyncrl.config.base import SECTIONS_ONLY
from asyncrl.config.resolved import config_hash, config_json, dump_config
from asyncrl.config.schema import Config
from asyncrl.config.store import StoreConfig
from asyncrl.control.base import Hello, Welcome
from asyncrl.control.client import ControlClient
from asyncrl.control.messages import CODEC
from asyncrl.errors import ConfigError, ForeignRunError, RunError, StoreError
from asyncrl.files import replace_text
from asyncrl.hosting import gpus as our_gpus
from asyncrl.hosting.memory_use import ModelShape
from asyncrl.preflight import doubts
from asyncrl.run.keys import SECRET_FILE_VARIABLE, RunKeys
from tests.support.command import ASYNCRL
from tests.support.gpu_tools import LOG, ROWS, tool, without_tools
from tests.support.waiting import let_pass, turns

pytestmark = pytest.mark.integration

KEYS = RunKeys(bytes(range(32)))
PLAIN = {
    "run": {"name": "far"},
    "model": {"path": "no-such-model"},
    "data": {"train": "no-such-data.jsonl"},
    "reward": {"functions": [{"function": "exact_match"}]},
}
EVIL = 'open({ran!r}, "w").write("ran")\ndef f(*a, **k): return 0.0\n'


def config(**parts) -> Config:
    return Config.model_validate(
        {**PLAIN, **{name: {**PLAIN.get(name, {}), **part} for name, part in parts.items()}}
    )


def record_of(config: Config) -> StoredRun:
    return StoredRun(
        name=config.run.name,
        config_json=config_json(config),
        config_hash="not asked for",
        release=__version__,
        key_id=key_id(KEYS.join.record),
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with StoreServer(StoreConfig(), tmp_path_factory.mktemp("store")) as server:
        yield server


@pytest.fixture
def record(server):
    connection = StoreConnection(server.url)
    connection.client.flushall()
    return RunRecord(connection, KEYS.join.record)


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A directory of another host, with join.key and a module whose import leaves a trace."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "join.key").write_text(KEYS.join.text())
    (tmp_path / "join.key").chmod(0o600)
    (tmp_path / "evil.py").write_text(EVIL.format(ran=str(tmp_path / "ran")))
    monkeypatch.setenv(SECRET_FILE_VARIABLE, str(tmp_path / "join.key"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path


def join(server, *options, timeout_s=60):
    argv = [*ASYNCRL, "generator", "--store", server.url, *options]
    return subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)


ATTACKS = {
    "evil.py": {"reward": {"functions": [{"function": "evil.py:f"}]}},
    "evil": {"algorithm": {"advantage": {"name": "evil:f"}}},
    "model:no-such-model": {"model": {"trust_remote_code": True}},
    'vllm:scheduler_cls="evil.Scheduler"': {"generator": {"vllm": {"scheduler_cls": "evil.Scheduler"}}},
    "mcp:touch ran": {"environment": {"uses": "mcp:touch ran"}},
    "source.py": {"data": {"train": [{"path": "rows.jsonl", "reward": [{"function": "source.py:f"}]}]}},
    "set.py": {"data": {"eval": [{"path": "x", "environment": {"uses": "set.py:G"}}]}},
    "variable:AWS_*": {"run": {"environment": ["AWS_*"]}},
    "rows.py": {"data": {"filter": "rows.py:kept"}},
    "rows": {"data": {"map": "rows:made"}},
    "variable:AWS_KEY": {"store": {"url": "rediss://generator@far/0", "password_env": "AWS_KEY"}},
}


def test_code_of_a_record_is_not_run_without_this_hosts_consent(server, record, host):
    """All at once in one process, and each named; the record is authentic."""
    parts: dict = {}
    for attack in ATTACKS.values():
        for part, values in attack.items():
            parts[part] = {**parts.get(part, {}), **values}
    record.renew(record_of(config(**parts)))
    told = join(server)
    assert told.returncode == 2, told.stderr
    for text in ATTACKS:
        assert f"--allow '{text}'" in told.stdout + told.stderr
    assert not (host / "ran").exists() and not (host / "runs").exists()


@pytest.mark.parametrize("text", ATTACKS)
def test_each_wish_is_allowed_by_its_own_name_only(text):
    wanted = config(**ATTACKS[text])
    assert [text for _, text in wishes(wanted)] == [text]
    check_allowed(wanted, [text])
    for others in ([], [other for other in ATTACKS if other != text], [text.upper() + "x"], [""]):
        with pytest.raises(RunError, match="you have not allowed"):
            check_allowed(wanted, others)


@pytest.mark.parametrize(
    "parts",
    [
        {"model": {"lora": {}}},
        {"algorithm": {"filters": [{"name": "zero_variance"}]}},
        {"data": {"curriculum": {"floor": 0.1}}},
    ],
    ids=str,
)
def test_no_rule_that_asks_an_advantage_what_it_needs_loads_it_before_this_hosts_consent(
    parts, record, host, join_here
):
    algorithm = {"algorithm": {"advantage": "evil.py:f", **parts.get("algorithm", {})}}
    data = {"data": {**PLAIN["data"], **parts.get("data", {})}}
    model = {"model": {**PLAIN["model"], **parts.get("model", {})}}
    # With its rules, the config would load the module here.
    forged = Config.model_validate({**PLAIN, **algorithm, **data, **model}, context=SECTIONS_ONLY)
    record.renew(record_of(forged))
    with pytest.raises(RunError, match=r"--allow 'evil\.py'"):
        join_here()
    assert not (host / "ran").exists()


def test_a_config_without_code_needs_no_consent():
    assert list(wishes(config())) == []


def test_of_our_own_modules_only_the_games_need_no_consent():
    """A path that begins like our package is another's file."""
    assert list(wishes(config(environment={"uses": "asyncrl.quickstart.games:Guess"}))) == []
    for place in ("asyncrl.egg-info/../evil.py", "asyncrl.plugins"):
        wanted = config(environment={"uses": f"{place}:f"})
        assert [text for _, text in wishes(wanted)] == [place]


def test_the_stores_operator_runs_nothing_here(server, record, host):
    """He forges the record with all that he knows; the owner of the host has even allowed the file."""
    wanted = config(**ATTACKS["evil.py"])
    RunRecord(StoreConnection(server.url), b"a key of his own").renew(
        replace(record_of(wanted), config_hash=config_hash(wanted))
    )
    told = join(server, "--allow", "evil.py")
    assert told.returncode == 2 and "not written by the run's learner" in told.stdout + told.stderr
    assert not (host / "ran").exists() and not (host / "runs").exists()


@pytest.fixture
def join_here(server, host, monkeypatch):
    """In this process; `moments` are what happens instead of each pause."""
    yield_to = []

    def wait(seconds):
        yield_to.pop(0)()

    monkeypatch.setattr(found, "time", SimpleNamespace(sleep=wait, monotonic=time.monotonic))

    def join(*moments, wait_s=600.0):
        yield_to[:] = moments
        generator(store=server.url, wait=wait_s)

    return join


def test_a_run_that_is_not_there_yet_is_waited_for(server, record, host, join_here, capsys):
    (host / "join.key").rename(host / "later")
    foreign = RunRecord(StoreConnection(server.url), b"another")
    with pytest.raises(ForeignRunError, match="another secret"):  # found, and then refused for that
        join_here(
            lambda: None,
            lambda: (host / "later").rename(host / "join.key"),
            lambda: None,
            # Of an earlier start, until the learner has its own there.
            lambda: record.renew(replace(record_of(config()), release="0.0", config_json='{"new": 1}')),
            lambda: record.renew(replace(record_of(config()), config_hash="of another config")),
            lambda: foreign.renew(replace(record_of(config()), key_id="x")),
        )
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and all("waiting for the run" in line for line in lines), (
        "told when it changes, not each time"
    )
    assert "join.key, which does not exist" in lines[0] and "serves no run yet" in lines[1]
    assert "is of asyncrl 0.0" in lines[2] and "has another config" in lines[3]


def test_a_config_of_the_hosts_own_needs_no_consent(server, record, host, join_here):
    wanted = config(**ATTACKS["evil.py"])
    record.renew(record_of(wanted))
    (host / "own.yaml").write_text(dump_config(wanted))
    with pytest.raises(RunError, match="you have not allowed"):
        join_here()
    with pytest.raises(RunError, match="has another config"):  # asked afterwards
        generator(config=host / "own.yaml", store=server.url)


def test_the_gpus_of_this_host_are_checked_before_anything_starts(
    record, host, join_here, monkeypatch, capsys, tmp_path
):
    shape = ModelShape(
        parameters=10**8, layers=2, hidden=64, intermediate=64, query=64, kv=64, vocabulary=1000
    )
    monkeypatch.setattr("asyncrl.preflight.fit.read_trained_shape", lambda model, learner: shape)
    wanted = config()
    record.renew(replace(record_of(wanted), config_hash=config_hash(wanted)))
    with monkeypatch.context() as patches:
        without_tools(patches, tmp_path, "1")
        with pytest.raises(ConfigError, match="torch is built for CPUs only"):
            join_here()
        patches.setattr(doubts, "build_of", lambda package: "cu130")
        patches.setattr(torch.version, "cuda", "13.0")
        patches.setattr(our_gpus, "LINKER_PATHS", tmp_path)
        patches.delenv("LD_LIBRARY_PATH", raising=False)
        tool(tmp_path, "nvidia-smi", f"/bin/cat <<'END'\n{ROWS}END")
        tool(tmp_path, "dmesg", f"/bin/cat <<'END'\n{LOG}END")
        with pytest.raises(ConfigError, match="is too old for torch"):
            join_here()
        patches.setattr(torch.version, "cuda", "12.8")
        with pytest.raises(ConfigError, match="; end the other processes"):
            join_here()
        assert not (host / "runs").exists(), "nothing was started"
        tool(tmp_path, "nvidia-smi", f"/bin/cat <<'END'\n{ROWS.replace('61234', '4')}END")

        def start(*arguments, **options):
            raise InterruptedError("as far as this test goes")

        patches.setattr(joining, "generator_maker", start)
        with pytest.raises(InterruptedError):
            join_here()
    warned = capsys.readouterr().err
    assert all(part in warned for part in ("ECC", "reset", "Xid 79"))


def test_a_host_whose_clock_is_off_says_by_how_much(record, host, join_here, monkeypatch, capsys):
    wanted = config()
    record.renew(replace(record_of(wanted), config_hash=config_hash(wanted)))

    def start(*arguments):
        raise InterruptedError("as far as this test goes")

    monkeypatch.setattr("asyncrl.cli.running._check_host", start)
    for behind_s, lines in ((90.0, 1), (1.0, 0)):
        behind = SimpleNamespace(time=lambda behind_s=behind_s: time.time() - behind_s)
        monkeypatch.setattr(probe, "time", behind)
        with pytest.raises(InterruptedError):
            join_here()
        assert capsys.readouterr().out.count("is -90 s from that of the store; let a time service") == lines


def test_the_directory_of_another_run_with_the_same_name_is_left_as_it_is(server, record, host, monkeypatch):
    def start(*_, **__):
        raise InterruptedError("as far as this test goes")

    monkeypatch.setattr("asyncrl.cli.running._check_host", lambda *_: None)
    monkeypatch.setattr(joining, "generator_maker", start)
    wanted, own = config(), host / "runs" / "far"
    record.renew(replace(record_of(wanted), config_hash=config_hash(wanted)))
    (own / "checkpoints").mkdir(parents=True)
    (own / "config.yaml").write_text("of another run")
    # The second is the learner's own: a file system may show its join.key late.
    for secret, error in ((bytes(32), RunError), (KEYS.secret, InterruptedError)):
        replace_text(own / "run.key", secret.hex(), private=True)
        with pytest.raises(error):
            generator(store=server.url)
        assert (own / "config.yaml").read_text() == "of another run"


def test_a_run_root_of_the_learners_host_is_none_of_another_host(server, record, host, monkeypatch):
    places = []

    def start(config, directory, *_, **__):
        places.append(directory.path)
        raise InterruptedError("as far as this test goes")

    monkeypatch.setattr("asyncrl.cli.running._check_host", lambda *_: None)
    monkeypatch.setattr(joining, "generator_maker", start)
    shared = host / "shared"
    for root, is_learners in (("/proc/none", False), (shared, False), (shared, True)):
        if is_learners:
            (shared / "far" / "logs").mkdir(parents=True)
            replace_text(shared / "far" / "run.key", KEYS.secret.hex(), private=True)
        monkeypatch.setenv(SECRET_FILE_VARIABLE, str(host / "join.key"))  # a command forgets it
        wanted = config(run={"root": str(root)})
        record.renew(replace(record_of(wanted), config_hash=config_hash(wanted)))
        with pytest.raises(InterruptedError):
            generator(store=server.url)
    assert places == [Path("runs/far"), Path("runs/far"), shared / "far"]
    assert Path("runs/far/config.yaml").exists() and not (shared / "far" / "config.yaml").exists()


@pytest.mark.parametrize("name", ["my host", "a/b", "x" * 198])
def test_a_name_that_no_generator_can_have_is_refused_before_a_store_is_asked(name):
    with pytest.raises(RunError, match=r"--name: the name '.*' is not 1 to 200 letters, .*; give another"):
        generator(store="redis://nowhere:1/0", name=name)


def test_the_wait_has_a_bound(record, host, join_here):
    with pytest.raises(StoreError, match="serves no run yet"):
        join_here(lambda: let_pass(0.2), wait_s=0.2)
    with pytest.raises(StoreError, match="serves no run yet"):
        join_here(wait_s=0.0)


def test_a_refusal_is_not_waited_out(server, record, host, join_here):
    RunRecord(StoreConnection(server.url), b"another").renew(replace(record_of(config()), key_id="x"))
    with pytest.raises(ForeignRunError, match="another secret"):
        join_here()


def test_a_learner_that_comes_back_at_another_address_is_found(tmp_path):
    first, second = f"ipc://{tmp_path}/first", f"ipc://{tmp_path}/second"
    now = [first]

    async def find():
        return now[0]

    def answer(context, endpoint, *, times):
        """The identity that called."""
        with context.socket(zmq.ROUTER) as learner:
            learner.linger = 500
            learner.bind(endpoint)
            for _ in range(times):
                assert learner.poll(20_000), "nobody called"
                who, data = learner.recv_multipart()
                learner.send_multipart([who, CODEC.encode(Welcome(version=3))])
        return who, CODEC.decode(data)

    async def scenario(context):
        client = ControlClient(first, heartbeat_s=0.1, timeout_s=2.0, find_learner=find)
        hearing = asyncio.create_task(asyncio.to_thread(answer, context, first, times=2))
        try:
            hello = Hello(generator_id="g", incarnation="1", release="r", config_hash="c", version=0)
            assert (await client.join(hello)).version == 3
            await hearing
            now[0] = second
            _, message = await asyncio.to_thread(answer, context, second, times=2)
            assert isinstance(message, Hello) and message.generator_id == "g"
        finally:  # or its sockets keep this process from ending
            await client.leave()

    with zmq.Context() as context:
        asyncio.run(scenario(context))


def test_the_record_holds_no_secret(record):
    record.renew(record_of(config()))
    stored = repr(record._connection.client.hgetall("asyncrl:run"))
    assert json.loads(record.read().config_json)["run"]["name"] == "far"
    for secret in (KEYS.secret, KEYS.join.secret, KEYS.join.record, KEYS.join.wire):
        assert secret.hex() not in stored


def test_a_message_that_is_gone_with_its_learner_holds_up_nobody():
    """The socket announces a message; before it is read, its sender's connection ends."""

    class Gone:
        async def poll(self, timeout_ms):
            await turns(1)
            return zmq.POLLIN

        async def recv(self, flags=0):
            if flags & zmq.NOBLOCK:
                raise zmq.Again
            await asyncio.Event().wait()

    async def scenario():
        client = ControlClient("ipc://nowhere", heartbeat_s=0.1, timeout_s=1.0)
        client._socket = Gone()
        await asyncio.wait_for(client._listen_until(time.monotonic() + 0.05), 10.0)

    asyncio.run(scenario())
