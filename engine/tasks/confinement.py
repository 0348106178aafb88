"""What Linux refuses to a program of the model's: other processes, sockets, files outside its directory.

Four means, none of which needs root:

    seccomp      a list of system calls, and no others; no other process, program, socket, signal to another
                 process or memory that outlives the program (system_calls.py)
    Landlock     only Python's own files are read, and only the scratch directory is written to
                 (linux/landlock.h)
    namespaces   other files have no name, where the kernel allows namespaces to users (private_root.py)
    limits       of memory, processor time, files and descriptors (setrlimit)

They hold from before the program is loaded, and it cannot take them back. Root loses its powers, too.
Where the kernel lacks one of the first three, `missing` names what is open.

Nothing here loads torch or numpy (see processes/process.py).
"""

import ctypes
import os
import platform
import resource
import struct
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

from ..processes.keeper import die_with_parent
from .private_root import enter_private_root, is_allowed
from .system_calls import PATH_ADDRESS, call_filter, is_known

# prctl: options (linux/prctl.h), and the highest capability that a kernel may have.
_GET_SECCOMP, _SET_SECCOMP, _CAPBSET_DROP, _SET_NO_NEW_PRIVS, _HIGHEST_CAPABILITY = 21, 22, 24, 38, 63
_FILTER_MODE = 2
# Landlock's system calls have the same numbers on all architectures.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ASK_VERSION, _RULE_PATH = 1, 1
# Its rights: bit 0 is execute, 2 read_file, 3 read_dir; the others change something. Version 2 added bit 13,
# version 3 bit 14.
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_RIGHTS_BITS = {1: 13, 2: 14}
_ALL_RIGHTS_BITS = 15
# mmap: PROT_READ and PROT_WRITE; MAP_PRIVATE, MAP_ANONYMOUS and MAP_FIXED.
_READ_WRITE, _NEW_PAGE = 1 | 2, 2 | 0x20 | 0x10
# What Python and the libraries below it read while they run, beside its own folder of libraries.
_READ = (
    *("/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64", "/usr/share/zoneinfo"),
    *("/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", "/dev/zero"),
)
_WRITE = "/dev/null"
# The interpreter that made this environment of packages, and is none of its files.
PYTHON = os.path.realpath(sys._base_executable)


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
    all_calls, no_root = not _filters_calls(libc), not is_allowed(_readable())
    no_rules = no_root and _landlock_version(libc) < 1
    return [
        *(["other processes and programs", "the network", "shared memory"] if all_calls else []),
        *(["files outside its directory"] if no_rules else []),
        *(["names and sizes of other files"] if no_root else []),
    ]


class Confinement:
    """Confines one process that is about to begin, and begins it.

    scratch: the directory that it may write to. words, variables: of the program, with its path as words[0].
    """

    def __init__(
        self, scratch: str, limits: ProcessLimits, words: Sequence[str], variables: Mapping[str, str]
    ):
        self._scratch, self._limits = scratch, limits
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._has_root = is_allowed(_readable())
        self._rules = self._landlock()
        self._path = os.fsencode(words[0]) + b"\0"
        self._words = _texts(words)
        self._variables = _texts([f"{name}={value}" for name, value in variables.items()])

    def close(self) -> None:
        """Close the descriptor of its rules."""
        if self._rules is not None:
            os.close(self._rules)

    def begin(self) -> None:
        """Confine this process for good, and become the program.

        It is for a child that has forked, and stands in `scratch`. Raises OSError where the kernel refuses
        what it has been asked to do.
        """
        die_with_parent()
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # the list itself is closed again
                os.set_inheritable(int(name), int(name) <= 2)
        if self._has_root:
            enter_private_root(self._scratch, _readable())
        self._checked(self._libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        if os.geteuid() == 0:
            for capability in range(_HIGHEST_CAPABILITY + 1):
                self._libc.prctl(_CAPBSET_DROP, capability, 0, 0, 0)  # fails for those the kernel lacks
        if self._rules is not None:
            self._checked(self._libc.syscall(_RESTRICT_SELF, self._rules, 0))
        path, filters = self._mapped_path(), _filters_calls(self._libc)
        code = call_filter(platform.machine(), os.getpid()) if filters else b""
        code_copy = ctypes.create_string_buffer(code, len(code))
        header = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(code_copy))
        self._limit()  # this process may have more memory already, so from here on it asks for none
        if filters:
            self._checked(self._libc.prctl(_SET_SECCOMP, _FILTER_MODE, header, 0, 0))
        self._checked(self._libc.execve(path, self._words, self._variables))

    def _mapped_path(self) -> ctypes.c_void_p:
        """The path of the program, at the one address at which seccomp lets it be executed."""
        address, size = ctypes.c_void_p(PATH_ADDRESS), ctypes.c_size_t(len(self._path))
        page = self._libc.mmap(address, size, _READ_WRITE, _NEW_PAGE, -1, ctypes.c_long(0))
        self._checked(0 if page == PATH_ADDRESS else -1)
        ctypes.memmove(PATH_ADDRESS, self._path, len(self._path))
        return address

    def _limit(self) -> None:
        limits = self._limits
        for kind, most in (
            (resource.RLIMIT_CPU, limits.processor_s + 1),
            (resource.RLIMIT_AS, limits.memory_bytes),
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

    def _checked(self, result: int) -> int:
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return result

    def _landlock(self) -> int | None:
        """A descriptor of the rules about files; None where the kernel has no Landlock."""
        syscall = self._libc.syscall
        version = _landlock_version(self._libc)
        if version < 1:
            return None
        rights = (1 << _RIGHTS_BITS.get(version, _ALL_RIGHTS_BITS)) - 1
        handled = struct.pack("Q", rights & ~1)  # seccomp refuses to execute
        rules = self._checked(syscall(_CREATE_RULESET, handled, len(handled), 0))
        self._allow(rules, self._scratch, rights & ~1)
        for place in _readable():
            writes = 1 << 1 if place == _WRITE else 0
            self._allow(rules, place, _READ_FILE | (_READ_DIR if os.path.isdir(place) else 0) | writes)
        return rules

    def _allow(self, rules: int, place: str, rights: int) -> None:
        """Allow what `rights` names below a place."""
        directory = os.open(place, os.O_PATH | os.O_CLOEXEC)
        try:
            rule = struct.pack("=Qi", rights, directory)
            self._checked(self._libc.syscall(_ADD_RULE, rules, _RULE_PATH, rule, 0))
        finally:
            os.close(directory)


def _texts(words: Sequence[str]) -> ctypes.Array:
    """Words as C has them: an array of pointers that ends with none."""
    return (ctypes.c_char_p * (len(words) + 1))(*map(os.fsencode, words), None)


@cache
def _readable() -> tuple[str, ...]:
    """The places that a program may read, those of them that there are."""
    prefixes = sys.base_prefix, os.path.dirname(os.path.dirname(PYTHON))
    folders = [os.path.join(prefix, name) for prefix in prefixes for name in ("lib", "lib64")]
    places = dict.fromkeys([*_READ, *folders, os.path.dirname(os.__file__), PYTHON, _WRITE])
    return tuple(filter(os.path.exists, places))


def _filters_calls(libc: ctypes.CDLL) -> bool:
    """Whether the system calls of this machine are known, and can be filtered."""
    has_seccomp = sys.maxsize > 1 << 32 and libc.prctl(_GET_SECCOMP, 0, 0, 0, 0) >= 0
    return has_seccomp and is_known(platform.machine())


def _landlock_version(libc: ctypes.CDLL) -> int:
    """The version of Landlock that this kernel has, from 1; -1 where it has none."""
    return libc.syscall(_CREATE_RULESET, None, 0, _ASK_VERSION)
