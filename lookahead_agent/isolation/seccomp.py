"""The system calls that isolated code may not make, as a filter for Linux's seccomp.

Classic BPF over `struct seccomp_data`, see seccomp(2). What is refused is named here; a call that is newer than this
list does not exist for the code (ENOSYS), nor does any of another architecture's (the process is killed).
"""

from __future__ import annotations

import errno
import platform
import struct
from dataclasses import dataclass

_LOAD, _EQUAL, _AT_LEAST, _ABOVE, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x25, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_CLONE_THREAD = 0x00010000
_AF_UNIX = 1
_PR_SET_PDEATHSIG = 1
_AT_FDCWD = 0xFFFFFF9C
_X32 = 0x40000000
_CLONE3 = 435
_NEWEST = 456  # futex_requeue, Linux 6.7

# Programs, processes and other processes; networks; namespaces and mounts; the kernel; memory that no limit counts.
# Calls since Linux 5.1 have the same number on every architecture.
_NEVER_ANYWHERE = {
    "pidfd_send_signal": 424, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_open": 434,
    "pidfd_getfd": 438, "process_madvise": 440, "mount_setattr": 442, "quotactl_fd": 443, "memfd_secret": 447,
    "process_mrelease": 448,
}  # fmt: skip
_NEVER = {
    "x86_64": {
        "fork": 57, "vfork": 58, "execve": 59, "execveat": 322,
        "setsid": 112, "setpgid": 109, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312,


        "socket": 41, "connect": 42, "accept": 43, "bind": 49, "listen": 50, "accept4": 288,
        "shmget": 29, "shmat": 30, "shmctl": 31, "shmdt": 67, "semget": 64, "semop": 65, "semctl": 66,
        "semtimedop": 220,
        "msgget": 68, "msgsnd": 69, "msgrcv": 70, "msgctl": 71, "mq_open": 240, "mq_unlink": 241,
        "unshare": 272, "setns": 308, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161,

        "bpf": 321, "perf_event_open": 298, "userfaultfd": 323,
        "io_setup": 206, "add_key": 248, "request_key": 249, "keyctl": 250,
        "init_module": 175, "finit_module": 313, "delete_module": 176, "kexec_load": 246, "kexec_file_load": 320,
        "reboot": 169, "swapon": 167, "swapoff": 168, "sethostname": 170, "setdomainname": 171, "settimeofday": 164,
        "adjtimex": 159, "clock_settime": 227, "clock_adjtime": 305, "acct": 163, "quotactl": 179,
        "syslog": 103, "iopl": 172, "ioperm": 173, "personality": 135, "modify_ldt": 154, "uselib": 134,
        "name_to_handle_at": 303, "open_by_handle_at": 304, "fanotify_init": 300, "fanotify_mark": 301,
        "memfd_create": 319, "migrate_pages": 256, "move_pages": 279, "lookup_dcookie": 212,
    },
    "aarch64": {
        "execve": 221, "execveat": 281,
        "setsid": 157, "setpgid": 154, "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272,


        "socket": 198, "connect": 203, "accept": 202, "bind": 200, "listen": 201, "accept4": 242,
        "shmget": 194, "shmat": 196, "shmctl": 195, "shmdt": 197, "semget": 190, "semop": 193, "semctl": 191,
        "semtimedop": 192, "msgget": 186, "msgsnd": 189, "msgrcv": 188, "msgctl": 187, "mq_open": 180, "mq_unlink": 181,
        "unshare": 97, "setns": 268, "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51,

        "bpf": 280, "perf_event_open": 241, "userfaultfd": 282,
        "io_setup": 0, "add_key": 217, "request_key": 218, "keyctl": 219,
        "init_module": 105, "finit_module": 273, "delete_module": 106, "kexec_load": 104, "kexec_file_load": 294,
        "reboot": 142, "swapon": 224, "swapoff": 225, "sethostname": 161, "setdomainname": 162, "settimeofday": 170,
        "adjtimex": 171, "clock_settime": 112, "clock_adjtime": 266, "acct": 89, "quotactl": 60,
        "syslog": 116, "personality": 92,
        "name_to_handle_at": 264, "open_by_handle_at": 265, "fanotify_init": 262, "fanotify_mark": 263,
        "memfd_create": 279, "migrate_pages": 238, "move_pages": 239, "lookup_dcookie": 18,
    },
}  # fmt: skip

# What Landlock leaves open: other processes of the user, and the owners, modes and times of the user's files. And what
# would make its folder, which is on disk, deeper than can be looked at.
_NEVER_IN_LANDLOCK_ANYWHERE = {"fchmodat2": 452}
_NEVER_IN_LANDLOCK = {
    "x86_64": {
        "kill": 62, "tkill": 200, "tgkill": 234, "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297,
        "chmod": 90, "fchmod": 91, "fchmodat": 268, "chown": 92, "fchown": 93, "lchown": 94,
        "fchownat": 260, "utime": 132, "utimes": 235, "futimesat": 261, "utimensat": 280, "setxattr": 188,
        "lsetxattr": 189, "fsetxattr": 190, "removexattr": 197, "lremovexattr": 198, "fremovexattr": 199,
        "inotify_init": 253, "inotify_init1": 294, "inotify_add_watch": 254, "setpriority": 141, "ioprio_set": 251,
        "sched_setaffinity": 203, "sched_setparam": 142, "sched_setscheduler": 144, "sched_setattr": 314, "mknod": 133,
        "mknodat": 259, "flock": 73, "chdir": 80, "fchdir": 81,
    },
    "aarch64": {
        "kill": 129, "tkill": 130, "tgkill": 131, "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240,
        "fchmod": 52, "fchmodat": 53, "fchownat": 54, "fchown": 55, "utimensat": 88, "setxattr": 5,
        "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14, "lremovexattr": 15, "fremovexattr": 16, "inotify_init1": 26,
        "inotify_add_watch": 27, "setpriority": 140, "ioprio_set": 30, "sched_setaffinity": 122, "sched_setparam": 118,
        "sched_setscheduler": 119, "sched_setattr": 274, "mknodat": 33, "flock": 32,
        "chdir": 49, "fchdir": 50,
    },
}  # fmt: skip


@dataclass(frozen=True)
class _Numbers:
    """Of an architecture: its identity in seccomp, and the calls whose arguments decide."""

    audit: int
    clone: int
    socketpair: int
    prctl: int
    prlimit64: int
    mkdirat: int


_ARCHITECTURES = {
    "x86_64": _Numbers(0xC000003E, clone=56, socketpair=53, prctl=157, prlimit64=302, mkdirat=258),
    "aarch64": _Numbers(0xC00000B7, clone=220, socketpair=199, prctl=167, prlimit64=261, mkdirat=34),
}


def system_call_filter(*, landlock: bool, machine: str | None = None) -> bytes | None:
    """The program of a filter: 8 bytes an instruction.

    Args:
        landlock: Whether Landlock is all that is between the code and the user's files and processes.
        machine: The architecture; this machine's by default.

    Returns:
        None for an architecture whose calls are not known here.
    """
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        return None
    numbers = _ARCHITECTURES[machine]
    never = _NEVER_ANYWHERE | _NEVER[machine]
    if landlock:
        never |= _NEVER_IN_LANDLOCK_ANYWHERE | _NEVER_IN_LANDLOCK[machine]
    refuse = _ERRNO | errno.EPERM
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, numbers.audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
        # glibc then takes clone, whose flags a filter can read.
        *_when(_CLONE3, [(_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]),
        (_ABOVE, 0, 1, _NEWEST),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
        # Threads, but no processes.
        *_when(numbers.clone, _argument(0, _ANY_BIT, _CLONE_THREAD, refuse)),
        # Event loops wake themselves with a pair; it leads nowhere else.
        *_when(numbers.socketpair, _argument(0, _EQUAL, _AF_UNIX, refuse)),
        # Its parent's death stays its own.
        *_when(numbers.prctl, _argument(0, _EQUAL, _PR_SET_PDEATHSIG, _ALLOW, otherwise=refuse)),
        # Folders by their names from the own folder only: so none is deeper than a name is long.
        *(_when(numbers.mkdirat, _argument(0, _EQUAL, _AT_FDCWD, refuse)) if landlock else ()),
        # Limits of its own only.
        *_when(numbers.prlimit64, _argument(0, _EQUAL, 0, refuse)),
        *(line for number in never.values() for line in _when(number, [(_RETURN, 0, 0, refuse)])),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("<HBBI", *line) for line in program)


_Line = tuple[int, int, int, int]


def _when(number: int, lines: list[_Line]) -> list[_Line]:
    """Lines that end in a verdict, for one call."""
    return [(_EQUAL, 0, len(lines), number), *lines]


def _argument(index: int, test: int, value: int, refused: int, otherwise: int = _ALLOW) -> list[_Line]:
    """`otherwise` where the low half of an argument passes a test, else `refused`.

    The kernel reads these arguments as 32 bits itself, or their high half is none of what is tested.
    """
    return [
        (_LOAD, 0, 0, _ARGUMENTS + 8 * index),
        (test, 1, 0, value),
        (_RETURN, 0, 0, refused),
        (_RETURN, 0, 0, otherwise),
    ]
