"""A store whose data does not load, or loads slowly: it comes up, or says what prevents it."""

import os
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from redis.exceptions import ResponseError

from asyncrl.buffer import connection as connection_module
from asyncrl.buffer import server as server_module
from asyncrl.buffer import store_data
from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.server import StoreServer
from asyncrl.buffer.users import StoreUser
from asyncrl.config.store import StoreConfig
from asyncrl.errors import StoreError
from reliability.chaos.disk import Disk
from tests.support.waiting import wait_until

pytestmark = pytest.mark.integration

KEYS = 400
BASE, LOG, MANIFEST = "appendonly.aof.2.base.rdb", "appendonly.aof.2.incr.aof", "appendonly.aof.manifest"


def open_store(directory: Path, **more: object) -> StoreServer:
    return StoreServer(StoreConfig(), directory, server="bundled", needs_data=False, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a store that has a snapshot and a log of what came after it."""
    directory = tmp_path_factory.mktemp("written")
    with open_store(directory) as server:
        client = StoreConnection(server.url).client
        for key in range(KEYS):
            client.set(f"base {key}", os.urandom(100))
        client.bgrewriteaof()
        wait_until(
            lambda: (
                (directory / "appendonlydir" / BASE).exists()
                and not client.info("persistence")["aof_rewrite_in_progress"]
            )
        )
        for key in range(KEYS):
            client.set(f"log {key}", os.urandom(100))
        client.close()
    return directory


@pytest.fixture
def store(written: Path, tmp_path: Path) -> Path:
    shutil.copytree(written, tmp_path / "store", ignore=shutil.ignore_patterns("*.sock"))
    return tmp_path / "store"


def keys(server: StoreServer) -> int:
    connection = StoreConnection(server.url, retry_s=5.0)
    count = int(connection.call(lambda client: client.dbsize()))  # type: ignore[arg-type]
    connection.close()
    return count


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[3] ^= 0x10
    path.write_bytes(data)


def missing(path: Path) -> None:
    path.unlink()


def replaced(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [emptied, truncated, flipped, missing, replaced])
@pytest.mark.parametrize("name", [BASE, LOG, MANIFEST])
def test_a_damaged_file_keeps_no_store_from_starting(
    store: Path, name: str, damage: Callable[[Path], None]
) -> None:
    damage(store / "appendonlydir" / name)
    with open_store(store) as server:
        found = keys(server)
        aside = list(store.glob("damaged-*"))
        assert 0 <= found <= 2 * KEYS
        assert not aside or (
            found == 0 and (aside[0] / MANIFEST).exists() == ((name, damage) != (MANIFEST, missing))
        )


@pytest.mark.parametrize("what", ["appendonlydir", "store.sock", "store.log"])
def test_another_kind_of_file_in_its_place_keeps_no_store_from_starting(store: Path, what: str) -> None:
    if what == "appendonlydir":
        shutil.rmtree(store / what)
        (store / what).touch()
    else:
        (store / what).unlink(missing_ok=True)
        (store / what).mkdir()
    with open_store(store) as server:
        assert keys(server) == (0 if what == "appendonlydir" else 2 * KEYS)


def test_no_more_than_two_damaged_ones_are_kept(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = open_store(store)
    for _ in range(3):
        emptied(store / "appendonlydir" / MANIFEST)
        server.start()
        server.stop()
    assert sorted(path.name for path in store.glob("damaged-*")) == ["damaged-2", "damaged-3"]
    assert caplog.text.count("could not load its data and starts empty") == 3
    server.start()
    StoreConnection(server.url).client.set("new", "value")
    server.stop()
    with server:
        assert keys(server) == 1, "what came after is kept"
    assert len(list(store.glob("damaged-*"))) == 2


def test_a_store_on_a_full_disk_answers_and_does_not_count_as_hung(tmp_path: Path) -> None:
    """It refuses even PING then; taken for silence, that would get it killed as long as the disk is full."""
    disk = Disk(tmp_path / "store", tmp_path)
    server = open_store(tmp_path / "store")
    with disk.below(), server:
        disk.fill(True)
        client = StoreConnection(server.url, retry_s=0.1).client
        until_s = time.monotonic() + 60
        with pytest.raises(ResponseError, match="No space left"):
            while time.monotonic() < until_s:
                client.set("key", "value")
        with pytest.raises(ResponseError, match="MISCONF"):
            client.ping()
        assert server.look() == "ready"
        disk.fill(False)


def stand_in(tmp_path: Path, script: str) -> Path:
    path = tmp_path / "server"
    path.write_text(f"#!/bin/sh\ncat > /dev/null\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.parametrize(
    "script",
    [
        "echo 'Can not write: No space left on device'; exit 1",
        "echo 'Cannot open the append only file: Permission denied'; exit 1",
        "kill -9 $$",
        "echo 'words that nobody knows'; exit 1",
        "kill -SEGV $$",
    ],
)
def test_data_that_is_not_to_blame_stays(store: Path, tmp_path: Path, script: str) -> None:
    server = open_store(store)
    server._binary = stand_in(tmp_path, script)
    for _ in range(2):
        with pytest.raises(StoreError, match=r"did not come up in .* its log ends"):
            server.start()
    assert not list(store.glob("damaged-*"))
    with open_store(store) as whole:
        assert keys(whole) == 2 * KEYS


def test_a_port_that_is_taken_and_a_server_that_is_gone_are_said(store: Path, tmp_path: Path) -> None:
    user = StoreUser("someone", "secret", "~* +@all")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = StoreConfig(bind=f"tcp://127.0.0.1:{taken.getsockname()[1]}")
        server = StoreServer(config, store, server="bundled", users=[user], needs_data=False)
        with pytest.raises(StoreError, match="Address already in use"):
            server.start()
    server = open_store(store)
    server._binary = tmp_path / "none"
    with pytest.raises(StoreError, match=r"(?s)its log ends.*none: .*No such file"):
        server.start()
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"cannot be started in .*Not a directory"):
        open_store(tmp_path / "file" / "store").start()
    assert not list(store.glob("damaged-*"))


class SlowStore(StoreServer):
    """Takes 5 ms for each key that it loads, and answers meanwhile."""

    def _settings(self) -> str:
        return super()._settings() + "key-load-delay 5000\nloading-process-events-interval-bytes 1024\n"


def test_a_store_that_loads_is_waited_for_by_everybody(
    store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # While it reads this one, it answers after every thousand commands only.
    emptied(store / "appendonlydir" / LOG)
    monkeypatch.setattr(store_data, "LOG_EVERY_S", 0.2)
    caplog.set_level("INFO")
    server = SlowStore(StoreConfig(), store, server="bundled", needs_data=False)
    began_s = time.monotonic()
    server.begin()
    try:
        looks = {"dead": 0, "silent": 0, "loading": 0}
        while (look := server.look()) != "loading":
            looks[look] += 1
            assert time.monotonic() < began_s + 30
        monkeypatch.setattr(store_data, "SILENT_S", 0.5)
        answered, beats = [], []
        monkeypatch.setattr(connection_module, "beat", lambda: beats.append(1))
        asking = threading.Thread(target=lambda: answered.append(_ask(server.url)))
        asking.start()
        wait_until(server.comes_up)
        asking.join(60)
        assert answered == [KEYS], "a client whose patience was half a second"
        assert time.monotonic() - began_s > 2.0, "longer than one that says nothing is waited for"
        assert "the store loads its log of" in caplog.text
        assert beats, "who waits for it does not count as hung"
        assert server.look() == "ready"
    finally:
        server.stop()
    assert server.look() == "dead"


def _ask(url: str) -> int:
    connection = StoreConnection(url, retry_s=0.5)
    count = int(connection.call(lambda client: client.dbsize()))  # type: ignore[arg-type]
    connection.close()
    return count


def test_one_that_says_nothing_is_stopped_with_a_message(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_data, "SILENT_S", 0.3)
    monkeypatch.setattr(server_module, "STOP_S", 0.2)
    server = open_store(store)
    server._binary = stand_in(tmp_path, "exec sleep 600")
    server.begin()
    pid = server.pid
    with pytest.raises(StoreError, match="has been silent for 0 s; it is stopped"):
        wait_until(server.comes_up)
    assert not Path(f"/proc/{pid}").exists()
    assert not list(store.glob("damaged-*")), "hanging is not its data's fault"
