"""A root directory of its own for a program of the model's: what is not below it has no name there.

A namespace of users and one of mounts, which need no root where the kernel allows them to users. The program
sees the places that it is given, for reading only, and its scratch directory.

Nothing here loads torch or numpy (see processes/process.py).
"""

import ctypes
import os
import struct
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

# linux/sched.h, linux/mount.h; pivot_root's number by machine, and that of mount_setattr on all machines.
_NEW_USER, _NEW_MOUNTS = 0x10000000, 0x20000
_NO_SUID, _NO_DEVICES, _BIND, _RECURSIVE, _PRIVATE, _DETACH = 2, 4, 0x1000, 0x4000, 1 << 18, 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR, _HERE, _AT_RECURSIVE, _READ_ONLY = 442, -100, 0x8000, 1


@cache
def is_allowed(places: tuple[str, ...]) -> bool:
    """Whether this kernel lets this process give a child a root of its own. Tried in a child."""
    with tempfile.TemporaryDirectory(prefix="zerokl-") as scratch:
        child = os.fork()
        if child == 0:
            try:
                os.chdir(scratch)
                enter_private_root(scratch, places)
                os._exit(0)
            finally:
                os._exit(1)
        return os.waitpid(child, 0)[1] == 0


def enter_private_root(scratch: str, places: Sequence[str]) -> None:
    """Give this process a root of its own, with `places` and `scratch`, where this process is.

    It is for a child that has forked. Raises OSError where the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def checked(result: int) -> None:
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
        words = [word and os.fsencode(word) for word in (source, target, kind)]
        checked(libc.mount(*words, ctypes.c_ulong(flags), options and options.encode()))

    user, group = os.geteuid(), os.getegid()
    checked(libc.unshare(_NEW_USER | _NEW_MOUNTS))
    maps = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
    for name, text in maps.items():
        Path("/proc/self", name).write_text(text)
    mount("none", "/", None, _RECURSIVE | _PRIVATE)
    mount("tmpfs", scratch, "tmpfs", _NO_SUID | _NO_DEVICES, "size=1m,mode=755")
    for place in places:
        target = Path(scratch + place)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.mkdir() if os.path.isdir(place) else target.touch()
            mount(place, str(target), None, _BIND | _RECURSIVE)
    os.makedirs(scratch + scratch, exist_ok=True)
    attributes = struct.pack("4Q", _READ_ONLY, 0, 0, 0)
    where = os.fsencode(scratch)
    checked(libc.syscall(_MOUNT_SETATTR, _HERE, where, _AT_RECURSIVE, attributes, len(attributes)))
    mount(".", scratch + scratch, None, _BIND)  # the directory that the new root hides
    os.chdir(scratch)
    checked(libc.syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."))
    checked(libc.umount2(b".", _DETACH))
    os.chdir(scratch)
