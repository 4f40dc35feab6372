"""What the supervisor's process does beside supervising."""

from contextlib import ExitStack
from types import SimpleNamespace

from asyncrl.errors import StoreError
from asyncrl.launch import own_store, up
from asyncrl.launch.directory import RunDirectory


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
            raise StoreError("no space left on device")
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
