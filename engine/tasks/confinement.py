"""What Linux refuses to a process that runs a program of the model's: other processes, sockets, most files.

Three means, none of which needs root:

    seccomp     no process is begun, no socket is opened, no signal is sent to another process, no mode of a
                file is changed; threads are allowed, and all other system calls (linux/seccomp.h)
    Landlock    only Python's own files are read, and only the scratch directory is written to
                (linux/landlock.h)
    limits      of memory, processor time, files and descriptors (setrlimit)

They hold from before the program is loaded, and it cannot take them back. Root loses its powers, too.
Where the kernel lacks one of the first two, `missing` names what is open.

Nothing here loads torch or numpy (see processes.py).
"""

import ctypes
import errno
import os
import platform
import resource
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass

# prctl: options (linux/prctl.h), and the highest capability that a kernel may have.
_GET_SECCOMP, _SET_SECCOMP, _CAPBSET_DROP, _SET_NO_NEW_PRIVS, _HIGHEST_CAPABILITY = 21, 22, 24, 38, 63
_FILTER_MODE = 2
# Answers of a seccomp filter, and instructions of the classic BPF machine in which it is written.
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
# Places in what a filter is given (struct seccomp_data); the first argument by its low half.
_NUMBER, _ARCHITECTURE, _FIRST = 0, 4, 16
_CLONE_THREAD = 0x10000
# x86's third set of system calls, for 32-bit pointers, begins here.
_X32 = 0x40000000
# Landlock's system calls have the same numbers on all architectures.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ASK_VERSION, _RULE_PATH = 1, 1
# Its rights: bit 0 is execute, 2 read_file, 3 read_dir; the others change something. Version 2 added bit 13,
# version 3 bit 14.
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_RIGHTS_BITS = {1: 13, 2: 14}
_ALL_RIGHTS_BITS = 15
# What Python and the libraries below it read while they run.
_READ = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", "/dev/zero")


@dataclass(frozen=True)
class _Calls:
    """System calls of one architecture by number (asm/unistd.h), and the architecture's own (linux/audit.h).

    no_process: begin one. own: take a process as their first argument, which must be the caller.
    """

    architecture: int
    clone: int
    no_process: tuple[int, ...]
    own: tuple[int, ...]
    refused: tuple[int, ...]


_CLONE3 = 435
# pidfd_send_signal, io_uring_setup, pidfd_open, pidfd_getfd, fchmodat2.
_REFUSED_EVERYWHERE = (424, 425, 434, 438, 452)
_CALLS = {
    "x86_64": _Calls(
        architecture=0xC000003E,
        clone=56,
        no_process=(57, 58),  # fork, vfork
        own=(62, 200, 234, 129, 297, 302),  # kill, tkill, tgkill, rt_(tg)sigqueueinfo, prlimit64
        # socket, ptrace, process_vm_readv, process_vm_writev, chmod, fchmod, fchmodat
        refused=(41, 101, 310, 311, 90, 91, 268, *_REFUSED_EVERYWHERE),
    ),
    "aarch64": _Calls(
        architecture=0xC00000B7,
        clone=220,
        no_process=(),
        own=(129, 130, 131, 138, 240, 261),
        refused=(198, 117, 270, 271, 52, 53, *_REFUSED_EVERYWHERE),
    ),
}


@dataclass(frozen=True)
class ProcessLimits:
    """Of one program. processor_s: seconds of processor time. file_bytes: of each file that it writes."""

    processor_s: int
    memory_bytes: int
    file_bytes: int


def missing() -> list[str]:
    """What this machine's kernel cannot refuse to a program, in words; empty where it refuses everything.

    Raises ValueError where this system is not Linux.
    """
    if sys.platform != "linux":
        raise ValueError(f"a program is confined by Linux; this system is {sys.platform}")
    libc = ctypes.CDLL(None)
    no_calls, no_rules = _known_calls(libc) is None, _landlock_version(libc) < 1
    return [
        *(["other processes", "the network"] if no_calls else []),
        *(["files outside its directory"] if no_rules else []),
    ]


class Confinement:
    """Confines one process that is about to begin. scratch: the directory that it may write to."""

    def __init__(self, scratch: str, limits: ProcessLimits):
        self._limits = limits
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._calls = _known_calls(self._libc)
        self._rules = self._landlock(scratch)

    def close(self) -> None:
        """Close the descriptor of its rules."""
        if self._rules is not None:
            os.close(self._rules)

    def apply(self) -> None:
        """Confine this process for good. It is for a child that has forked, and calls exec next.

        Raises OSError where the kernel refuses what it has been asked to do.
        """
        limits = self._limits
        memory = limits.memory_bytes
        for kind, most in (
            (resource.RLIMIT_CPU, limits.processor_s + 1),
            (resource.RLIMIT_AS, memory),
            (resource.RLIMIT_FSIZE, limits.file_bytes),
            (resource.RLIMIT_NOFILE, 64),
            (resource.RLIMIT_CORE, 0),
        ):
            hard = resource.getrlimit(kind)[1]
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(kind, (most, most))
        # First SIGXCPU, which says why; a second later SIGKILL.
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (min(limits.processor_s, hard), hard))
        self._checked(self._libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        if os.geteuid() == 0:
            for capability in range(_HIGHEST_CAPABILITY + 1):
                self._libc.prctl(_CAPBSET_DROP, capability, 0, 0, 0)  # fails for those the kernel lacks
        if self._rules is not None:
            self._checked(self._libc.syscall(_RESTRICT_SELF, self._rules, 0))
        if self._calls is not None:
            program = b"".join(_filter(self._calls, os.getpid()))
            code = ctypes.create_string_buffer(program, len(program))
            header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
            self._checked(self._libc.prctl(_SET_SECCOMP, _FILTER_MODE, header, 0, 0))

    def _checked(self, result: int) -> int:
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return result

    def _landlock(self, scratch: str) -> int | None:
        """A descriptor of the rules about files; None where the kernel has no Landlock."""
        syscall = self._libc.syscall
        version = _landlock_version(self._libc)
        if version < 1:
            return None
        rights = (1 << _RIGHTS_BITS.get(version, _ALL_RIGHTS_BITS)) - 1
        handled = struct.pack("Q", rights & ~1)  # what may be read may be executed
        rules = self._checked(syscall(_CREATE_RULESET, handled, len(handled), 0))
        places = [*_READ, sys.base_prefix, sys.prefix, os.path.dirname(os.path.realpath(sys.executable))]
        self._allow(rules, scratch, rights & ~1)
        for place in filter(os.path.exists, dict.fromkeys(places)):
            self._allow(rules, place, _READ_FILE | (_READ_DIR if os.path.isdir(place) else 0))
        self._allow(rules, "/dev/null", _READ_FILE | 1 << 1)
        return rules

    def _allow(self, rules: int, place: str, rights: int) -> None:
        """Allow what `rights` names below a place."""
        directory = os.open(place, os.O_PATH | os.O_CLOEXEC)
        try:
            rule = struct.pack("=Qi", rights, directory)
            self._checked(self._libc.syscall(_ADD_RULE, rules, _RULE_PATH, rule, 0))
        finally:
            os.close(directory)


def _known_calls(libc: ctypes.CDLL) -> _Calls | None:
    """The system calls of this machine; None where they are not known, or cannot be filtered."""
    has_seccomp = sys.maxsize > 1 << 32 and libc.prctl(_GET_SECCOMP, 0, 0, 0, 0) >= 0
    return _CALLS.get(platform.machine()) if has_seccomp else None


def _landlock_version(libc: ctypes.CDLL) -> int:
    """The version of Landlock that this kernel has, from 1; -1 where it has none."""
    return libc.syscall(_CREATE_RULESET, None, 0, _ASK_VERSION)


def _filter(calls: _Calls, pid: int) -> Sequence[bytes]:
    """The filter of one process, as instructions of eight bytes: code, two jumps, a number."""

    def instruction(code: int, number: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, number)

    allow, kill = instruction(_RETURN, _ALLOW), instruction(_RETURN, _KILL)
    load_number = instruction(_LOAD, _NUMBER)

    def refuse(code: int) -> bytes:
        return instruction(_RETURN, _ERRNO | code)

    lines = [
        instruction(_LOAD, _ARCHITECTURE),
        instruction(_EQUAL, calls.architecture, if_true=1),
        kill,
        load_number,
        instruction(_AT_LEAST, _X32, if_false=1),
        kill,
    ]
    for number in calls.no_process:
        lines += [instruction(_EQUAL, number, if_false=1), refuse(errno.EAGAIN)]
    # A library that does not find clone3 calls clone, whose first argument says whether it begins a thread.
    lines += [instruction(_EQUAL, _CLONE3, if_false=1), refuse(errno.ENOSYS)]
    lines += [
        instruction(_EQUAL, calls.clone, if_false=4),
        instruction(_LOAD, _FIRST),
        instruction(_ANY_BIT, _CLONE_THREAD, if_true=1),
        refuse(errno.EAGAIN),
        allow,
    ]
    for number in calls.refused:
        lines += [instruction(_EQUAL, number, if_false=1), refuse(errno.EPERM)]
    for number in calls.own:
        lines += [
            instruction(_EQUAL, number, if_false=5),
            instruction(_LOAD, _FIRST),
            instruction(_EQUAL, pid, if_true=2),
            instruction(_EQUAL, 0, if_true=1),
            refuse(errno.EPERM),
            allow,
        ]
    return [*lines, allow]
