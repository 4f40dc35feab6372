"""Commands in bubblewrap (`bwrap`): what they see of the file system, their variables and limits.

A command in the sandbox has its own namespaces (users, processes, network, IPC, host name), no capabilities,
and a filter of system calls (`seccomp`). It can read the system's programs, this Python with its packages,
and the directories that its caller names, except files with private names. It has its own `/tmp` and
`/dev/shm`. It ends with its parent, and its children end with it.
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

from asyncrl.files import with_cure
from asyncrl.sandbox import seccomp

SCRATCH = ("/tmp", "/dev/shm")
# Size of /tmp, and of /dev/shm.
SCRATCH_BYTES = 256 * 2**20
# RLIMIT_*, soft and hard. The kernel does not enforce NPROC for root.
LIMITS = {"NOFILE": 1024, "NPROC": 256, "CORE": 0}
# The first kernel whose NPROC counts only the processes of the sandbox.
NPROC_KERNEL = (5, 14)
# Parent of a process 1 of the sandbox, as that process sees it.
PARENT_PID = 0
PROBE_S = 20.0
# Directory levels below the directories of `Bubblewrap.own` that are searched for private names.
DEPTH = 3

_NAMESPACES = (
    "--unshare-all --unshare-user --disable-userns --cap-drop ALL --as-pid-1 --die-with-parent --new-session"
)
_SYSTEM = "/usr /bin /sbin /lib /lib32 /lib64 /opt"
_ETC = "alternatives group hosts ld.so.cache ld.so.conf ld.so.conf.d localtime nsswitch.conf passwd"
_PRIVATE = (".*", "*.key")
_VARIABLES = "PATH LANG LANGUAGE LC_* TZ LD_LIBRARY_PATH PYTHON* VIRTUAL_ENV CONDA_PREFIX OMP_*"
_INSTALL = "install bubblewrap 0.8 or newer (apt-get install bubblewrap)"
_ALLOW = (
    "it needs user namespaces: in Docker --security-opt seccomp=unconfined --security-opt "
    "systempaths=unconfined --security-opt apparmor=unconfined; on Ubuntu from 23.10 sysctl "
    "kernel.apparmor_restrict_unprivileged_userns=0"
)


@dataclass(frozen=True, slots=True)
class Bubblewrap:
    """The part of the file system that a command sees, besides the system and this Python."""

    # The working directory of the command.
    directory: Path
    # Directories where users keep files. Private names in them are hidden, `DEPTH` levels deep.
    own: Sequence[Path] = ()
    # Directories of packages. Private names directly in them are hidden.
    packages: Sequence[Path] = ()
    # Files that are visible even in a hidden directory.
    files: Sequence[Path] = ()
    # Files and directories that are hidden wherever they are.
    hidden: Sequence[Path] = ()

    def wrap(self, command: Sequence[str], *, filter_fd: int) -> list[str]:
        """`command` in the sandbox, with the same paths. `filter_fd` comes from `seccomp.open_program`."""
        words = [*_NAMESPACES.split(), "--seccomp", str(filter_fd), "--proc", "/proc", "--dev", "/dev"]
        for scratch in SCRATCH:
            words += ["--size", str(SCRATCH_BYTES), "--tmpfs", scratch]
        for system in (*_SYSTEM.split(), *(f"/etc/{name}" for name in _ETC.split())):
            words += ["--ro-bind-try", system, system]
        empty: list[str] = []
        for place in self._shown():
            words += ["--ro-bind", str(place), str(place)]
            for private in self._private(place):
                words += _covered(private, empty)
        for hidden in self.hidden:
            if hidden.exists():
                words += _covered(hidden.resolve(), empty)
        for file in self.files:
            words += ["--ro-bind", str(file), str(file)]
        here = str(self.directory)
        words += ["--dir", here, "--chdir", here]
        # Last, because mount points are made in them. Without it, root could write to /proc/sys.
        for made in ("/", "/dev", "/proc", *empty):
            words += ["--remount-ro", made]
        return ["bwrap", *words, "--", *command]

    def problem(self) -> str | None:
        """The reason why no command can run in it on this host, and what to do; or None."""
        if shutil.which("bwrap") is None:
            return f"found no program `bwrap`, which makes the sandbox; {_INSTALL}"
        if Path("/") in self._shown():
            return (
                "it would show every file, because / is the working directory or holds a reward file; use "
                "a subdirectory"
            )
        if not seccomp.is_known():
            machine = platform.machine()
            return f"it has no filter of system calls for {machine}; use x86_64 or aarch64"
        try:
            with seccomp.open_program() as filter_fd:
                probe = self.wrap([sys.executable, "-c", ""], filter_fd=filter_fd)
                own, inherited = environment(), [filter_fd]
                subprocess.run(
                    probe, env=own, pass_fds=inherited, timeout=PROBE_S, capture_output=True, check=True
                )
        except OSError as error:
            return with_cure(error, "`bwrap` cannot be started")
        except subprocess.TimeoutExpired:
            return f"`bwrap` starts nothing within {PROBE_S:g} s; {_ALLOW}"
        except subprocess.CalledProcessError as error:
            said = error.stderr.decode(errors="replace").strip() or f"exit status {error.returncode}"
            remedy = _INSTALL if "Unknown option" in said else _ALLOW
            return f"`bwrap` cannot make a sandbox here: {said}; {remedy}"
        return None

    def _shown(self) -> list[Path]:
        """The visible directories. Parents come first: `.venv`, a private name, is hidden and shown again."""
        python = (Path(sys.prefix), Path(sys.base_prefix))
        wanted = [path.absolute() for path in (*self.own, *self.packages, *python)]
        shown = {path for one in wanted if one.exists() for path in (one, one.resolve())}
        return sorted(shown - set(map(Path, SCRATCH)))

    def _private(self, place: Path) -> Iterator[Path]:
        """The hidden parts of a place: private names, `DEPTH` deep where users keep files, and other runs."""
        depth = DEPTH if place in {path for own in self.own for path in (own, own.resolve())} else 0
        hidden = {path.resolve() for path in self.hidden}
        for path, directories, files in os.walk(place):
            here, below = Path(path), len(Path(path).parts) - len(place.parts)
            if here.resolve() in hidden:  # `wrap` hides it
                directories.clear()
                continue
            if below and "run.key" in files:
                directories.clear()
                yield here
                continue
            entries = [here / name for name in (*directories, *files)]
            yield from (one for one in entries if _matches(one.name, _PRIVATE) and not one.is_symlink())
            directories[:] = [name for name in directories if below < depth and not _matches(name, _PRIVATE)]


def environment(*more: str) -> dict[str, str]:
    """Environment variables in the sandbox: those that Python needs, no secret, and `more` of ours."""
    kept = {name: value for name, value in os.environ.items() if _matches(name, (*_VARIABLES.split(), *more))}
    return kept | {"HOME": "/tmp", "TMPDIR": "/tmp"}


def limits() -> dict[str, int]:
    """Limits of processes in the sandbox, by the name after RLIMIT_."""
    kernel = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    return {name: value for name, value in LIMITS.items() if name != "NPROC" or kernel >= NPROC_KERNEL}


def _covered(path: Path, empty: list[str]) -> list[str]:
    """The words that put nothing in the place of `path`. A directory joins `empty`."""
    if not path.is_dir():
        return ["--ro-bind", os.devnull, str(path)]
    empty.append(str(path))
    return ["--tmpfs", str(path)]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, one) for one in patterns)
