"""What the supervisor's process does beside supervising."""

import os
import signal
import sys
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from asyncrl.cli import foreground
from asyncrl.commands import up
from asyncrl.errors import StoreError
from asyncrl.launch import own_store
from asyncrl.launch.placement import placement_of
from asyncrl.run.directory import RunDirectory
from asyncrl.supervisor import ProcessSpec, Supervisor
from tests.support.task_config import config_of


class Server:
    """A store that dies, finds no room on its disk for a while, and then loads for a while."""

    url = "unix:///store.sock"
    is_running = True
    refusals = 2
    looks = 3

    def __enter__(self):
        return self

    def __exit__(self, *_): ...

    def look(self):
        return "ready"

    def stop(self): ...

    def begin(self):
        if self.refusals:
            self.refusals -= 1
            raise (StoreError, OSError)[self.refusals]("no space left on device")
        self.is_running = True

    def comes_up(self):
        self.looks -= 1
        return self.looks == 0


def test_a_store_that_cannot_start_is_tried_again(monkeypatch, tmp_path, caplog):
    server = Server()
    monkeypatch.setattr(up, "own_store", lambda *_: server)
    monkeypatch.setattr(own_store, "AGAIN_S", 0.0)
    with ExitStack() as stack:
        url, tend = up._store(SimpleNamespace(store=SimpleNamespace(url=None)), RunDirectory(tmp_path), stack)
        assert url == server.url
        server.is_running = False
        tries = 0
        while not server.is_running:
            tend()
            tries += 1
        assert tries == 3
        while server.looks:
            tend()
        for _ in range(3):
            tend()
        assert server.looks == 0, "one that is up is let alone"
    assert caplog.text.count("no space left on device") == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_a_signal_ended_says_so_in_its_status(number, tmp_path, monkeypatch):
    # Also where the tests run under nohup.
    monkeypatch.setattr(foreground.signal, "getsignal", lambda number: signal.SIG_DFL)
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    spec = ProcessSpec(
        name="learner",
        argv=sleeper,
        env=dict(os.environ),
        log_path=tmp_path / "out",
        ends_run=True,
        grace_s=2.0,
    )
    with Supervisor([spec], max_restarts=0) as supervisor, foreground.stop_on_signals(supervisor) as stopped:
        supervisor.run(lambda: os.kill(os.getpid(), number), tick_s=0.02)
        os.kill(os.getpid(), signal.SIGINT)  # a second one, from an impatient user
    assert stopped.status == 128 + number


def test_under_nohup_a_closed_terminal_does_not_end_a_run(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        spec = ProcessSpec(
            name="learner", argv=["true"], env=dict(os.environ), log_path=tmp_path / "out", ends_run=True
        )
        with (
            Supervisor([spec], max_restarts=0) as supervisor,
            foreground.stop_on_signals(supervisor) as stopped,
        ):
            supervisor.run(lambda: os.kill(os.getpid(), signal.SIGHUP), tick_s=0.02)
            assert supervisor.is_over and stopped.status == 0
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("reads", "slots"), [(False, "host"), (True, "auto"), (None, "auto")])
def test_versions_stay_off_a_gpu_that_a_generator_cannot_read(monkeypatch, caplog, reads, slots):
    monkeypatch.setattr(up, "can_read", lambda reader, source: reads)
    config = config_of()
    found = up.with_slots(config, placement_of(config, 2))
    assert found.weights.slots == slots
    assert ("cannot read the learner's" in caplog.text) == (slots == "host")
    chosen = config_of(weights={"slots": "gpu"})
    assert up.with_slots(chosen, placement_of(chosen, 2)) is chosen
