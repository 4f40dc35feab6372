"""A seccomp filter against system calls that no program needs and that sandbox escapes have used.

A namespace limits what a process sees, but not which system calls it may make. The refused calls fail with
EPERM; a call in the numbering of another architecture (32 bit, x32) kills the process.
"""

import contextlib
import os
import platform
import struct
from collections.abc import Iterator

# Machine -> AUDIT_ARCH_*, index into the pairs of `REFUSED`.
_NUMBERS = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_NONE = -1
# Name -> its number on x86_64 and on aarch64.
REFUSED: dict[str, tuple[int, int]] = {
    "bpf": (321, 280), "userfaultfd": (323, 282), "perf_event_open": (298, 241), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "keyctl": (250, 219),
    "add_key": (248, 217), "request_key": (249, 218), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438), "kcmp": (312, 272),
    "process_madvise": (440, 440), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "unshare": (272, 97), "setns": (308, 268), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264), "fanotify_init": (300, 262), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225),
    "acct": (163, 89), "syslog": (103, 116), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "lookup_dcookie": (212, 18), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "adjtimex": (159, 171), "clock_adjtime": (305, 266), "iopl": (172, _NONE), "ioperm": (173, _NONE),
    "modify_ldt": (154, _NONE),
}  # fmt: skip
# Refused to programs of a model: calls that make memory which no limit counts, because it is part of no
# process and no file system, and calls that change how another process of the same user runs.
STRICT: dict[str, tuple[int, int]] = {
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190), "mq_open": (240, 180), "setpriority": (141, 140), "ioprio_set": (251, 30),
    "sched_setparam": (142, 118), "sched_setscheduler": (144, 119), "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
}  # fmt: skip
# Refused to them for another process than the caller itself, which is 0.
LIMITS_OF: tuple[int, int] = (302, 261)  # prlimit64

# BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_JMP|JGE|K, BPF_RET|K.
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
# SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO with EPERM, SECCOMP_RET_KILL_PROCESS.
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000 | 1, 0x80000000
# Offsets in struct seccomp_data.
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_X32 = 0x40000000


def is_known(machine: str = "") -> bool:
    """Whether there is a filter for this machine."""
    return (machine or platform.machine()) in _NUMBERS


def program(machine: str = "", *, strict: bool = False) -> bytes:
    """The filter as an array of struct sock_filter; with `strict`, that for programs of a model."""
    architecture, column = _NUMBERS[machine or platform.machine()]
    entries = [*REFUSED.values(), *(STRICT.values() if strict else ())]
    numbers = sorted(entry[column] for entry in entries if entry[column] != _NONE)
    count = len(numbers)
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
    ]
    lines += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]
    if strict:
        lines += [
            (_EQUAL, 0, 4, LIMITS_OF[column]),
            (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
            (_EQUAL, 0, 1, 0),
            (_RETURN, 0, 0, _ALLOW),
            (_RETURN, 0, 0, _REFUSE),
        ]
    lines += [(_EQUAL, count - index, 0, number) for index, number in enumerate(numbers)]
    lines += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


@contextlib.contextmanager
def open_program(*, strict: bool = False) -> Iterator[int]:
    """A descriptor from which `program` can be read once; children may inherit it. Raises OSError."""
    with os.fdopen(os.memfd_create("asyncrl-seccomp", os.MFD_CLOEXEC), "r+b", buffering=0) as file:
        file.write(program(strict=strict))
        file.seek(0)
        yield file.fileno()
