"""The system calls that sandboxed code may make, as a filter for Linux's seccomp.

Classic BPF over `struct seccomp_data`, see seccomp(2). A call that is not listed fails with EPERM. A call that is newer
than this list fails with ENOSYS, and a call of another architecture kills the process.

Calls are left out that reach other programs, processes and networks, or change the machine. So are calls that slow down
or spy on other users of the same files (leases, locks, watches, dropped caches). The list also lacks calls that hold
uncounted memory (`splice`, `vmsplice`, `memfd_create`, `sendmsg`, `mmap` of shared memory without a file).
"""

import errno
import platform
import struct

_Instruction = tuple[int, int, int, int]

_LOAD, _EQUAL, _AT_LEAST, _ABOVE, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x25, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_KILL, _ERRNO = 0x80000000, 0x00050000
_ALLOWED: _Instruction = (_RETURN, 0, 0, 0x7FFF0000)
_REFUSED: _Instruction = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
_UNKNOWN: _Instruction = (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)
_NO_OP: _Instruction = (_RETURN, 0, 0, _ERRNO | 0)  # The call returns 0 without being made
_NO_TERMINAL: _Instruction = (_RETURN, 0, 0, _ERRNO | errno.ENOTTY)

_X32 = 0x40000000
_NEWEST = 456  # futex_requeue, Linux 6.7
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""By architecture: its column in the tables below, and its identifier in seccomp."""

# Numbers on x86_64 and on aarch64; None: the architecture lacks the call.
_CALLS: dict[str, tuple[int | None, int | None]] = {
    # Memory; `mmap` and `madvise` are below.
    "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "mremap": (25, 216), "msync": (26, 227),
    # Reading, and writing to what is open.
    "read": (0, 63), "write": (1, 64), "open": (2, None), "close": (3, 57), "openat": (257, 56),
    "creat": (85, None), "close_range": (436, 436), "stat": (4, None), "fstat": (5, 80), "lstat": (6, None),
    "newfstatat": (262, 79), "statx": (332, 291), "lseek": (8, 62), "pread64": (17, 67), "pwrite64": (18, 68),
    "readv": (19, 65), "writev": (20, 66), "preadv": (295, 69), "pwritev": (296, 70), "preadv2": (327, 286),
    "pwritev2": (328, 287), "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439),
    "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "pipe": (22, None), "pipe2": (293, 59),
    "getdents": (78, None), "getdents64": (217, 61), "getcwd": (79, 17), "statfs": (137, 43), "fstatfs": (138, 44),
    # Poll, events and timers.
    "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "epoll_create": (213, None),
    "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22),
    "epoll_pwait2": (441, 441), "eventfd": (284, None), "eventfd2": (290, 19), "signalfd": (282, None),
    "signalfd4": (289, 74), "timerfd_create": (283, 85), "timerfd_settime": (286, 86), "timerfd_gettime": (287, 87),
    # Time.
    "pause": (34, None), "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "clock_gettime": (228, 113),
    "clock_getres": (229, 114), "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153),
    "getitimer": (36, 102), "setitimer": (38, 103), "alarm": (37, None), "timer_create": (222, 107),
    "timer_settime": (223, 110), "timer_gettime": (224, 108), "timer_getoverrun": (225, 109),
    "timer_delete": (226, 111),
    # Signal handlers, threads, and exit.
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132),
    "restart_syscall": (219, 128), "futex": (202, 98), "futex_waitv": (449, 449), "set_tid_address": (218, 96),
    "set_robust_list": (273, 99), "rseq": (334, 293), "sched_yield": (24, 124), "exit": (60, 93),
    "exit_group": (231, 94), "wait4": (61, 260), "waitid": (247, 95),
    # Queries about the process and the machine.
    "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178), "getuid": (102, 174), "geteuid": (107, 175),
    "getgid": (104, 176), "getegid": (108, 177), "getgroups": (115, 158), "getresuid": (118, 148),
    "getresgid": (120, 150), "getpgid": (121, 155), "getpgrp": (111, None), "getsid": (124, 156),
    "capget": (125, 90), "uname": (63, 160), "sysinfo": (99, 179), "getrlimit": (97, 163), "setrlimit": (160, 164),
    "getrusage": (98, 165), "getrandom": (318, 278), "getcpu": (309, 168), "sched_getaffinity": (204, 123),
    "sched_getparam": (143, 121), "sched_getscheduler": (145, 120), "sched_get_priority_max": (146, 125),
    "sched_get_priority_min": (147, 126), "sched_rr_get_interval": (148, 127), "getpriority": (140, 141),
    # Socket pairs; `socketpair`, `sendto` and `recvfrom` are below.
    "shutdown": (48, 210), "getsockname": (51, 204), "getpeername": (52, 205), "getsockopt": (55, 209),
}  # fmt: skip

# Calls that change or inspect files without opening them, and that signal processes. They are allowed where the
# code has a filesystem and process numbers of its own.
_NAMESPACE_CALLS: dict[str, tuple[int | None, int | None]] = {
    "readlink": (89, None), "readlinkat": (267, 78), "getxattr": (191, 8), "lgetxattr": (192, 9),
    "fgetxattr": (193, 10), "listxattr": (194, 11), "llistxattr": (195, 12), "flistxattr": (196, 13),
    "fsync": (74, 82), "fdatasync": (75, 83), "truncate": (76, 45), "ftruncate": (77, 46), "fallocate": (285, 47),
    "copy_file_range": (326, 285), "chdir": (80, 49), "fchdir": (81, 50), "rename": (82, None),
    "renameat": (264, 38), "renameat2": (316, 276), "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None),
    "link": (86, None), "linkat": (265, 37), "unlink": (87, None), "unlinkat": (263, 35), "symlink": (88, None),
    "symlinkat": (266, 36), "mknod": (133, None), "mknodat": (259, 33), "umask": (95, 166), "chmod": (90, None),
    "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131),
}  # fmt: skip


def _load_argument(argument: int) -> _Instruction:
    """Load the low half of an argument: the kernel reads 32 bits itself, or no tested bit is in the high half."""
    return (_LOAD, 0, 0, _ARGUMENTS + 8 * argument)


def _refuse_bits(argument: int, bits: int, verdict: _Instruction = _REFUSED) -> list[_Instruction]:
    """Return the verdict if one of these bits is set; else go on."""
    return [_load_argument(argument), (_ANY_BIT, 0, 1, bits), verdict]


def _allow_values(argument: int, values: tuple[int, ...], otherwise: _Instruction = _REFUSED) -> list[_Instruction]:
    """Allow the call if the argument is one of these values."""
    return [
        _load_argument(argument),
        *(line for value in values for line in ((_EQUAL, 0, 1, value), _ALLOWED)),
        otherwise,
    ]


_STREAM, _NONBLOCK, _CLOEXEC = 1, 0o4000, 0o2000000
_MAP_SHARED, _MAP_ANONYMOUS, _MAP_HUGETLB = 1, 0x20, 0x40000
_CLONE_THREAD, _THREAD_FLAGS = 0x10000, 0x7D0F00  # flags with which glibc and musl start a thread
_MSG_OOB, _MSG_DONTWAIT, _MSG_NOSIGNAL = 1, 0x40, 0x4000
_EVERY_BIT = 0xFFFFFFFF

# Calls that are allowed by their arguments, by number on x86_64 and on aarch64.
_CALLS_BY_ARGUMENT: dict[tuple[int, int], list[_Instruction]] = {
    # Threads, but no processes.
    (56, 220): [*_refuse_bits(0, _EVERY_BIT ^ _THREAD_FLAGS), (_ANY_BIT, 1, 0, _CLONE_THREAD), _REFUSED, _ALLOWED],
    # glibc falls back to clone, whose flags a filter can read.
    (435, 435): [_UNKNOWN],
    # Anonymous shared memory stays whole for one mapped page of it, and only that page counts. Huge pages belong to the
    # machine.
    (9, 222): [
        *_refuse_bits(3, _MAP_HUGETLB), (_ANY_BIT, 1, 0, _MAP_ANONYMOUS), _ALLOWED,
        (_ANY_BIT, 0, 1, _MAP_SHARED), _REFUSED, _ALLOWED,
    ],
    # No advice that merges pages with other processes' or drops pages of files from memory.
    (28, 233): _allow_values(2, (0, 1, 2, 3, 4, 8, 10, 11, 14, 15, 16, 17)),
    # Event loops wake themselves with a pair of streams (AF_UNIX), which reaches no other process.
    (53, 199): [
        *_refuse_bits(1, _EVERY_BIT ^ (_STREAM | _NONBLOCK | _CLOEXEC)), (_ANY_BIT, 1, 0, _STREAM), _REFUSED,
        *_allow_values(0, (1,)),
    ],
    # No destination address, in either half of the pointer.
    (44, 206): [
        *_refuse_bits(3, _EVERY_BIT ^ (_MSG_DONTWAIT | _MSG_NOSIGNAL)), *_refuse_bits(4, _EVERY_BIT),
        (_LOAD, 0, 0, _ARGUMENTS + 8 * 4 + 4), (_EQUAL, 1, 0, 0), _REFUSED, _ALLOWED,
    ],
    (45, 207): [*_refuse_bits(3, _MSG_OOB), _ALLOWED],
    # F_SETLK, F_SETLKW: such a lock never blocks its own process, so it is not needed. A real one would block
    # others who lock the same library. Then F_DUPFD to F_GETLK, F_DUPFD_QUERY, F_DUPFD_CLOEXEC and F_GETPIPE_SZ: no
    # leases, no watches, no signals, no larger pipes.
    (72, 25): [
        _load_argument(1), (_EQUAL, 1, 0, 6), (_EQUAL, 0, 1, 7), _NO_OP,
        *_allow_values(1, (0, 1, 2, 3, 4, 5, 1027, 1030, 1032)),
    ],
    # FIOCLEX, FIONCLEX, FIONBIO, FIONREAD, and the requests of `isatty`: TCGETS, TCGETS2, TIOCGWINSZ.
    (16, 29): _allow_values(1, (0x5451, 0x5450, 0x5421, 0x541B, 0x5401, 0x802C542A, 0x5413), _NO_TERMINAL),
    # PR_SET_NAME, PR_GET_NAME.
    (157, 167): _allow_values(0, (15, 16)),
    # `prlimit64` on its own process only.
    (302, 261): _allow_values(0, (0,)),
}  # fmt: skip


def system_call_filter(*, landlock: bool, machine: str | None = None) -> bytes | None:
    """Return the filter's BPF program, 8 bytes per instruction; None if the architecture's calls are not known here."""
    # With `landlock`, no namespace separates the code from the user's files and processes.
    machine = machine or platform.machine()
    if machine not in _MACHINES:
        return None
    column, identity = _MACHINES[machine]
    calls = _CALLS if landlock else _CALLS | _NAMESPACE_CALLS
    killed = (_RETURN, 0, 0, _KILL)
    program = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, identity), killed]
    program += [(_LOAD, 0, 0, _NUMBER), (_AT_LEAST, 0, 1, _X32), killed, (_ABOVE, 0, 1, _NEWEST), _UNKNOWN]
    for numbers in calls.values():
        if (number := numbers[column]) is not None:
            program += [(_EQUAL, 0, 1, number), _ALLOWED]
    for numbers_of, lines in _CALLS_BY_ARGUMENT.items():
        program += [(_EQUAL, 0, len(lines), numbers_of[column]), *lines]
    program.append(_REFUSED)
    return b"".join(struct.pack("<HBBI", *line) for line in program)
