"""What runs in a process that was started (process.py): its keeper, and how it ends with its parent.

Nothing here loads torch or numpy (see process.py).
"""

import ctypes
import fcntl
import gc
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from .channel import Channel

# Options of prctl (linux/prctl.h).
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36
# Descriptors that a ForkServer is given for one process, at most.
_MOST_FDS = 16
# How often a parent is looked for, in seconds.
_POLL_S = 0.25


def keep(entry: str, fds: Sequence[int]) -> None:
    """What the keeper runs: a child that calls `entry`, until this child ends or the leash is let go.

    fds: the leash, the function's end of its channel, and what else the function inherits. On Linux,
    processes below the child whose parents end become children of the keeper. So it finds all of them.
    Elsewhere it ends the child's process group. It returns in the child alone.
    """
    leash, channel, *_ = fds
    _prctl(_SET_CHILD_SUBREAPER, 1)
    child = os.fork()
    if child == 0:
        os.close(leash)
        os.setpgid(0, 0)  # a kill of its own group does not reach the keeper
        die_with_parent()
        return _call(entry, Channel(socket.socket(fileno=channel)))
    for fd in fds[1:]:
        os.close(fd)
    threading.Thread(target=_obey, args=(leash, child), daemon=True).start()
    ended = 0
    while ended != child:
        ended, status = os.waitpid(-1, 0)
    _kill_all_below(child)
    with suppress(OSError):
        os.write(leash, b"%d %d" % (child, os.waitstatus_to_exitcode(status)))
    os._exit(0)


def _obey(leash: int, child: int) -> None:
    """Interrupt the child when the owner asks for it, and kill it when the leash is let go."""
    with suppress(OSError):
        while os.read(leash, 4096):
            os.kill(child, signal.SIGINT)
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)


def serve_forks(fd: int, preload: str) -> None:
    """What the process of a ForkServer runs: a fork for each message, until the connection `fd` is closed.

    Each fork is a keeper, and returns in the process of its function alone.
    """
    # What is imported is no garbage. A fork that looked through it would copy it: 0.6 s of CPU at its end.
    gc.disable()
    _call(preload)
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the owner sees by the leash that a keeper has ended
    with socket.socket(fileno=fd) as connection:
        channel, keeper = Channel(connection, reads_ahead=False), -1
        while keeper:
            try:
                _, fds, _, _ = socket.recv_fds(connection, 1, _MOST_FDS)
                entry, numbers, env = json.loads(channel.receive())
            except (EOFError, OSError):
                return  # the owner has ended
            if keeper := os.fork():
                for descriptor in fds:
                    os.close(descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    _renumber(fds, [1, 2, *numbers])
    os.environ.clear()
    os.environ.update(env)
    keep(entry, numbers)


def _renumber(fds: Sequence[int], numbers: Sequence[int]) -> None:
    """Give these descriptors the numbers that they have in the owner, whose messages name them so."""
    above = max(*fds, *numbers) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(moved, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def _call(entry: str, *arguments: Any) -> None:
    module, _, name = entry.partition(":")
    getattr(import_module(module), name)(*arguments)


def accept_interrupts() -> None:
    """Let this process see Ctrl-C, and what Process.interrupt sends."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def die_with_parent() -> None:
    """The kernel kills this process when the thread that has started it ends. Only Linux does that."""
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)


def end_with(parent: int) -> None:
    """End this process soon after the process `parent`, whose child it is, was killed.

    Ranks that outlive torchrun wait for each other, for up to half an hour, and hold the run's folder. Which
    thread has started them is not known.
    """

    def wait_for_its_end() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_S)
        os._exit(1)

    threading.Thread(target=wait_for_its_end, daemon=True).start()


def _prctl(option: int, value: int) -> None:
    """Set an option of this process. Only Linux has it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _kill_all_below(child: int) -> None:
    """End every process below the keeper. child: whose process group is ended first."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            for pid in _children():
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)


def _children() -> list[int]:
    """This process's children; none where the kernel does not list them."""
    pid = os.getpid()
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
