"""Rewards in bubblewrap against attacks by the programs that they run: none has an effect outside, and the
next reward works.

The attacks are in tests/support/reward_attacks.py; what they did is looked up from outside. A few are also
made without the sandbox, where they succeed: otherwise nobody would know that they are attacks.
"""

import contextlib
import ctypes
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from multiprocessing import shared_memory
from pathlib import Path

import psutil
import pytest

from asyncrl.rewards.reward_process import reward_sandbox
from tests.support.machine import skip_for
from tests.support.waiting import LONG_S, comes_true, wait_until, wait_until_ended

pytestmark = pytest.mark.integration

SUPPORT = Path(__file__).parents[1] / "support"
CANARY = "canary-7f3a"
LIMIT_S = 2.0
ANSWER_S = 120.0
SYSCTL = Path("/proc/sys/fs/lease-break-time")
MARK = "ASYNCRL_RUN_DIRECTORY"
needs_sandbox = skip_for(reward_sandbox((), Path("runs")).problem())
libc = ctypes.CDLL(None, use_errno=True)


class World:
    """What can be attacked, and whether it was."""

    def __init__(self, root: Path) -> None:
        self.token = uuid.uuid4().hex[:12]
        self.project, self.runs = root / "project", root / "project" / "runs"
        self.run = self.runs / "first"
        self.run.mkdir(parents=True)
        shutil.copy(SUPPORT / "reward_attacks.py", self.project / "task.py")
        self.victim = self.project / "victim.py"
        self.elsewhere = root / "elsewhere" / "key.txt"
        self.elsewhere.parent.mkdir()
        self.secrets = [
            self.run / "run.key",
            self.project / "join.key",
            self.project / ".env",
            self.elsewhere,
        ]
        self.secrets += [
            self.project / "older" / "second" / "run.key",
            self.project / "tools" / ".git" / "config",
        ]
        for path in self.secrets:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(CANARY)
            path.chmod(0o600)
        self.heard: queue.Queue[bytes] = queue.Queue()
        self.sockets = [
            self._listen(socket.AF_INET, ("127.0.0.1", 0)),
            self._listen(socket.AF_UNIX, str(self.run / "store.sock")),
            self._listen(socket.AF_UNIX, f"\0{self.token}"),
            self._hear_datagrams(),
        ]
        self.shared = shared_memory.SharedMemory(create=True, size=4096)
        self.system_v = libc.shmget(int(self.token[:7], 16), 4096, 0o1600)
        libc.shmat.restype = ctypes.c_void_p
        self.system_v_address = libc.shmat(self.system_v, None, 0)
        self.bystander = psutil.Popen(["sleep", "600"])
        self.sysctl = SYSCTL.read_text()
        self.renew()

    def renew(self) -> None:
        """As before any attack."""
        self.victim.write_text("innocent")
        self.secrets[0].write_text(CANARY)
        self.shared.buf[:8] = b"innocent"
        ctypes.memmove(self.system_v_address, b"innocent", 8)
        if self.bystander.poll() is not None:
            self.bystander = psutil.Popen(["sleep", "600"])
        self.bystander.send_signal(signal.SIGCONT)
        if os.access(SYSCTL, os.W_OK):
            SYSCTL.write_text(self.sysctl)
        for place in ("/tmp", "/dev/shm"):
            Path(place, self.token).unlink(missing_ok=True)
        while not self.heard.empty():
            self.heard.get_nowait()

    def close(self) -> None:
        self.renew()
        self.bystander.kill()
        self.bystander.wait(120)
        for one in self.sockets:
            one.close()
        self.shared.close()
        self.shared.unlink()
        libc.shmctl(self.system_v, 0, None)  # IPC_RMID

    def columns(self, host: psutil.Process, *, sandbox: str) -> dict[str, object]:
        """For the attacks: where everything is. Without a sandbox only the bystander is to be hit."""
        return {
            "tcp": self.sockets[0].getsockname()[1],
            "udp": self.sockets[3].getsockname()[1],
            "store": str(self.run / "store.sock"),
            "abstract": self.token,
            "run_key": str(self.secrets[0]),
            "join_key": str(self.secrets[1]),
            "dot_file": str(self.secrets[2]),
            "elsewhere": str(self.elsewhere),
            "other_run": str(self.secrets[4]),
            "deeper": str(self.secrets[5]),
            "victim": str(self.victim),
            "shared_memory": self.shared.name,
            "system_v": int(self.token[:7], 16),
            "sysctl": str(SYSCTL),
            "sysctl_value": str(int(self.sysctl) + 1),
            "token": self.token,
            "pids": [self.bystander.pid, *([host.pid] if sandbox != "none" else [])],
            "parent_too": sandbox != "none",
        }

    def _listen(self, family: int, address: object) -> socket.socket:
        listener = socket.socket(family)
        listener.bind(address)
        listener.listen()

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    self.heard.put(connection.recv(100))

        threading.Thread(target=serve, daemon=True).start()
        return listener

    def _hear_datagrams(self) -> socket.socket:
        listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        listener.bind(("127.0.0.1", 0))

        def serve() -> None:
            while True:
                try:
                    self.heard.put(listener.recv(100))
                except OSError:
                    return

        threading.Thread(target=serve, daemon=True).start()
        return listener


class Host:
    """A process with a pool, as a generator has one."""

    def __init__(self, world: World, *, sandbox: str) -> None:
        self.world, self.sandbox = world, sandbox
        config = {
            "functions": [{"function": "task.py:task"}],
            "timeout_s": LIMIT_S,
            "sandbox": sandbox,
            "memory_gib": 1.0,
        }
        self.process = psutil.Popen(
            [sys.executable, str(SUPPORT / "reward_host.py"), json.dumps(config), "runs"],
            cwd=world.project,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ
            | {
                "HF_TOKEN": CANARY,
                MARK: world.token,
                "PYTHONPATH": f"{SUPPORT.parents[1]}:{os.environ.get('PYTHONPATH', '')}",
            },
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        assert self.answer() == {}

    def _read(self) -> None:
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def answer(self) -> dict:
        line = self._lines.get(timeout=ANSWER_S)
        assert line, f"the host is dead: {self.process.wait(120)}"
        return json.loads(line)

    def score(self, how: str) -> dict:
        row = {"how": how, "world": self.world.columns(self.process, sandbox=self.sandbox)}
        self.process.stdin.write(json.dumps(row) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def family(self) -> list[psutil.Process]:
        """The host, what descends from it, and everything that carries its mark, wherever it has gone."""
        descendants = (
            {one.pid for one in self.process.children(recursive=True)} if self.process.is_running() else set()
        )
        return [process for process in psutil.process_iter() if self._is_ours(process, descendants)]

    def _is_ours(self, process: psutil.Process, descendants: set[int]) -> bool:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            return process.pid in descendants or process.environ().get(MARK) == self.world.token
        except psutil.Error:
            return False

    def peak_gib(self, what: str) -> float:
        """VmPeak or VmHWM, the largest of the workers; the host itself for VmHWM."""
        processes = (
            [self.process]
            if what == "VmHWM"
            else [one for one in self.family() if one.pid != self.process.pid]
        )
        texts = [path.read_text() for one in processes if (path := Path(f"/proc/{one.pid}/status")).exists()]
        return max(
            (int(text.split(f"{what}:")[1].split()[0]) / 2**20 for text in texts if what in text), default=0.0
        )

    def close(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(120)
        finally:
            for process in self.family():  # of the attacks that succeed without a sandbox
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("world"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def sandboxed(world: World) -> Iterator[Host]:
    host = Host(world, sandbox="bubblewrap")
    yield host
    host.close()


def happens(host: Host, condition: Callable[[], bool]) -> bool:
    """Without a sandbox it does, sooner or later; within one, nothing may show for a while."""
    return comes_true(condition, LONG_S if host.sandbox == "none" else 0.3)


def heard(host: Host, answer: dict) -> bool:
    return happens(host, lambda: not host.world.heard.empty())


def told(host: Host, answer: dict) -> bool:
    return CANARY in answer.get("error", "")


def changed(host: Host, answer: dict) -> bool:
    return host.world.victim.read_text() != "innocent" or host.world.secrets[0].read_text() != CANARY


def hurt(host: Host, answer: dict) -> bool:
    """The bystander or the host is dead, stopped or traced."""
    return happens(host, lambda: _is_hurt(host))


def _is_hurt(host: Host) -> bool:
    states = []
    for process in (host.world.bystander, host.process):
        text = (
            Path(f"/proc/{process.pid}/status").read_text()
            if process.poll() is None
            else "State:\tX\nTracerPid:\t0\n"
        )
        states.append((text.split("State:\t")[1][0], text.split("TracerPid:\t")[1].split()[0]))
    return any(state in "XZTt" or tracer != "0" for state, tracer in states)


def left(host: Host, answer: dict) -> bool:
    """More processes than the host, its worker and bubblewrap between them; killed ones may take a while."""
    if host.sandbox == "none":
        return len(host.family()) > 2
    return not comes_true(lambda: len(host.family()) <= 3, LONG_S)


def nothing(host: Host, answer: dict) -> bool:
    return False


EFFECTS: dict[str, Callable[[Host, dict], bool]] = {
    "fork_bomb": left,
    "orphan": left,
    "allocate": lambda host, answer: host.peak_gib("VmPeak") > 2,
    "raise_limits": lambda host, answer: host.peak_gib("VmPeak") > 2,
    "stack_overflow": nothing,
    "connect_tcp": heard,
    "ask_dns": heard,
    "connect_store": heard,
    "connect_abstract": heard,
    "read_environ": told,
    "read_run_key": told,
    "read_join_key": told,
    "read_dot_file": told,
    "read_elsewhere": told,
    "chroot_away": told,
    "write_beside_reward": changed,
    "write_run_key": changed,
    "symlink_out": changed,
    "remount_and_write": changed,
    "write_sysctl": lambda host, answer: SYSCTL.read_text() != host.world.sysctl,
    "read_another_run": told,
    "read_deeper": told,
    "reach_the_kernel": lambda host, answer: "reached []" not in answer.get("error", ""),
    **(
        {"ask_in_32_bit": lambda host, answer: "reached" in answer.get("error", "")}
        if os.uname().machine == "x86_64"
        else {}
    ),
    "trace": hurt,
    "kill": hurt,
    "stop": hurt,
    "forge_reply": lambda host, answer: answer.get("score") == 100.0,
    "overwrite_shared_memory": lambda host, answer: bytes(host.world.shared.buf[:8]) != b"innocent",
    "attach_system_v": lambda host, answer: ctypes.string_at(host.world.system_v_address, 8) != b"innocent",
    "print_a_gigabyte": lambda host, answer: host.peak_gib("VmHWM") > 0.5,
    "use_up_descriptors": nothing,
    "fill_tmp": lambda host, answer: any(
        Path(place, host.world.token).exists() for place in ("/tmp", "/dev/shm")
    ),
    "leave": nothing,
    "system_exit": nothing,
    "sleep_forever": nothing,
    "busy_and_deaf": nothing,
    "interrupt_the_group": nothing,
}
SUCCEED_OUTSIDE = (
    *(
        "orphan",
        "connect_tcp",
        "ask_dns",
        "connect_store",
        "connect_abstract",
        "read_environ",
        "read_run_key",
        "read_join_key",
    ),
    *("read_another_run", "read_deeper", *(["reach_the_kernel"] if os.geteuid() == 0 else [])),
    *(
        "read_dot_file",
        "read_elsewhere",
        "write_beside_reward",
        "write_run_key",
        "symlink_out",
        "stop",
        "forge_reply",
    ),
    *(
        "overwrite_shared_memory",
        "attach_system_v",
        "kill",
        *(["write_sysctl"] if os.access(SYSCTL, os.W_OK) else []),
    ),
)
"""Those that a test can let happen, and that a user may do everywhere."""


@needs_sandbox
@pytest.mark.parametrize("how", EFFECTS)
def test_an_attack_has_no_effect_and_the_next_reward_works(how: str, world: World, sandboxed: Host) -> None:
    world.renew()
    answer = sandboxed.score(how)
    assert not EFFECTS[how](sandboxed, answer), answer
    assert answer["seconds"] < LIMIT_S + 10.0
    honest = sandboxed.score("honest")
    assert honest.get("score") == 42.0, (answer, honest)
    assert not left(sandboxed, honest), sandboxed.family()
    assert sandboxed.process.poll() is None


def test_the_same_attacks_succeed_without_the_sandbox(world: World) -> None:
    host = Host(world, sandbox="none")
    try:
        for how in SUCCEED_OUTSIDE:
            world.renew()
            answer = host.score(how)
            assert EFFECTS[how](host, answer), (how, answer)
            host.score("honest")  # a forged reply leaves the true one behind
    finally:
        host.close()
    world.renew()


@needs_sandbox
def test_nothing_outlives_a_killed_host_in_the_middle_of_an_attack(world: World) -> None:
    host = Host(world, sandbox="bubblewrap")
    row = {"how": "busy_and_deaf", "world": world.columns(host.process, sandbox="bubblewrap")}
    host.process.stdin.write(json.dumps(row) + "\n")
    host.process.stdin.flush()
    mine = host.process.children(recursive=True)
    assert len(mine) == 2
    began_s = sum(one.cpu_times().user for one in mine)
    wait_until(lambda: sum(one.cpu_times().user for one in mine) > began_s + 0.2)
    host.process.kill()
    host.process.wait(120)
    wait_until_ended(mine)
