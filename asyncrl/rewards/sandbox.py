"""Reward workers in bubblewrap (`bwrap`), for rewards that run programs which the model wrote.

A worker in the sandbox has its own namespaces (users, processes, network, IPC, host name), no capabilities,
and a filter of system calls (`seccomp`). It can read the system's programs, this Python with its packages,
the working directory and the directories of reward files, but not the run root, other runs, or files with
private names. It has its own `/tmp` and `/dev/shm`. It ends with its parent, and everything that it started
ends with it.
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
# The first kernel whose NPROC counts the processes of the sandbox alone.
NPROC_KERNEL = (5, 14)
# What a worker in the sandbox sees as its parent: it is process 1 of its namespace, so no other process there
# has its pipes.
PARENT_PID = 0
PROBE_S = 20.0
# Private names are searched so many directories below the working directory and the directories of reward
# files.
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

    functions: Sequence[str]
    """Reward functions as in the config."""
    run_root: Path
    """Empty in there, reward files in it aside."""

    def wrap(self, command: Sequence[str], *, filter_fd: int) -> list[str]:
        """`command` in the sandbox, which reads its filter from `filter_fd`: an inherited
        `seccomp.open_program()`.

        Paths are the same there, and so is the working directory.
        """
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
        # Last, for mount points are made in them; root could write /proc/sys.
        for made in ("/", "/dev", "/proc", *empty):
            words += ["--remount-ro", made]
        return ["bwrap", *words, "--", *command]

    def problem(self) -> str | None:
        """Why no worker can run in it on this host and what to do, or None."""
        if shutil.which("bwrap") is None:
            return f"found no program `bwrap`, which makes the sandbox; {_INSTALL}"
        if Path("/") in self._shown():
            return (
                "it would show every file, for / is the working directory or holds a reward file; use a "
                "directory of their own"
            )
        if not seccomp.is_known():
            return (
                f"it has no filter of system calls for {platform.machine()}; run rewards on x86_64 or aarch64"
            )
        filter_fd = seccomp.open_program()
        try:
            probe = self.wrap([sys.executable, "-c", ""], filter_fd=filter_fd)
            subprocess.run(
                probe,
                env=environment(),
                capture_output=True,
                check=True,
                timeout=PROBE_S,
                pass_fds=[filter_fd],
            )
        except subprocess.TimeoutExpired:
            return f"`bwrap` starts nothing within {PROBE_S:g} s; {_ALLOW}"
        except subprocess.CalledProcessError as error:
            said = error.stderr.decode(errors="replace").strip() or f"exit status {error.returncode}"
            return (
                f"`bwrap` cannot make a sandbox here: {said}; "
                f"{_INSTALL if 'Unknown option' in said else _ALLOW}"
            )
        finally:
            os.close(filter_fd)
        return None

    def _shown(self) -> list[Path]:
        """Parents come first, so that a private directory such as `.venv` can be shown again after it was
        hidden."""
        packages = [
            Path(asyncrl.__file__).parent,
            Path(sys.prefix),
            Path(sys.base_prefix),
            *map(Path, sys.path),
        ]
        wanted = [path.absolute() for path in (*self._own(), *packages)]
        return sorted(
            {path for one in wanted if one.exists() for path in (one, one.resolve())}
            - set(map(Path, SCRATCH))
        )

    def _private(self, place: Path) -> Iterator[Path]:
        """The parts of a place that stay hidden: private names, and other runs. Searched `DEPTH` deep where
        users keep files."""
        depth = DEPTH if place in {path for own in self._own() for path in (own, own.resolve())} else 0
        for path, directories, files in os.walk(place):
            here, below = Path(path), len(Path(path).parts) - len(place.parts)
            if here.resolve() == self.run_root.resolve():  # empty in there
                directories.clear()
                continue
            if below and "run.key" in files:
                directories.clear()
                yield here
                continue
            entries = [here / name for name in (*directories, *files)]
            yield from (entry for entry in entries if _is_private(entry.name) and not entry.is_symlink())
            directories[:] = [name for name in directories if below < depth and not _is_private(name)]

    def _own(self) -> list[Path]:
        return [path.absolute() for path in (Path.cwd(), *(file.parent for file in self._files()))]

    def _files(self) -> Iterator[Path]:
        for function in self.functions:
            place = function.rpartition(":")[0]
            if place.endswith(".py") and Path(place).is_file():
                yield Path(place).absolute()


def sandbox_of(config: RewardConfig, run_root: Path) -> Sandbox | None:
    """The one that a config asks for; None without. `run_root` as in `Sandbox`."""
    return (
        Sandbox([function.function for function in config.functions], run_root)
        if config.sandbox == "bubblewrap"
        else None
    )


def environment() -> dict[str, str]:
    """Variables of a worker in the sandbox: what Python needs to start, and no secret."""
    patterns = _VARIABLES.split()
    kept = {
        name: value for name, value in os.environ.items() if any(fnmatchcase(name, one) for one in patterns)
    }
    return kept | {"HOME": "/tmp", "TMPDIR": "/tmp"}


def limits() -> dict[str, int]:
    """Of processes in the sandbox, by the name after RLIMIT_."""
    kernel = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    return {name: value for name, value in LIMITS.items() if name != "NPROC" or kernel >= NPROC_KERNEL}


def _is_private(name: str) -> bool:
    return any(fnmatchcase(name, one) for one in _PRIVATE)
