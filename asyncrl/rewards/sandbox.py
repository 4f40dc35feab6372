"""Reward workers in bubblewrap (`bwrap`), for rewards that run programs which the model wrote.

A worker in the sandbox has its own namespaces (users, processes, network, IPC, host name), no capabilities,
and a filter of system calls (`seccomp`). It can read the system's programs, this Python with its packages,
the working directory and the directories of reward files, but not the run root, other runs, or files with
private names. It has its own `/tmp` and `/dev/shm`. It ends with its parent, and its children end with it.
"""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import asyncrl
from asyncrl.config.sections import RewardConfig
from asyncrl.rewards import seccomp
from asyncrl.rewards.worker import SCRATCH

# Size of /tmp, and of /dev/shm.
SCRATCH_BYTES = 256 * 2**20
# RLIMIT_*, soft and hard. The kernel does not enforce NPROC for root.
LIMITS = {"NOFILE": 1024, "NPROC": 256, "CORE": 0}
# The first kernel whose NPROC counts only the processes of the sandbox.
NPROC_KERNEL = (5, 14)
# Parent of a worker in the sandbox, which is process 1 of its namespace.
PARENT_PID = 0
PROBE_S = 20.0
# Directory levels below the working directory and those of reward files that are searched for private names.
DEPTH = 3

_NAMESPACES = (
    "--unshare-all --unshare-user --disable-userns --cap-drop ALL --as-pid-1 --die-with-parent --new-session"
)
_SYSTEM = "/usr /bin /sbin /lib /lib32 /lib64 /opt"
_ETC = "alternatives group hosts ld.so.cache ld.so.conf ld.so.conf.d localtime nsswitch.conf passwd"
_PRIVATE = (".*", "*.key")
_VARIABLES = (
    "PATH LANG LANGUAGE LC_* TZ LD_LIBRARY_PATH PYTHON* VIRTUAL_ENV CONDA_PREFIX OMP_* ASYNCRL_RUN_DIRECTORY"
)
_INSTALL = "install bubblewrap 0.8 or newer (apt-get install bubblewrap)"
_ALLOW = (
    "it needs user namespaces: in Docker --security-opt seccomp=unconfined --security-opt "
    "systempaths=unconfined --security-opt apparmor=unconfined; on Ubuntu from 23.10 sysctl "
    "kernel.apparmor_restrict_unprivileged_userns=0"
)


@dataclass(frozen=True, slots=True)
class Sandbox:
    """The part of the file system that workers see."""

    # Reward functions as in the config.
    functions: Sequence[str]
    # Hidden, except reward files in it.
    run_root: Path

    def wrap(self, command: Sequence[str], *, filter_fd: int) -> list[str]:
        """`command` in the sandbox, with the same paths. `filter_fd` comes from `seccomp.open_program`."""
        words = [*_NAMESPACES.split(), "--seccomp", str(filter_fd), "--proc", "/proc", "--dev", "/dev"]
        for scratch in SCRATCH:
            words += ["--size", str(SCRATCH_BYTES), "--tmpfs", scratch]
        for system in (*_SYSTEM.split(), *(f"/etc/{name}" for name in _ETC.split())):
            words += ["--ro-bind-try", system, system]
        empty = []
        for place in self._shown():
            words += ["--ro-bind", str(place), str(place)]
            for private in self._private(place):
                if private.is_dir():
                    empty.append(str(private))
                    words += ["--tmpfs", str(private)]
                else:
                    words += ["--ro-bind", os.devnull, str(private)]
        if self.run_root.exists():
            empty.append(str(self.run_root.resolve()))
            words += ["--tmpfs", empty[-1]]
        for file in self._files():
            words += ["--ro-bind", str(file), str(file)]
        here = str(Path.cwd())
        words += ["--dir", here, "--chdir", here]
        # Last, because mount points are made in them. Without it, root could write to /proc/sys.
        for made in ("/", "/dev", "/proc", *empty):
            words += ["--remount-ro", made]
        return ["bwrap", *words, "--", *command]

    def problem(self) -> str | None:
        """The reason why no worker can run in it on this host, and what to do; or None."""
        if shutil.which("bwrap") is None:
            return f"found no program `bwrap`, which makes the sandbox; {_INSTALL}"
        if Path("/") in self._shown():
            return (
                "it would show every file, because / is the working directory or holds a reward file; use "
                "a subdirectory"
            )
        if not seccomp.is_known():
            machine = platform.machine()
            return f"it has no filter of system calls for {machine}; run rewards on x86_64 or aarch64"
        filter_fd = seccomp.open_program()
        try:
            probe = self.wrap([sys.executable, "-c", ""], filter_fd=filter_fd)
            own, inherited = environment(), [filter_fd]
            subprocess.run(
                probe, env=own, pass_fds=inherited, timeout=PROBE_S, capture_output=True, check=True
            )
        except subprocess.TimeoutExpired:
            return f"`bwrap` starts nothing within {PROBE_S:g} s; {_ALLOW}"
        except subprocess.CalledProcessError as error:
            said = error.stderr.decode(errors="replace").strip() or f"exit status {error.returncode}"
            remedy = _INSTALL if "Unknown option" in said else _ALLOW
            return f"`bwrap` cannot make a sandbox here: {said}; {remedy}"
        finally:
            os.close(filter_fd)
        return None

    def _shown(self) -> list[Path]:
        """The visible directories. Parents come first: `.venv`, a private name, is hidden and shown again."""
        packages = map(Path, (asyncrl.__path__[0], sys.prefix, sys.base_prefix, *sys.path))
        wanted = [path.absolute() for path in (*self._own(), *packages)]
        shown = {path for one in wanted if one.exists() for path in (one, one.resolve())}
        return sorted(shown - set(map(Path, SCRATCH)))

    def _private(self, place: Path) -> Iterator[Path]:
        """The hidden parts of a place: private names, `DEPTH` deep where users keep files, and other runs."""
        depth = DEPTH if place in {path for own in self._own() for path in (own, own.resolve())} else 0
        for path, directories, files in os.walk(place):
            here, below = Path(path), len(Path(path).parts) - len(place.parts)
            if here.resolve() == self.run_root.resolve():  # `wrap` hides it
                directories.clear()
                continue
            if below and "run.key" in files:
                directories.clear()
                yield here
                continue
            entries = [here / name for name in (*directories, *files)]
            yield from (one for one in entries if _matches(one.name, _PRIVATE) and not one.is_symlink())
            directories[:] = [name for name in directories if below < depth and not _matches(name, _PRIVATE)]

    def _own(self) -> list[Path]:
        return [path.absolute() for path in (Path.cwd(), *(file.parent for file in self._files()))]

    def _files(self) -> Iterator[Path]:
        for function in self.functions:
            place = function.rpartition(":")[0]
            if place.endswith(".py") and Path(place).is_file():
                yield Path(place).absolute()


def sandbox_of(config: RewardConfig, run_root: Path) -> Sandbox | None:
    """The sandbox that the config asks for, if any."""
    if config.sandbox != "bubblewrap":
        return None
    return Sandbox([function.function for function in config.functions], run_root)


def environment() -> dict[str, str]:
    """Environment variables of a worker in the sandbox: those that Python needs to start, and no secret."""
    kept = {name: value for name, value in os.environ.items() if _matches(name, _VARIABLES.split())}
    return kept | {"HOME": "/tmp", "TMPDIR": "/tmp"}


def limits() -> dict[str, int]:
    """Limits of processes in the sandbox, by the name after RLIMIT_."""
    kernel = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    return {name: value for name, value in LIMITS.items() if name != "NPROC" or kernel >= NPROC_KERNEL}


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, one) for one in patterns)
