"""The system calls that a program of the model's may make: a filter of seccomp, which refuses all others.

A call that is not in the table fails with EPERM. One that Linux has since version 5.3 fails with ENOSYS: its
callers know an older way, as libraries of C have one for clone3.

Nothing here loads torch or numpy (see processes/process.py).
"""

import errno
import struct
from collections.abc import Sequence
from dataclasses import dataclass

# name, its number on x86-64, and its number on ARM64 and all later architectures (asm/unistd.h).
_TABLE = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69,
pwritev 296 70, preadv2 327 286, pwritev2 328 287, lseek 8 62, close 3 57, close_range 436 436, open 2 -,
openat 257 56, creat 85 -, dup 32 23, dup2 33 -, dup3 292 24, fcntl 72 25, ioctl 16 29, pipe 22 -,
pipe2 293 59, ftruncate 77 46, fallocate 285 47, fsync 74 82, fdatasync 75 83, fadvise64 221 223,
sendfile 40 71, copy_file_range 326 285, stat 4 -, lstat 6 -, fstat 5 80, newfstatat 262 79, statx 332 291,
statfs 137 43, fstatfs 138 44, access 21 -, faccessat 269 48, faccessat2 439 439, readlink 89 -,
readlinkat 267 78, getcwd 79 17, chdir 80 49, fchdir 81 50, getdents64 217 61, umask 95 166, mkdir 83 -,
mkdirat 258 34, rmdir 84 -, unlink 87 -, unlinkat 263 35, rename 82 -, renameat 264 38, renameat2 316 276,
link 86 -, linkat 265 37, symlink 88 -, symlinkat 266 36, brk 12 214, mmap 9 222, munmap 11 215,
mprotect 10 226, mremap 25 216, madvise 28 233, msync 26 227, clone 56 220, futex 202 98,
set_robust_list 273 99, set_tid_address 218 96, rseq 334 293, sched_yield 24 124, sched_getaffinity 204 123,
sched_getparam 143 121, sched_getscheduler 145 120, restart_syscall 219 128, sched_get_priority_max 146 125,
sched_get_priority_min 147 126, poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, epoll_create 213 -,
epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, epoll_pwait2 441 441,
eventfd 284 -, eventfd2 290 19, socketpair 53 199, sendto 44 206, recvfrom 45 207, shutdown 48 210,
nanosleep 35 101, clock_nanosleep 230 115, pause 34 -, alarm 37 -, getitimer 36 102, setitimer 38 103,
clock_gettime 228 113, clock_getres 229 114, gettimeofday 96 169, time 201 -, times 100 153,
getrusage 98 165, sysinfo 99 179, uname 63 160, getrandom 318 278, getcpu 309 168, rt_sigaction 13 134,
rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigtimedwait 128 137,
rt_sigsuspend 130 133, sigaltstack 131 132, kill 62 129, tkill 200 130, tgkill 234 131,
rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, exit 60 93, exit_group 231 94, execve 59 221,
arch_prctl 158 -, prctl 157 167, wait4 61 260, waitid 247 95, getpid 39 172, getppid 110 173, gettid 186 178,
getpgrp 111 -, getpgid 121 155, getsid 124 156, getuid 102 174, geteuid 107 175, getgid 104 176,
getegid 108 177, getresuid 118 148, getresgid 120 150, getgroups 115 158, getrlimit 97 163,
setrlimit 160 164, prlimit64 302 261, getpriority 140 141
"""
# machine: the column of the table, and the architecture's number (linux/audit.h).
_MACHINES = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}
# The first call of Linux 5.3, and the first of x86's third set of calls, for 32-bit pointers.
_NEW, _X32 = 435, 0x40000000

# Answers of a filter, and instructions of the classic BPF machine in which it is written.
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _AND, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
# Places in what a filter is given (struct seccomp_data).
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16

# The address of the path with which `execve` is allowed: a page that this process maps before it calls it. It
# goes with the process's memory, and no program can map it again: the rules of mmap, mremap and arch_prctl
# refuse all addresses below _LOWEST, the kernel chooses none there, and no area of memory may grow down.
# So one program is begun, and no other.
PATH_ADDRESS = 1 << 20
_LOWEST = 1 << 22
_FIXED, _GROWS_DOWN = 0x10 | 0x100000, 0x100  # flags of mmap
_TAKES_ADDRESS = 2 | 4  # flags of mremap; MREMAP_DONTUNMAP takes the address as a wish


@dataclass(frozen=True)
class _Where:
    """A condition: that an argument's low half (or its high one), masked, is one of the values.

    Without values: that any bit of the mask is set.
    """

    argument: int
    values: tuple[int, ...] = ()
    mask: int = 0xFFFFFFFF
    high: bool = False

    def instructions(self, to_next_rule: int) -> list[bytes]:
        """to_next_rule: how many instructions to jump over where the condition does not hold."""
        load = _instruction(_LOAD, _ARGUMENTS + 8 * self.argument + 4 * self.high)
        if not self.values:
            return [load, _instruction(_ANY_BIT, self.mask, if_false=to_next_rule)]
        last = len(self.values) - 1
        tests = [
            _instruction(_EQUAL, value, last - i, 0 if i < last else to_next_rule)
            for i, value in enumerate(self.values)
        ]
        return [load, _instruction(_AND, self.mask), *tests]


# A rule is all of its conditions. A call that has rules is allowed where one of them holds.
_Rules = list[tuple[_Where, ...]]


def _rules(pid: int) -> dict[str, _Rules]:
    """The rules of the process `pid`, by the names of calls. All others of the table are allowed."""
    itself: _Rules = [(_Where(0, (pid, 0)),)]
    # O_RDONLY, O_WRONLY, O_RDWR, and the last two with O_TRUNC. To open a file for reading and make it empty
    # is something that Landlock takes for reading before Linux 6.2.
    flags = (0, 1, 2, 0x201, 0x202)
    falls = _Where(3, (0,), _GROWS_DOWN)
    return {
        **dict.fromkeys(
            ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "prlimit64"), itself
        ),
        "open": [(_Where(1, flags, 0x203),)],
        "openat": [(_Where(2, flags, 0x203),)],
        # Threads, as glibc and musl begin them: CLONE_THREAD, and no bit beyond theirs.
        "clone": [(_Where(0, (0x10000,), 0xFFFFFFFF ^ 0x7C0F00),)],
        "execve": [(_Where(0, (PATH_ADDRESS,)), _Where(0, (0,), high=True))],
        # At an address of 4 GiB or more; at one of _LOWEST or more; or wherever the kernel likes.
        "mmap": [
            (falls, _Where(0, high=True)),
            (falls, _Where(0, mask=0xFFFFFFFF ^ (_LOWEST - 1))),
            (falls, _Where(0, (0,)), _Where(3, (0,), _FIXED)),
        ],
        "mremap": [(_Where(3, (0,), _TAKES_ADDRESS),)],
        "arch_prctl": [(_Where(0, (0x1002, 0x1003)),)],  # ARCH_SET_FS, ARCH_GET_FS
        "prctl": [(_Where(0, (15, 16)),)],  # PR_SET_NAME, PR_GET_NAME
        # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC, F_GETPIPE_SZ. Owners of a descriptor
        # are sent signals, and locks are seen by other programs.
        "fcntl": [(_Where(1, (0, 1, 2, 3, 4, 1030, 1032)),)],
        # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
        "ioctl": [(_Where(1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),)],
        # AF_UNIX, SOCK_STREAM: connected for good. Other pairs send to any address.
        "socketpair": [(_Where(0, (1,)), _Where(1, (1,), 0xF))],
    }


def is_known(machine: str) -> bool:
    """Whether the calls of a machine (platform.machine()) are known."""
    return machine in _MACHINES


def call_filter(machine: str, pid: int) -> bytes:
    """The filter of the process `pid`, as instructions of eight bytes: code, two jumps, a number."""
    rules = _rules(pid)
    allow, kill = _instruction(_RETURN, _ALLOW), _instruction(_RETURN, _KILL)
    refuse = _instruction(_RETURN, _ERRNO | errno.EPERM)
    lines = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_EQUAL, _MACHINES[machine][1], if_true=1),
        kill,
        _instruction(_LOAD, _NUMBER),
        _instruction(_AT_LEAST, _X32, if_false=1),
        kill,
    ]
    for name, number in allowed_calls(machine).items():
        body: list[bytes] = []
        for conditions in reversed(rules.get(name, [])):
            rule = [allow]
            for condition in reversed(conditions):
                rule = [*condition.instructions(len(rule)), *rule]
            body = [*rule, *body]
        body = [*body, refuse] if body else [allow]
        lines += [_instruction(_EQUAL, number, if_false=len(body)), *body]
    lines += [_instruction(_AT_LEAST, _NEW, if_false=1), _instruction(_RETURN, _ERRNO | errno.ENOSYS), refuse]
    return b"".join(lines)


def allowed_calls(machine: str) -> dict[str, int]:
    """The calls of the table by name, with their numbers on a machine; without those that it lacks."""
    column = _MACHINES[machine][0]
    rows: Sequence[list[str]] = [row.split() for row in _TABLE.split(",")]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


def _instruction(code: int, number: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, number)
