"""Our own store: its lifetime; a run loses and repeats nothing when it is killed, rolled back or wiped."""

import os
import pathlib
import shutil
import stat
import subprocess
import sys
import threading
import time

import psutil
import pytest

from asyncrl.buffer import server as server_module
from asyncrl.buffer.base import BufferRules, PutOutcome
from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.redis import RedisBuffer
from asyncrl.buffer.server import StoreServer, find_server
from asyncrl.buffer.users import StoreUser, with_user
from asyncrl.config.store import StoreConfig
from asyncrl.errors import BufferGap, StoreError, StoreRefused
from tests.support.buffer_contract import ids
from tests.support.ports import free_ports
from tests.support.store_servers import SERVERS
from tests.support.waiting import HANG, LONG_S, let_pass, stop, wait_until_ended

pytestmark = pytest.mark.integration


@pytest.fixture(params=SERVERS)
def choice(request):
    return request.param


def test_it_serves_a_private_socket_and_no_port(choice, tmp_path):
    with StoreServer(StoreConfig(), tmp_path, server=choice) as server:
        StoreConnection(server.url, retry_s=1).check()
        assert stat.S_IMODE(os.stat(server.socket_path).st_mode) == 0o700
        assert psutil.Process(server.pid).net_connections("inet") == []
        config = StoreConnection(server.url).client.config_get("append*", "maxmemory*")
        assert config["appendonly"] == "yes"
        assert config["appendfsync"] == "everysec"
        assert config["maxmemory-policy"] == "noeviction"
        pid = server.pid
    assert not psutil.pid_exists(pid)
    server.stop()
    with pytest.raises(StoreError, match="not running"):
        _ = server.pid


def test_a_port_needs_a_user_whose_password_is_no_argument(choice, tmp_path):
    [port] = free_ports(1)
    config, user = StoreConfig(bind=f"tcp://127.0.0.1:{port}"), StoreUser("someone", 'se"cret\\', "~* +@all")
    with pytest.raises(StoreError, match="without passwords"):
        StoreServer(config, tmp_path, server=choice)
    with StoreServer(config, tmp_path, server=choice, users=[user]) as server:
        for url in (f"redis://someone@127.0.0.1:{port}", with_user(server.url, "someone")):
            StoreConnection(url, password=user.password, retry_s=1).check()
            with pytest.raises(StoreRefused):
                StoreConnection(url, password="another", retry_s=1).check()
        with pytest.raises(StoreRefused):
            StoreConnection(server.url, retry_s=1).check()
        process = psutil.Process(server.pid)
        assert [found.laddr for found in process.net_connections("inet") if found.status == "LISTEN"] == [
            ("127.0.0.1", port)
        ]
        assert "cret" not in " ".join(process.cmdline())


@pytest.fixture
def certificate(tmp_path):
    """(certificate, key) of 127.0.0.1, made for this test."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl (apt-get install openssl)")
    paths = tmp_path / "cert.pem", tmp_path / "key.pem"
    names = ["-subj", "/CN=store", "-addext", "subjectAltName=IP:127.0.0.1"]
    make = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    subprocess.run([*make, *names, "-out", paths[0], "-keyout", paths[1]], check=True, capture_output=True)
    return paths


def test_a_configured_store_may_speak_tls_and_its_certificate_is_checked(certificate, tmp_path):
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("no redis-server (apt-get install redis-server)")
    [port] = free_ports(1)
    tls = {
        "port": 0,
        "tls-port": port,
        "tls-cert-file": certificate[0],
        "tls-key-file": certificate[1],
        "tls-auth-clients": "no",
    }
    settings = tls | {"bind": "127.0.0.1", "dir": tmp_path, "save": '""', "requirepass": "right"}
    process = subprocess.Popen([binary, "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        process.stdin.write("".join(f"{name} {value}\n" for name, value in settings.items()).encode())
        process.stdin.close()
        url = f"rediss://127.0.0.1:{port}"
        trusted = StoreConnection(f"{url}?ssl_ca_certs={certificate[0]}", password="right", retry_s=20)
        trusted.call(lambda client: client.ping())
        with pytest.raises(StoreError, match="CERTIFICATE_VERIFY_FAILED"):
            StoreConnection(url, password="right", retry_s=0.2).check()
        with pytest.raises(StoreRefused):
            StoreConnection(f"{url}?ssl_ca_certs={certificate[0]}", password="wrong", retry_s=20).check()
    finally:
        process.kill()
        process.wait(120)
        process.stdout.close()


def test_a_long_or_odd_directory_still_gets_a_socket(choice, tmp_path):
    directory = tmp_path / 'a b"c' / ("x" * 120)
    with StoreServer(StoreConfig(), directory, server=choice) as server:
        StoreConnection(server.url, retry_s=1).check()
        assert stat.S_IMODE(os.stat(server.socket_path.parent.parent).st_mode) == 0o700
        assert server.socket_path.resolve() == directory / "store.sock"
        assert (directory / "appendonlydir").exists()


def test_it_ends_with_its_parent_however_that_dies(choice, tmp_path):
    script = (
        "import pathlib, sys, time\n"
        "from asyncrl.buffer.server import StoreServer\n"
        "from asyncrl.config.store import StoreConfig\n"
        "server = StoreServer(StoreConfig(), pathlib.Path(sys.argv[1]), server=sys.argv[2])\n"
        "server.start()\n"
        f"print(server.pid, flush=True)\n{HANG}\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), choice], stdout=subprocess.PIPE, text=True
    )
    try:
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
    finally:
        parent.kill()
        parent.wait(120)
    wait_until_ended([pid])


def test_a_server_that_cannot_start_says_why(choice, tmp_path):
    (tmp_path / "appendonlydir").mkdir()
    (tmp_path / "appendonlydir" / "appendonly.aof.manifest").write_text("nonsense\n")
    with pytest.raises(StoreError, match=r"(?s)did not come up.*its log ends.*manifest"):
        StoreServer(StoreConfig(), tmp_path, server=choice).start()


def test_a_server_that_hangs_is_killed(choice, tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "STOP_S", 0.3)
    server = StoreServer(StoreConfig(), tmp_path, server=choice)
    server.start()
    pid = server.pid
    stop(pid)
    server.stop()
    assert not psutil.pid_exists(pid)


def test_no_server_is_an_error_that_says_what_to_do(monkeypatch):
    monkeypatch.setattr(server_module, "_bundled", lambda: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(StoreError, match=r"Redis >= 7.0 or Valkey is needed.*set store\.url"):
        find_server()


@pytest.mark.parametrize(
    "content", ["#!/bin/sh\necho Redis server v=6.2.1 sha=0\n", "\x7fELF", "#!/no/such/shell\n"]
)
def test_an_old_or_broken_server_on_the_path_is_passed_over(content, tmp_path, monkeypatch):
    old = tmp_path / "redis-server"
    old.write_text(content)
    old.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + os.environ["PATH"])
    assert find_server() != old
    assert "_binaries" in str(find_server("bundled"))


# -- faults under load

RULES = BufferRules(groups=4, lease_s=1.0)
TARGET, CREDIT, SAVE_EVERY = 1200, 48, 5


class Producer(threading.Thread):
    """A generator: leases, stores, goes on, until told to stop."""

    def __init__(self, url, name):
        super().__init__(name=name, daemon=True)
        self.buffer = RedisBuffer(StoreConnection(url, retry_s=20), "run", RULES)
        self.stopping = threading.Event()
        self.error = None

    def run(self):
        try:
            while not self.stopping.is_set():
                for ticket_id in ids(self.buffer.lease(self.name, 4)):
                    while (
                        self.buffer.put(self.name, ticket_id, b"%d" % ticket_id + bytes(2000))
                        is PutOutcome.FULL
                    ):
                        self.stopping.wait(0.01)
                self.stopping.wait(0.001)
        except StoreError as error:
            self.error = error


class Learner:
    """Takes, trains and saves; sometimes crashes, which throws away what is newer than its checkpoint."""

    def __init__(self, url):
        self.connection = StoreConnection(url, retry_s=20)
        self.checkpoint, self.lineage, self.saved_length = Ledger().to_dict(), [], 0
        self.crashes = self.gaps = 0
        self.restart()

    def restart(self):
        self.ledger = Ledger.from_dict(self.checkpoint)
        del self.lineage[self.saved_length :]
        self.buffer = RedisBuffer(self.connection, "run", RULES)
        self.recover()

    def recover(self):
        self.buffer.recover(self.ledger, version=0, limit=self.limit)

    @property
    def limit(self):
        return min(self.ledger.consumed + CREDIT, TARGET)

    def step(self):
        try:
            self.buffer.set_version(0, limit=self.limit)
            taken = self.buffer.take(self.ledger, 4, window=12)
            if taken is None:
                let_pass(0.002)
                return
            frames = self.buffer.frames(taken.ids)
            assert [int(frame.rstrip(b"\0")) for frame in frames] == list(taken.ids)
            self.ledger.consume(taken.ids)
            self.lineage += taken.ids
            if self.ledger.takes % SAVE_EVERY == 0:
                self.checkpoint, self.saved_length = self.ledger.to_dict(), len(self.lineage)
                self.buffer.commit(self.ledger.takes, self.ledger.chain)
        except BufferGap:
            self.gaps += 1
            self.recover()

    def crash(self):
        self.crashes += 1
        self.restart()


def copy_of(directory: pathlib.Path, name: str) -> pathlib.Path:
    target = directory.parent / name
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(directory, target)
    return target


class Faults:
    def __init__(self, server, directory):
        self.server, self.data = server, directory / "appendonlydir"
        self.old = None

    def kill(self):
        self.server.kill()
        self.server.start()

    def remember(self):
        self.server.kill()
        self.old = copy_of(self.data, "old")
        self.server.start()

    def roll_back(self):
        """As after a power loss: the newest writes are gone, acknowledged or not."""
        self.server.kill()
        if self.old is not None:
            shutil.rmtree(self.data)
            shutil.copytree(self.old, self.data)
        self.server.start()

    def wipe(self):
        self.server.kill()
        shutil.rmtree(self.data)
        self.server.start()


def test_nothing_is_lost_or_repeated_when_the_store_is_killed_rolled_back_or_wiped(choice, tmp_path):
    with StoreServer(StoreConfig(), tmp_path, server=choice) as server:
        faults, learner = Faults(server, tmp_path), Learner(server.url)
        schedule = [
            faults.kill,
            faults.remember,
            learner.crash,
            faults.roll_back,
            faults.kill,
            faults.wipe,
            faults.remember,
        ]
        schedule += [
            learner.crash,
            faults.roll_back,
            faults.roll_back,
            learner.crash,
            faults.wipe,
            learner.crash,
            faults.kill,
        ]
        producers = [Producer(server.url, f"g{i}") for i in range(2)]
        try:
            for producer in producers:
                producer.start()
            deadline, next_fault = time.monotonic() + 2 * LONG_S, 60
            while learner.ledger.consumed < TARGET:
                assert time.monotonic() < deadline, (learner.ledger.consumed, learner.buffer.audit())
                learner.step()
                if schedule and learner.ledger.consumed >= next_fault:
                    schedule.pop(0)()
                    next_fault = learner.ledger.consumed + 60
        finally:
            for producer in producers:
                producer.stopping.set()
            for producer in producers:
                producer.join(30)
        assert [producer.error for producer in producers] == [None, None]
        assert not schedule, "every fault happened"
        assert sorted(learner.lineage) == list(range(1, TARGET + 1)), "each id once in the lineage"
        assert learner.gaps > 0, "the rollbacks were noticed"
        assert learner.buffer.audit().missing == 0
