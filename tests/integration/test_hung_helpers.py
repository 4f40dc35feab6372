"""Helpers that are stopped for good are replaced by whoever needs them. Senders: see test_senders.py."""

import os
import signal

import pytest

from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.server import StoreServer
from asyncrl.config.store import StoreConfig
from asyncrl.launch import own_store
from asyncrl.launch.own_store import KeptStore
from tests.support.waiting import let_pass, stop, wait_until

pytestmark = pytest.mark.integration


def tend_until(kept: KeptStore, condition) -> None:
    wait_until(lambda: condition() or kept.tend())


def test_a_store_that_is_stopped_is_killed_and_started_again(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(own_store, "ASK_S", 0.2)
    with StoreServer(StoreConfig(), tmp_path) as server:
        kept, first = KeptStore(server, silent_s=2.0), server.pid
        stop(first)
        tend_until(kept, lambda: server.is_running and server.pid != first and kept.is_up)
        assert StoreConnection(server.url).call(lambda client: client.ping())
        second, heard_s = server.pid, kept._attention.now_s
        tend_until(kept, lambda: kept._attention.now_s > heard_s + 4.0)  # an answer is enough to live
        assert server.pid == second
    assert caplog.text.count("has not answered for") == 1


def test_a_store_that_was_not_asked_is_not_silent(tmp_path):
    """The supervisor slept for longer than the bound."""
    with StoreServer(StoreConfig(), tmp_path) as server:
        kept, first = KeptStore(server, silent_s=2.0), server.pid
        kept.tend()
        let_pass(3.0)
        stop(first)
        kept.tend()
        os.kill(first, signal.SIGCONT)
        tend_until(kept, lambda: kept._attention.now_s > 3.0)
        assert server.pid == first
